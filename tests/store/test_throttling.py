"""A store that asks to slow down: how many requests it is sent, and what the log says of it.

How the rate finds a store's allowance is shown with a simulated clock, so that it does not
depend on this machine; a server that throttles by rate shows that the store keeps to it.
"""

import logging
import time
from collections import Counter

import pytest
import trio
import trio.testing

from fusefs.store.admission import rate as rate_module
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.admission.rate import Rate
from fusefs.store.interface import demanded
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import opened

READERS = 50
WHAT = "GET s3://b/k: S3 asks to slow down"


class Allowance:
    """A server's: so many requests a second, and a few at once."""

    def __init__(self, rate: float, burst: int = 10) -> None:
        self.rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = trio.current_time()

    def takes(self) -> bool:
        now = trio.current_time()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


async def _read(
    connections: ConnectionBudget, allowance: Allowance, answers: Counter[bool], latency_s: float
) -> None:
    """One reader: a request after the other, and a pause after each that was refused."""
    while True:
        async with connections.lease(demanded):
            await trio.sleep(latency_s)
            is_taken = allowance.takes()
        answers[is_taken] += 1
        if is_taken:
            connections.note_success()
        else:
            connections.note_throttled()
            connections.rate.note_refused(WHAT)
            await trio.sleep(0.1)


async def _measured(
    rate: float, latency_s: float, *, change_to: float | None = None
) -> tuple[float, float]:
    """The share of requests that is refused, and of the allowance that is used, after 10 s."""
    allowance, answers = Allowance(rate), Counter[bool]()
    async with trio.open_nursery() as nursery:
        connections = ConnectionBudget(32, nursery)
        for _ in range(READERS):
            nursery.start_soon(_read, connections, allowance, answers, latency_s)
        if change_to is not None:
            await trio.sleep(20)
            allowance.rate = change_to
        await trio.sleep(10)
        answers.clear()
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    taken = answers[True]
    return answers[False] / (taken + answers[False]), taken / (30 * allowance.rate)


@pytest.mark.parametrize(
    ("allowed", "latency_s"), [(20.0, 0.005), (100.0, 0.005), (100.0, 0.05), (300.0, 0.05)]
)
async def test_what_a_store_allows_is_used_and_little_more_is_sent(
    autojump_clock: trio.testing.MockClock, allowed: float, latency_s: float
) -> None:
    refused, used = await _measured(allowed, latency_s)
    print(f"{allowed:.0f}/s, {latency_s} s: {refused:.2%} refused, {used:.2%} used")
    assert refused <= 0.1
    assert used >= 0.9


async def test_a_load_below_the_limit_does_not_lower_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rate = Rate()
    rate.limit = 100.0
    rate._since = rate._grown = trio.current_time()
    for _ in range(150):
        await trio.sleep(1 / 30)
        rate.note_sent()
        rate.note_success()
    rate.note_refused(WHAT)
    assert rate.limit >= 95


async def test_a_limit_ends_a_minute_after_the_last_refusal(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rate = Rate()
    rate.note_refused(WHAT)
    assert rate.limit is None
    for _ in range(30):
        rate.note_success()
    await trio.sleep(1.5)
    rate.note_refused(WHAT)
    assert rate.limit == pytest.approx(20 * 0.95)
    await trio.sleep(rate_module.FORGET_S)
    assert rate.is_due()
    assert rate.limit is None


async def test_a_reader_that_is_cancelled_while_it_waits_for_its_turn_gives_its_connection_back(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    connections = ConnectionBudget(2, nursery)
    rate = connections.rate
    rate.note_refused(WHAT)
    await trio.sleep(1.5)
    rate.note_refused(WHAT)
    assert rate.limit == rate_module.LEAST
    async with connections.lease(demanded):
        pass
    with trio.move_on_after(0.1) as scope:
        async with connections.lease(demanded):
            raise AssertionError("too soon")
    assert scope.cancelled_caught
    assert connections.in_use == 0


async def test_the_log_has_one_line_a_minute(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    rate = Rate()
    with caplog.at_level(logging.INFO, "fusefs"):
        for _ in range(1250):  # 125 s
            rate.note_refused(WHAT)
            rate.note_success()
            await trio.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"{WHAT}: refused"
    assert len(lines) == 3
    assert f"{WHAT}: 600 requests refused since the last such line; at most " in lines[1]


@states(
    "A store that asks to slow down is sent as many requests a second as it takes; the log has a"
    " line a minute about it."
)
async def test_a_server_that_throttles_by_rate_refuses_little_and_serves_all(
    shared: Bucket, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    heads = 0
    async with opened(shared, faulty, max_connections=32) as store:
        await store.check("")
        rule = faulty.add("HEAD", code="SlowDown", above_per_s=50.0)
        end = time.monotonic() + 9

        async def read() -> None:
            nonlocal heads
            while time.monotonic() < end:
                await store.head("body")
                heads += 1

        with caplog.at_level(logging.INFO, "fusefs"):
            async with trio.open_nursery() as nursery:
                for _ in range(READERS):
                    nursery.start_soon(read)
                await trio.sleep(6)
                counted, refused = len(faulty.requests("HEAD")), rule.used
        counted, refused = len(faulty.requests("HEAD")) - counted, rule.used - refused
    print(f"after 6 s: {refused} of {counted} refused; {heads} in 9 s")
    assert refused <= 0.1 * counted
    # None where this machine is too slow to be refused anything.
    assert len([one for one in caplog.records if "slow down" in one.getMessage()]) <= 1
