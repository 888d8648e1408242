"""The cache without a mount: a directory, a bucket in memory, and the parts that use both.

`Bucket` keeps no bytes: an object's content follows from its key and version,
so tests can compare whatever they read. It can be held up (`hold`), fail
(`fault`), and tells which ranges were asked for (`asked`) and are under way
(`running`).
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import trio
import trio.testing

from fusefs.cache.eviction import Space
from fusefs.cache.fetch import Fetcher
from fusefs.cache.files import CacheFile, FileCache
from fusefs.store.base import (
    ChunkWriter,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    Priority,
    Urgency,
    demanded,
)

CHUNK = 64 << 10
LIMIT_S = 60


@lru_cache(maxsize=64)
def content(version: ObjectVersion) -> bytes:
    """What the object holds."""
    return random.Random(f"{version.key} {version.etag}").randbytes(version.size)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds, some of which happens in threads."""
    with trio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for tests
            await trio.sleep(0.001)


def version(key: str, size: int, etag: str = '"1"') -> ObjectVersion:
    return ObjectVersion(key, etag, size)


class Bucket:
    """A store of which only downloads are used."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.running: list[tuple[str, int, int]] = []
        self.overlapped = False
        self.open = trio.Event()
        self.open.set()
        # Called before each chunk with (key, offset); may raise.
        self.fault: Callable[[str, int], None] = lambda _key, _offset: None

    def hold(self) -> None:
        """Let no chunk through until `let_go`."""
        self.open = trio.Event()

    def let_go(self) -> None:
        self.open.set()

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        *,
        priority: Urgency = demanded,
    ) -> None:
        assert 0 <= start < stop <= version.size
        mine = (version.key, start, stop)
        self.asked.append(mine)
        for key, other_start, other_stop in self.running:
            if key == version.key and start < other_stop and other_start < stop:
                self.overlapped = True
        self.running.append(mine)
        try:
            data = memoryview(content(version))
            for at in range(start, stop, CHUNK):
                await self.open.wait()
                self.fault(version.key, at)
                chunk = data[at : min(at + CHUNK, stop)]
                await trio.to_thread.run_sync(write, at, chunk)
        finally:
            self.running.remove(mine)

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        token: str | None = None,
        max_keys: int = 1000,
        priority: Priority = Priority.DEMAND,
    ) -> ListPage:
        raise AssertionError("nothing is listed here")

    async def head(self, key: str, *, priority: Priority = Priority.DEMAND) -> ObjectInfo:
        raise AssertionError("nothing is asked for here")

    def hurry(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {}


@dataclass
class Parts:
    """The cache of one mount, whose downloads live as long as the `async with` block."""

    bucket: Bucket
    space: Space
    cache: FileCache
    fetcher: Fetcher
    directory: Path

    async def read(self, version: ObjectVersion, start: int, stop: int) -> bytes:
        """Read as an open file does."""
        file = self.cache.pin(version)
        try:
            return await self.read_pinned(file, start, stop)
        finally:
            self.cache.unpin(file)

    async def read_pinned(self, file: CacheFile, start: int, stop: int) -> bytes:
        await self.fetcher.wait_for(file, start, stop)
        return os.pread(file.fd, stop - start, start)

    async def fetch(self, version: ObjectVersion) -> None:
        """Have all of an object in the cache."""
        assert await self.read(version, 0, version.size) == content(version)
        await self.quiet()

    def bytes_on_disk(self) -> int:
        """What the files of the cache hold, by what is allocated for them."""
        return sum(path.stat().st_blocks * 512 for path in self.files())

    def files(self) -> list[Path]:
        return sorted(path for path in (self.directory / "objects").glob("*/*"))

    async def quiet(self) -> None:
        """Wait until no download is under way."""
        await trio.testing.wait_all_tasks_blocked()  # those just started count as well
        await until(lambda: not self.fetcher.under_way)


@asynccontextmanager
async def cache_in(
    directory: Path, *, limit: int | None = None, floor: int = 0, bucket: Bucket | None = None
) -> AsyncIterator[Parts]:
    """The cache of a new mount in `directory`, ended cleanly with the block."""
    os.makedirs(directory, exist_ok=True)
    space = Space(directory, limit, lambda _size: floor)
    cache = FileCache(directory, "test", space)
    store = bucket or Bucket()
    try:
        async with trio.open_nursery() as nursery:
            yield Parts(store, space, cache, Fetcher(store, cache, space, nursery), directory)
            nursery.cancel_scope.cancel()
    finally:
        await cache.aclose()
