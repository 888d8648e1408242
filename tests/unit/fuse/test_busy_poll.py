"""When requests are polled for, and when that is given up."""

import os

import pytest

from fusefs.fuse.busy_poll import FIRST_PAUSE, LONGEST_NS, MOST_NS, BusyPoll


@pytest.fixture
def busy_poll(monkeypatch: pytest.MonkeyPatch) -> BusyPoll:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return BusyPoll()


def poll_in_vain(busy_poll: BusyPoll, count: int) -> int:
    """Wait for a request that does not come; return how many of the waits were polled."""
    polled = 0
    for _ in range(count):
        if busy_poll.is_worth_it():
            busy_poll.account(1, 0, LONGEST_NS)
            polled += 1
    return polled


def test_polling_stops_where_no_request_comes(busy_poll: BusyPoll) -> None:
    # A loss is noticed after 2 ms of polling at the latest.
    first = poll_in_vain(busy_poll, 1000)
    assert first <= 2 * (MOST_NS // LONGEST_NS) * (1 + 1000 // FIRST_PAUSE)
    # The longer it was in vain, the rarer it is tried again.
    poll_in_vain(busy_poll, 20_000)
    assert poll_in_vain(busy_poll, 20_000) <= 20_000 // 20


def test_polling_begins_again_with_the_requests(busy_poll: BusyPoll) -> None:
    poll_in_vain(busy_poll, 1000)
    polled = 0
    for _ in range(10_000):
        if busy_poll.is_worth_it():
            busy_poll.account(1, 1, LONGEST_NS // 10)
            polled += 1
    assert polled > 5_000


def test_one_processor_is_not_polled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert not BusyPoll().is_worth_it()
