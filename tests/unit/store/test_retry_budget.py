"""The pauses before a request is tried again."""

from __future__ import annotations

import random

import pytest

from fusefs.store.s3.requester import LAST_PAUSE_S, RetryBudget


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
