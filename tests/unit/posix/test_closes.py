"""Uploads under local durability wait for a pause between closes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusefs.posix.write.closes import QUIET_S, RecentCloses
from fusefs.posix.write.flush import LATER_S
from tests.support.semantics import states
from tests.support.survival.mortal_mount import LOCAL, MortalMount, Process


@asynccontextmanager
async def closes() -> AsyncIterator[RecentCloses]:
    async with trio.open_nursery() as nursery:
        yield RecentCloses(nursery)
        nursery.cancel_scope.cancel()


async def test_all_that_wait_go_on_at_the_first_pause(autojump_clock: MockClock) -> None:
    async with closes() as one, trio.open_nursery() as nursery:
        events = [trio.Event() for _ in range(3)]
        one.note()
        for event in events:
            nursery.start_soon(one.wait_for_pause, event, trio.current_time() + 5)
        begun = trio.current_time()
        for _ in range(10):
            await trio.sleep(QUIET_S / 2)
            one.note()
        assert not any(event.is_set() for event in events)
        for event in events:
            await event.wait()
        assert trio.current_time() == pytest.approx(begun + 6 * QUIET_S)


async def test_one_that_may_wait_no_longer_goes_on(autojump_clock: MockClock) -> None:
    async with closes() as one:
        one.note()
        hurry, begun = trio.Event(), trio.current_time()
        await one.wait_for_pause(hurry, begun + QUIET_S / 2)
        assert trio.current_time() == pytest.approx(begun + QUIET_S / 2)
        hurry.set()
        await one.wait_for_pause(hurry, begun + 5)
        assert trio.current_time() == pytest.approx(begun + QUIET_S / 2)


async def go_on_closing(process: Process) -> None:
    """What programs do that close one file after the other, without an end."""
    while True:
        process.writer.uploads.closes.note()
        await trio.sleep(QUIET_S / 2)


async def sent_after_s(directory: Path, *, limit: int | None) -> float:
    """Until the upload of a file is begun while others are closed, in seconds of trio's clock."""
    mount, sent = MortalMount(directory), trio.Event()
    mount.store.before = lambda _what, _key: sent.set()
    async with mount.serving(durability=LOCAL) as process, trio.open_nursery() as nursery:
        process.writer.staging._limit = limit
        await process.save("file", b"content")
        begun = trio.current_time()
        nursery.start_soon(go_on_closing, process)
        await sent.wait()
        nursery.cancel_scope.cancel()
        return trio.current_time() - begun


@states(
    "With `--durability local`, uploads wait while programs close one file after the other, "
    "5 s at most, unless half of `--staging-size` is used."
)
@pytest.mark.parametrize(("limit", "waits_s"), [(None, 5.0), (100, 5.0), (13, LATER_S)])
async def test_an_upload_waits_while_others_are_closed(
    tmp_path: Path, autojump_clock: MockClock, limit: int | None, waits_s: float
) -> None:
    assert await sent_after_s(tmp_path, limit=limit) == pytest.approx(waits_s)
