"""The pauses before a request is tried again."""

from __future__ import annotations

import random
from typing import cast

import pytest
import trio
import trio.testing

from fusefs.store.engine.engine import Completion, Engine
from fusefs.store.interface import demanded
from fusefs.store.s3.access import Access, S3Settings
from fusefs.store.s3.list import list_call
from fusefs.store.s3.requester import LAST_PAUSE_S, Requester, RetryBudget


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def test_pauses_double_up_to_a_limit_until_something_is_achieved(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    budget = RetryBudget(1000.0, lambda: clock[0])
    pauses = [budget.pause_s() for _ in range(10)]
    assert pauses[:5] == [pytest.approx(pauses[0] * 2**n) for n in range(5)]
    assert pauses[0] < 1 < pauses[-1] == LAST_PAUSE_S
    budget.restart()
    assert budget.pause_s() == pauses[0]


def test_clients_that_failed_together_do_not_come_back_together(clock: list[float]) -> None:
    clients = [RetryBudget(1000.0, lambda: clock[0]) for _ in range(50)]
    assert len({client.pause_s() for client in clients}) == 50
    assert max(client.pause_s() for client in clients) > 2 * min(c.pause_s() for c in clients)


def test_no_pause_goes_beyond_the_time_that_there_is(clock: list[float]) -> None:
    budget = RetryBudget(3.0, lambda: clock[0])
    for _ in range(20):
        assert budget.pause_s() <= 103.0 - clock[0]
        clock[0] += 0.14
    assert budget.has_time()
    clock[0] = 103.0
    assert not budget.has_time()
    assert budget.pause_s() == 0


class ThrottlingEngine:
    """Answers the first request with status 503 and the others with 200."""

    sent = 0

    async def send(self, *_: object) -> Completion:
        await trio.lowlevel.checkpoint()
        self.sent += 1
        status = 503 if self.sent == 1 else 200
        return Completion(status, {}, b"", 0, None, 0, 0, "", False, 0.0, 0.1, 0.1)


async def test_the_wait_for_other_requests_leaves_time_to_try_again(
    mock_clock: trio.testing.MockClock,
) -> None:
    engine, attempts = ThrottlingEngine(), 2
    settings = S3Settings(
        "bucket", "http://127.0.0.1:9", anonymous=True, max_connections=1, retry_time_s=60.0
    )
    requester = Requester(settings, engine=cast(Engine, engine))
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
