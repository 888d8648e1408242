"""What readahead learns of the opens of small files, through the operations of a whole mount."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio.testing

from fusefs.cache.readahead.siblings import FOLDER_AFTER, UNREAD_EACH
from fusefs.store.errors import ArchivedError
from tests.support.survival.mortal_mount import MortalMount
from tests.support.waiting import eventually


async def test_without_passthrough_opens_of_what_was_fetched_ahead_count(tmp_path: Path) -> None:
    mount, count, missed = MortalMount(tmp_path), 300, 0
    for number in range(count):
        mount.store.put(f"d/{number:04}", b"x" * 1000)
    async with mount.serving() as process:
        await process.listing("d")
        operations = process.operations
        for number in range(count):
            info = (await process.node(f"d/{number:04}")).info
            assert info is not None
            file = operations.cache.find(info.version)
            missed += file is None or not file.is_complete
            handle = await process.open(f"d/{number:04}")
            await process.read(handle)
            operations.release(handle)
            await trio.testing.wait_all_tasks_blocked()
            await eventually(lambda: not operations.downloader.under_way)
    assert missed == FOLDER_AFTER


async def test_a_folder_whose_files_are_refused_is_not_requested_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, gets, opens = MortalMount(tmp_path), 0, 10
    for number in range(1000):
        mount.store.put(f"d/{number:04}", b"x" * 1000)

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal gets
        gets += 1
        await trio.lowlevel.checkpoint()
        raise ArchivedError("it is archived")

    monkeypatch.setattr(mount.store, "download", refuse)
    async with mount.serving() as process:
        await process.listing("d")
        for number in range(opens):
            with pytest.raises(OSError, match="it is archived"):
                await process.open(f"d/{number:04}")
            await trio.testing.wait_all_tasks_blocked()
            await eventually(lambda: not process.operations.downloader.under_way)
    assert opens <= gets <= opens + UNREAD_EACH * FOLDER_AFTER
