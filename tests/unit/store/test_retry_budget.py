"""The pauses before a request is tried again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from fusefs.store.errors import AttemptError, Failure, ThrottledError
from fusefs.store.interface import demanded
from fusefs.store.s3.clients import S3Settings
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


async def test_the_wait_for_other_requests_leaves_time_to_try_again(
    mock_clock: trio.testing.MockClock,
) -> None:
    requester = Requester(S3Settings("bucket", max_connections=1, retry_time_s=60.0))
    requester.source.clients = cast(Any, SimpleNamespace(credentials=None))
    attempts: list[float] = []

    def work(_clients: object) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise AttemptError(Failure(ThrottledError, "slow down", is_retryable=True))

    async with trio.open_nursery() as nursery:
        async with requester.connections.lease(demanded):
            nursery.start_soon(requester.with_retries, "LIST", "", work)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(61.0)
        mock_clock.autojump_threshold = 0.01
    assert len(attempts) == 2
