"""What the bucket said before this mount changed the object is not what it has now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.waiting import eventually


class SlowListing:
    """Has the answer to the first LIST wait, until `let_go`."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = trio.Event()
        self.answered = 0
        list_page = store.list_page

        async def slow(prefix: str, **options: Any) -> object:
            found = await list_page(prefix, **options)
            self.answered += 1
            if self.answered == 1:
                await self.let_go.wait()
            return found

        monkeypatch.setattr(store, "list_page", slow)


async def open_by_node(process: Process, nodeid: int) -> None:
    """An open for which the kernel does not look the name up, and which asks the bucket."""
    inode = process.operations.inodes.get(nodeid)
    inode.looked_up, inode.valid_until = False, 0.0
    for segment in process.writer.directories.get("").segments:
        segment.sure_until = 0.0
    answer = process.operations.open(nodeid, os.O_RDONLY, process.caller())
    assert hasattr(answer, "__await__")
    with suppress(OSError):  # ESTALE, for the kernel to look the name up
        process.operations.release((await answer).fh)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_an_open_that_asked_before_a_write_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    mount = MortalMount(tmp_path)
    mount.store.put("file", b"old")
    async with mount.serving() as process:
        assert await process.load("file") == b"old"
        nodeid = (await process.node("file")).nodeid
        if not is_closed:
            mount.store.put("file", b"another client's")
        listing = SlowListing(mount.store, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_by_node, process, nodeid)
            await eventually(lambda: listing.answered == 1)
            fh = await process.open("file", os.O_WRONLY | os.O_TRUNC)
            await process.write(fh, 0, b"new")
            if is_closed:
                await process.close(fh)
            listing.let_go.set()
        assert await process.load("file") == b"new"
        if not is_closed:
            await process.close(fh)
    assert mount.store.contents()["file"] == b"new"
