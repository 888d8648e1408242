"""When the session polls for its next request, and when it gives that up."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fusefs.fuse.busy_poll import FIRST_PAUSE, LONGEST_NS, MOST_NS, BusyPoll, polling
from fusefs.settings.types import BusyPolling


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def poll_in_vain(busy_poll: BusyPoll, count: int) -> int:
    """Wait for a request that does not come; return how many of the waits were polled."""
    before = busy_poll.polled
    for _ in range(count):
        assert not busy_poll.finds_request()
    return busy_poll.polled - before


def test_a_request_that_is_there_is_found(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"request")
    busy_poll = BusyPoll(reader)
    assert busy_poll.finds_request()
    assert (busy_poll.polled, busy_poll.hits) == (1, 1)


def test_polling_stops_where_no_request_comes(pipe: tuple[int, int]) -> None:
    busy_poll = BusyPoll(pipe[0])
    # A loss is noticed after 2 ms of polling at the latest.
    first = poll_in_vain(busy_poll, 1000)
    assert first <= 2 * (MOST_NS // LONGEST_NS) * (1 + 1000 // FIRST_PAUSE)
    assert busy_poll.spent_ns >= MOST_NS
    # The longer it was in vain, the rarer it is tried again.
    poll_in_vain(busy_poll, 20_000)
    assert poll_in_vain(busy_poll, 20_000) <= 20_000 // 20


def test_polling_begins_again_with_the_requests(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    busy_poll = BusyPoll(reader)
    poll_in_vain(busy_poll, 1000)
    os.write(writer, b"request")
    assert any(busy_poll.finds_request() for _ in range(10_000))


def test_polling_that_is_always_on_goes_on(pipe: tuple[int, int]) -> None:
    busy_poll = BusyPoll(pipe[0], is_always=True)
    assert poll_in_vain(busy_poll, 200) == 200


def test_one_processor_is_not_polled_on(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert polling(pipe[0], BusyPolling.AUTO) is None
    assert polling(pipe[0], BusyPolling.ON) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    assert polling(pipe[0], BusyPolling.AUTO) is not None
    assert polling(pipe[0], BusyPolling.OFF) is None
