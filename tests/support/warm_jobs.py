"""A daemon's warm jobs over an in-memory bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio

from fusefs.daemon.jobs.cache_warmer import CacheWarmer
from fusefs.daemon.jobs.local_copies import LocalCopies
from fusefs.daemon.jobs.selection import Selector
from fusefs.settings.mount import MountSettings, MountSource
from tests.support.local_cache import Bucket, Parts, cache_in

NO_ATTRIBUTES = cast(Any, SimpleNamespace(lacks_version=lambda _info: False))
FRESH = cast(Any, SimpleNamespace(is_fresh=True))
NEXT_DAEMON = cast(Any, SimpleNamespace(is_fresh=False))
# What a list of a job may be called.
LIST = "ab" * 8


class WideBucket(Bucket):
    def counters(self) -> dict[str, int]:
        return {"connections": 8}


def warmer_of(parts: Parts, directory: Path) -> CacheWarmer:
    source, mountpoint = MountSource("bucket"), directory / "mnt"
    settings = MountSettings(source=source, mountpoint=mountpoint, cache_dir=directory)
    bucket = cast(Any, parts.bucket)
    return CacheWarmer(bucket, parts.cache, parts.downloader, settings, Selector(bucket, ""))


@dataclass
class Jobs:
    """What a daemon's commands reach."""

    parts: Parts
    warmer: CacheWarmer
    copies: LocalCopies


@asynccontextmanager
async def jobs_in(directory: Path, bucket: Bucket) -> AsyncIterator[Jobs]:
    async with (
        cache_in(directory / "cache", bucket=bucket) as parts,
        trio.open_nursery() as nursery,
    ):
        warmer = warmer_of(parts, directory)
        nursery.start_soon(warmer.run, FRESH, NO_ATTRIBUTES)
        selector = Selector(cast(Any, bucket), "")
        copies = LocalCopies(
            parts.cache, parts.evictor, selector, "", nursery, lambda _: (0, 0), warmer.cancel_pins
        )
        yield Jobs(parts, warmer, copies)
        nursery.cancel_scope.cancel()
