"""The cache without a mount: a directory, a bucket in memory, and the parts that use both.

`Bucket` keeps no bytes: an object's content follows from its key and version,
so tests can compare whatever they read. It can be held up (`hold`), fail
(`fault`), and records the requests.
"""

import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog import Row
from fusefs.cache.downloader import Downloader
from fusefs.cache.evictor import Evictor
from fusefs.cache.file_cache import FileCache
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.cache.quota import Quota
from fusefs.daemon.jobs.cache_warmer import CacheWarmer
from fusefs.daemon.jobs.local_copies import LocalCopies
from fusefs.daemon.jobs.selection import Selector
from fusefs.settings.mount import MountSettings, MountSource
from fusefs.store.errors import NotFoundError
from fusefs.store.interface import ObjectInfo, ObjectVersion, Sink
from tests.support.memory_store import MemoryStore
from tests.support.waiting import eventually

CHUNK = 64 << 10
LIMIT_S = 60


@lru_cache(maxsize=64)
def content(version: ObjectVersion) -> bytes:
    """What the object holds: a stretch that is repeated, of no round length."""
    stretch = random.Random(f"{version.key} {version.etag}").randbytes(min(version.size, 100_003))
    return (stretch * (version.size // 100_003 + 1))[: version.size]


def version(key: str, size: int, etag: str = '"1"') -> ObjectVersion:
    return ObjectVersion(key, etag, size)


class Bucket(MemoryStore):
    """Has no bytes: it lists `keys`, and gives any version of anything.

    `page_size` is the most that one answer lists; `lists` and `heads` count
    the requests; `requested` and `running` have the ranges (key, start, stop).
    """

    def __init__(self, keys: Iterable[str] = (), page_size: int = 1000) -> None:
        super().__init__()
        self.keys = sorted(keys)
        self.page_size = page_size
        self.requested: list[tuple[str, int, int]] = []
        self.running: list[tuple[str, int, int]] = []
        self.overlapped = False
        self.open = trio.Event()
        self.open.set()
        # Called before each chunk with (key, offset); may raise.
        self.fault: Callable[[str, int], None] = lambda _key, _offset: None
        # Called between the last chunk of a download and its end.
        self.at_end: Callable[[], None] = lambda: None

    def hold(self) -> None:
        """Let no chunk through until `let_go`."""
        self.open = trio.Event()

    def let_go(self) -> None:
        self.open.set()

    async def download(
        self, version: ObjectVersion, start: int, stop: int, sink: Sink, **_: object
    ) -> None:
        assert 0 <= start < stop <= version.size
        mine = (version.key, start, stop)
        self.requested.append(mine)
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
                await sink.write(at, chunk)
            self.at_end()
            await trio.lowlevel.checkpoint()
        finally:
            self.running.remove(mine)

    @property
    def lists(self) -> int:
        return self.count("LIST")

    @property
    def heads(self) -> int:
        return self.count("HEAD")

    def _keys(self) -> list[str]:
        return self.keys

    def _listed(self, key: str) -> ObjectInfo:
        return info(key)

    def _info(self, key: str) -> ObjectInfo:
        if key not in self.keys:
            raise NotFoundError(key)
        return info(key)


def info(key: str) -> ObjectInfo:
    return ObjectInfo(key, 1, '"e"', 0)


@dataclass
class Parts:
    """The cache of one mount, whose downloads live as long as the `async with` block."""

    bucket: Bucket
    quota: Quota
    evictor: Evictor
    cache: FileCache
    downloader: Downloader
    directory: Path

    async def read(self, version: ObjectVersion, start: int, stop: int) -> bytes:
        """Read as an open file does."""
        file = self.cache.pin(version)
        self.cache.opened(file)
        try:
            return await self.read_pinned(file, start, stop)
        finally:
            self.cache.unpin(file)

    async def read_pinned(self, file: CacheFile, start: int, stop: int) -> bytes:
        await self.downloader.wait_for(file, start, stop)
        return os.pread(file.fd, stop - start, start)

    async def fetch(self, version: ObjectVersion) -> None:
        """Have all of an object in the cache."""
        assert await self.read(version, 0, version.size) == content(version)
        await self.quiet()

    def bytes_on_disk(self) -> int:
        """What the files of the cache hold, by what is allocated for them."""
        held = 0
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):  # evicted since it was listed
                held += path.stat().st_blocks * 512
        return held

    def files(self) -> list[Path]:
        return sorted(path for path in (self.directory / "objects").glob("*/*"))

    async def quiet(self) -> None:
        """Wait until no download is under way."""
        await trio.testing.wait_all_tasks_blocked()  # those just started count as well
        await eventually(lambda: not self.downloader.under_way)


@asynccontextmanager
async def recording(parts: Parts) -> AsyncIterator[None]:
    """Rows of what has arrived are on their way to the catalog until the block ends."""
    catalog = parts.cache._catalog
    record, begun, go_on = catalog.record, threading.Event(), threading.Event()

    def slow(rows: Iterable[Row]) -> tuple[list[bool], int]:
        begun.set()
        go_on.wait(LIMIT_S)
        return record(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "record", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.cache.record)
            await eventually(begun.is_set)
            try:
                yield
            finally:
                go_on.set()


@asynccontextmanager
async def cache_in(
    directory: Path,
    *,
    limit: int | None = None,
    floor: int = 0,
    inode_floor: int = 0,
    bucket: Bucket | None = None,
    most_in_memory: int = 1000,
    backing: PassthroughFiles | None = None,
) -> AsyncIterator[Parts]:
    """The cache of a new mount in `directory`, ended cleanly with the block."""
    os.makedirs(directory, exist_ok=True)
    quota = Quota(directory, limit, lambda _size: floor, lambda _count: inode_floor)
    cache = FileCache(directory, "test", quota, most_in_memory=most_in_memory, backing=backing)
    evictor = Evictor(cache)
    store = bucket or Bucket()
    try:
        async with trio.open_nursery() as nursery:
            downloader = Downloader(store, evictor, nursery)
            yield Parts(store, quota, evictor, cache, downloader, directory)
            nursery.cancel_scope.cancel()
    finally:
        await cache.aclose()


class OneFolder:
    """A listing of one folder."""

    def __init__(self, files: list[ObjectInfo]) -> None:
        self._files = files

    def files(self, _prefix: str, behind: str) -> Iterator[ObjectInfo]:
        yield from (info for info in self._files if info.key > behind)
        yield from (info for info in self._files if info.key <= behind)

    def next_folder(self, _prefix: str) -> str | None:
        return None


@asynccontextmanager
async def held(tmp_path: Path) -> AsyncIterator[Parts]:
    """A cache whose bucket does not answer until `let_go`."""
    async with cache_in(tmp_path) as parts:
        parts.bucket.hold()
        yield parts
        parts.bucket.let_go()
        await parts.quiet()


def requested_keys(parts: Parts) -> set[str]:
    return {key for key, _, _ in parts.bucket.requested}


NO_ATTRIBUTES = cast(Any, SimpleNamespace(lacks_version=lambda _info: False))
FRESH = cast(Any, SimpleNamespace(is_fresh=True))
NEXT_DAEMON = cast(Any, SimpleNamespace(is_fresh=False))
# What a list of a job may be called.
LIST = "ab" * 8


def warmer_of(parts: Parts, directory: Path) -> CacheWarmer:
    source, mountpoint = MountSource("bucket"), directory / "mnt"
    settings = MountSettings(source=source, mountpoint=mountpoint, cache_dir=directory)
    bucket = cast(Any, parts.bucket)
    parts.downloader.most_small = 8
    return CacheWarmer(bucket, parts.cache, parts.downloader, settings, Selector(bucket, ""))


async def cancel_no_pins(_path: str) -> None:
    """Have no job that pins to cancel."""


def copies_of(
    parts: Parts,
    nursery: trio.Nursery,
    cancel_pins: Callable[[str], Awaitable[None]] = cancel_no_pins,
) -> LocalCopies:
    selector = Selector(cast(Any, parts.bucket), "")
    return LocalCopies(
        parts.cache, parts.evictor, selector, "", nursery, lambda _key: (0, 0), cancel_pins
    )


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
        yield Jobs(parts, warmer, copies_of(parts, nursery, warmer.cancel_pins))
        nursery.cancel_scope.cancel()
