"""Threads that wait for S3: where the system has none to give, and where many want the same."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from fusefs.store.errors import AttemptError, Failure, StoreError
from fusefs.store.http.threads import SharedCall, Threads
from tests.support.waiting import eventually

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


async def test_who_is_cancelled_does_not_wait_for_a_call_that_others_share() -> None:
    may_end = threading.Event()
    begun: list[None] = []
    got: list[int] = []

    def work() -> int:
        begun.append(None)
        may_end.wait(10)
        return 7

    call = SharedCall(got.append)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(call.wait, work)
        await eventually(lambda: bool(begun))
        nursery.cancel_scope.cancel()
    assert (len(begun), got) == (1, [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.wait, work)
        await trio.testing.wait_all_tasks_blocked()
        may_end.set()
    assert (len(begun), got) == (1, [7])


async def test_a_shared_call_that_fails_fails_for_all_and_is_made_again() -> None:
    begun: list[None] = []

    def work() -> None:
        begun.append(None)
        raise AttemptError(Failure(StoreError, "no answer"))

    call = SharedCall(print)
    for times in (1, 2):
        with pytest.raises(AttemptError, match="no answer"):
            await call.wait(work)
        assert len(begun) == times
    assert not call.is_under_way
