"""Whole files that are opened without a look at the disk, where the kernel reads none by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.cache.file_cache import FileCache
from fusefs.cache.quota import Quota
from tests.support.survival.mortal_mount import MortalMount, Process

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    mount = MortalMount(tmp_path)
    mount.store.put("file", CONTENT)
    return mount


async def fetched(process: Process) -> None:
    """Have the file in the cache, and in its catalog."""
    assert await process.load("file") == CONTENT
    await process.operations.cache.record()


async def test_a_file_that_is_whole_is_opened_at_once(mount: MortalMount) -> None:
    async with mount.serving() as process:
        await fetched(process)
        inode = await process.node("file")
        before = len(mount.store.requests)
        for _ in range(2):
            opened = process.operations.open(inode.nodeid, 0, process.caller())
            assert not hasattr(opened, "send"), "it waits"
            file = process.operations.handles.files[opened.fh].file
            assert file.fd == -1
        assert await process.read(opened.fh) == CONTENT
        assert file.fd >= 0
        assert len(mount.store.requests) == before


async def test_what_another_mount_evicted_since_is_fetched_again(
    mount: MortalMount, tmp_path: Path
) -> None:
    async with mount.serving() as process:
        await fetched(process)
        fh = await process.open("file")
        other = FileCache(tmp_path / "cache", "test", Quota(tmp_path, None, lambda _size: 0))
        (same,) = other.files()
        await other.evict(same)
        assert other.evicted == 1
        await other.aclose(sync=False)
        before = mount.store.count("GET")
        assert await process.read(fh) == CONTENT
        assert mount.store.count("GET") > before
