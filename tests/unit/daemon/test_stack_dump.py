"""What a daemon tells about its tasks and threads is bounded."""

from __future__ import annotations

import linecache
import threading

import pytest
import trio
import trio.testing

from fusefs.daemon import stack_dump


async def sleep_below(depth: int) -> None:
    if depth:
        await sleep_below(depth - 1)
    else:
        await trio.sleep_forever()


async def test_equal_tasks_are_shown_once_with_their_number() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(sleep_below, 3)
        nursery.start_soon(sleep_below, 1)
        await trio.testing.wait_all_tasks_blocked()
        text = stack_dump.collect()["tasks"]
        nursery.cancel_scope.cancel()
    assert text.count("sleep_below (20 times)") == 1
    assert text.count(f"{__file__}:") >= 4


async def test_many_tasks_are_left_out() -> None:
    async with trio.open_nursery() as nursery:
        for number in range(stack_dump.MOST_TASKS + 500):
            nursery.start_soon(sleep_below, number % 40)
        await trio.testing.wait_all_tasks_blocked()
        text = stack_dump.collect()["tasks"]
        nursery.cancel_scope.cancel()
    assert len(text) <= stack_dump.MOST_BYTES + 100


async def test_threads_are_shown_by_their_names() -> None:
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait, name="a-thread-of-the-test")
    thread.start()
    text = stack_dump.collect()["threads"]
    ending.set()
    thread.join()
    assert "thread a-thread-of-the-test" in text
    assert "thread MainThread" in text
    assert f"{__file__}:" in text


async def test_no_source_is_read_for_the_stacks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(linecache, "checkcache", lambda filename=None: read.append(str(filename)))
        threads = stack_dump.collect()["threads"]
    assert threads
    assert read == []
