"""The end of a mount takes no longer than it has to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from fusefs.cache import catalog_writer, file_cache
from fusefs.cache.catalog import Catalog
from fusefs.cache.disk import Disk
from fusefs.cache.purge import find_obstacles
from tests.support.local_cache import cache_in, version
from tests.support.semantics import states

FILES = 60


@states(
    "The end of a mount waits some seconds at most for its cached files to be safe "
    "against a power cut; what was not is fetched again after one."
)
async def test_a_slow_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not made safe in time counts as lost after a power cut, and only then."""
    synced = []

    def sync_slowly(_self: Disk, name: str, _generation: str) -> bool:
        time.sleep(0.02)
        synced.append(name)
        return True

    monkeypatch.setattr(file_cache, "SYNC_AFTER_S", 0.1)
    monkeypatch.setattr(catalog_writer, "SYNC_GO_S", 0.1)
    async with cache_in(tmp_path) as parts:
        for number in range(FILES):
            await parts.fetch(version(str(number), 100))
        monkeypatch.setattr(Disk, "sync", sync_slowly)
    assert 0 < len(synced) < FILES
    async with cache_in(tmp_path) as parts:
        for number in range(FILES):
            await parts.fetch(version(str(number), 100))
        assert parts.bucket.requested == []


async def test_a_directory_that_a_mount_reads_is_in_use(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "0123456789abcdef"):
        assert find_obstacles(tmp_path) == {"is_used": True, "leftovers": 0}
    assert find_obstacles(tmp_path) == {"is_used": False, "leftovers": 0}


async def test_what_is_not_safe_yet_when_the_mount_ends_is_made_safe_then(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(version("a", 10_000))
        await parts.cache.record()
        with trio.CancelScope() as ending:
            ending.cancel()
            await parts.cache._catalog_writer.sync(idle_s=0.0)
    [row] = Catalog(tmp_path / "catalog.sqlite3", "another boot").newest(1000)
    assert row.is_synced
