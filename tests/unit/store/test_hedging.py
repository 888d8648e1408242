"""Second requests and retries: when they are sent, and how many."""

import math
import random
from collections import Counter
from typing import cast

import pytest
import trio
import trio.testing

from fusefs.store.admission import hedging as hedging_module
from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.admission.hedging import LEAST_SAMPLES, MOST_AT_ONCE, SHARE, Hedging
from fusefs.store.engine.engine import Completion, Engine
from fusefs.store.interface import demanded
from fusefs.store.s3.access import Access
from fusefs.store.s3.list import list_call
from fusefs.store.s3.requester import LAST_PAUSE_S, Requester, RetryBudget
from fusefs.store.s3.settings import S3Settings

NO_TASKS = cast(trio.Nursery, None)


def warmed(connections: ConnectionBudget | None = None) -> Hedging:
    """It has seen many GETs, of which each took 30 ms."""
    hedging = Hedging(connections or ConnectionBudget(8, NO_TASKS), Counter())
    for _ in range(2 * LEAST_SAMPLES):
        hedging.note_sent()
        hedging.note_first_byte(0.03)
    return hedging


def test_nothing_is_slow_before_many_were_seen() -> None:
    hedging = Hedging(ConnectionBudget(8, NO_TASKS), Counter())
    for _ in range(LEAST_SAMPLES - 1):
        hedging.note_first_byte(0.03)
    assert hedging.wait_s == math.inf
    hedging.note_first_byte(0.03)
    assert hedging.wait_s == pytest.approx(0.06)


def test_slow_is_what_nearly_all_were_not() -> None:
    hedging = Hedging(ConnectionBudget(8, NO_TASKS), Counter())
    for number in range(1000):
        slow = number % 100
        hedging.note_first_byte(0.03 if slow >= 10 else 0.1 if slow >= 2 else 0.3)
    assert hedging.wait_s == 0.1


def test_a_server_nearby_is_given_some_time() -> None:
    hedging = Hedging(ConnectionBudget(8, NO_TASKS), Counter())
    for _ in range(LEAST_SAMPLES):
        hedging.note_first_byte(0.0005)
    assert hedging.wait_s == hedging_module.LEAST_S


def test_the_share_of_second_requests_is_bounded() -> None:
    hedging = Hedging(ConnectionBudget(8, NO_TASKS), Counter())
    sent = again = at_once = 0
    for _ in range(10_000):
        hedging.note_sent()
        sent += 1
        if hedging.take():
            hedging.give_back(has_won=False)
            again += 1
        assert again <= SHARE * sent
    assert again >= 0.99 * SHARE * sent
    for _ in range(10_000):
        hedging.note_sent()
    while hedging.take():
        hedging.give_back(has_won=True)
        at_once += 1
    assert at_once == MOST_AT_ONCE


async def test_nothing_is_sent_again_over_connections_that_others_need() -> None:
    connections = ConnectionBudget(8, NO_TASKS)
    hedging = warmed(connections)
    # Two of the eight are kept for demands.
    leases = [connections.lease(demanded) for _ in range(6)]
    for lease in leases:
        await lease.__aenter__()
    assert not hedging.take()
    await leases.pop().__aexit__()
    assert hedging.take()
    assert not hedging.take()
    hedging.give_back(has_won=False)
    for lease in leases:
        await lease.__aexit__()
    assert connections.in_use == 0


async def test_nothing_is_sent_again_while_the_store_asks_to_slow_down() -> None:
    connections = ConnectionBudget(8, NO_TASKS)
    hedging = warmed(connections)
    connections.note_throttled()
    assert not hedging.take()
    for _ in range(100):
        connections.note_success()
    assert hedging.take()
    connections.rate.limit = 1000.0
    assert not hedging.take()


async def test_pauses_double_up_to_a_limit_until_something_is_achieved(
    monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    budget = RetryBudget(1000.0)
    pauses = [budget.pause_s() for _ in range(10)]
    assert pauses[:5] == [pytest.approx(pauses[0] * 2**n) for n in range(5)]
    assert pauses[0] < 1 < pauses[-1] == LAST_PAUSE_S
    budget.restart()
    assert budget.pause_s() == pauses[0]


async def test_clients_that_failed_together_do_not_come_back_together() -> None:
    clients = [RetryBudget(1000.0) for _ in range(50)]
    assert len({client.pause_s() for client in clients}) == 50
    assert max(client.pause_s() for client in clients) > 2 * min(c.pause_s() for c in clients)


async def test_no_pause_goes_beyond_the_time_that_there_is(
    mock_clock: trio.testing.MockClock,
) -> None:
    budget, end = RetryBudget(3.0), trio.current_time() + 3.0
    for _ in range(20):
        assert budget.pause_s() <= end - trio.current_time()
        mock_clock.jump(0.14)
    assert budget.has_time()
    mock_clock.jump(0.2)
    assert not budget.has_time()
    assert budget.pause_s() == 0


class ThrottlingEngine:
    """Answers the first request with status 503 and the others with 200."""

    sent = 0
    nursery = NO_TASKS

    async def send(self, *_: object) -> Completion:
        await trio.lowlevel.checkpoint()
        self.sent += 1
        status = 503 if self.sent == 1 else 200
        return Completion(status, {}, b"", 0, None, 0, 0, "", 0.0, 0.1, 0.1)


async def test_the_wait_for_other_requests_leaves_time_to_try_again(
    mock_clock: trio.testing.MockClock,
) -> None:
    engine, attempts = ThrottlingEngine(), 2
    settings = S3Settings(
        "bucket", "http://127.0.0.1:9", anonymous=True, max_connections=1, retry_time_s=60.0
    )
    requester = Requester(settings, cast(Engine, engine))
    requester.source.access = Access(settings)

    async def send() -> None:
        await requester.send(list_call("", "", "", 1), lambda _: None)

    async with trio.open_nursery() as nursery:
        async with requester.connections.lease(demanded):
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(61.0)
        mock_clock.autojump_threshold = 0.01
    assert engine.sent == attempts
