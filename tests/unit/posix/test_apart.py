"""Changes that go on when the request for them is cancelled."""

import errno

import pytest
import trio
import trio.lowlevel

from fusefs.posix.namespace.uncancelled import UncancelledRunner


def never() -> None:
    raise AssertionError("somebody waited")


async def test_what_no_task_waits_for_any_more_is_done_to_its_end() -> None:
    gate = trio.Event()
    done: list[str] = []

    async def work() -> str:
        await gate.wait()
        done.append("worked")
        return "result"

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0) as scope:
            apart = UncancelledRunner(nursery, lambda: done.append("unseen"))
            await apart.run(work(), unwanted=done.append)
        assert scope.cancelled_caught
        assert done == []
        gate.set()
    assert done == ["worked", "unseen", "result"]


async def test_a_failure_that_no_task_waits_for_ends_nothing_else() -> None:
    gate = trio.Event()
    unseen: list[int] = []

    async def work() -> None:
        await gate.wait()
        raise OSError(errno.EIO, "broken")

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0):
            await UncancelledRunner(nursery, lambda: unseen.append(1)).run(work())
        gate.set()
    assert unseen == [1]


async def test_a_fault_ends_who_waits_for_it_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    async with trio.open_nursery() as nursery:
        apart = UncancelledRunner(nursery, lambda: None)
        with pytest.raises(ZeroDivisionError):
            await apart.run(fail())
        with trio.move_on_after(0):
            await apart.run(fail())
    assert "ZeroDivisionError" in caplog.text
