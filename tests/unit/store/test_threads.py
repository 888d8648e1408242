"""Threads that wait for S3 where the system has none to give for a while."""

from __future__ import annotations

import threading

import pytest
import trio

from fusefs.store.errors import AttemptError
from fusefs.store.http.threads import Threads

MAXIMUM = 2


def _refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_threads_that_could_not_be_started_are_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(MAXIMUM)
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", _refuse)
        for _ in range(MAXIMUM + 1):
            with pytest.raises(AttemptError, match="no thread") as raised:
                await threads.run(lambda: None)
            assert raised.value.failure.is_retryable
    both = threading.Barrier(MAXIMUM)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(MAXIMUM):
                nursery.start_soon(threads.run, both.wait)
    threads.close()


async def test_where_no_more_can_be_started_those_that_are_there_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(MAXIMUM)
    assert await threads.run(lambda: 1) == 1
    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for number in range(3 * MAXIMUM):
                nursery.start_soon(threads.run, lambda number=number: done.append(number))
    assert sorted(done) == list(range(3 * MAXIMUM))
    threads.close()
