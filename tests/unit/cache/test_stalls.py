"""What a read waits for that the cache holds up: its disk, or its being full."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.cache.disk import Disk
from fusefs.telemetry.stalls import STALLS, WaitCause, served
from tests.support.local_cache import Parts, cache_in, version
from tests.support.stalls import mostly

MIB = 1 << 20


def slowly(work: Callable[..., Any], seconds: float = 0.5) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return work(*arguments)

    return slow


async def read(parts: Parts, key: str) -> None:
    with served():
        await parts.read(version(key, MIB), 0, MIB)


async def test_a_slow_cache_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cache_in(tmp_path) as parts:
        monkeypatch.setattr(os, "pwrite", slowly(os.pwrite, 0.05))
        with mostly(WaitCause.CACHE_DISK):
            await read(parts, "a")


async def test_a_cache_file_that_opens_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await read(parts, "a")
        monkeypatch.setattr(Disk, "open", slowly(Disk.open))
        with mostly(WaitCause.CACHE_DISK):
            await read(parts, "a")


async def test_a_cache_that_has_to_evict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        await read(parts, "a")
        await read(parts, "b")
        monkeypatch.setattr(Disk, "unlink", slowly(Disk.unlink))
        with mostly(WaitCause.CACHE_FULL):
            await read(parts, "c")


async def test_a_download_counts_from_its_first_reader_on(tmp_path: Path) -> None:
    """What is fetched ahead holds up no program, until one comes for it."""
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        file = parts.cache.pin(version("a", MIB))
        before = STALLS.totals().wait
        started = parts.downloader.want(file, 0, MIB)
        started[0].work.enter(WaitCause.S3_FIRST_BYTE)
        assert STALLS.totals().wait == before
        parts.bucket.hold()
        nursery.start_soon(read, parts, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert STALLS.totals().wait[WaitCause.S3_FIRST_BYTE] > before[WaitCause.S3_FIRST_BYTE]
        parts.bucket.let_go()
        await parts.quiet()
        started[0].work.leave(WaitCause.S3_FIRST_BYTE)
        parts.cache.unpin(file)
