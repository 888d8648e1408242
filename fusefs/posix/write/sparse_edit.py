"""Editing a large object without downloading it.

The staging file is as long as the object and empty (sparse); what a program
writes goes into it, and the rest is the object's. A page that is written in
part, and what is read, is brought from the object first, through the cache.
When the file is uploaded, parts that nobody wrote to are copied on the server.

Which pages are in the file is what the local file system says of its holes, so
it survives this process. Everything here runs with the file's lock held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import Fetcher, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.cache.ranges import RangeMap
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectVersion

PAGE = 4096
COPY_CHUNK = 8 << 20


class BaseLostError(StaleVersionError):
    """What an edited file lacks is nowhere any more: somebody has replaced the object."""


class Base:
    """The object under a file that is edited. Belongs to the event loop.

    Its first `size` bytes are the file's, but for what is `filled`: pages that
    are in the file itself. `changed` are those that were written to. The
    object's cache file is pinned.
    """

    __slots__ = ("changed", "file", "filled", "size")

    def __init__(self, file: CacheFile, size: int) -> None:
        self.file = file
        self.size = size
        self.filled = RangeMap()
        self.changed = RangeMap()

    @property
    def version(self) -> ObjectVersion:
        assert self.file.version is not None
        return self.file.version

    def wrote(self, start: int, stop: int) -> None:
        """Note that the bytes [start, stop) of the file, and their pages, are its own now."""
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        self.filled.add(first, last)
        self.changed.add(first, last)

    def lacks(self, start: int, stop: int) -> bool:
        """Whether some of the bytes [start, stop) are the object's and not in the file."""
        return not self.filled.covers(start, min(stop, self.size))

    def lacks_edges(self, start: int, stop: int) -> bool:
        """Whether a write to [start, stop) would leave a page partly the object's."""
        return any(self.lacks(first, last) for first, last in _edges(start, stop))

    def keeps(self, start: int, stop: int) -> bool:
        """Whether the object has the bytes [start, stop), and nobody wrote to them."""
        return stop <= self.size and self.changed.first_missing(start, stop) == (start, stop)

    def own(self, size: int) -> RangeMap:
        """What of a file of `size` bytes is in it."""
        own = RangeMap((start, min(stop, size)) for start, stop in self.filled)
        own.add(self.size, size)
        return own

    def recover(self, fd: int) -> None:
        """Find out what an earlier process has written. Blocks shortly."""
        size = os.fstat(fd).st_size
        self.size = min(self.size, size)
        for start, stop in _extents(fd, size):
            self.wrote(start, stop)


class Editor:
    """Brings what an edited file lacks. Belongs to the event loop."""

    def __init__(self, cache: FileCache, fetcher: Fetcher) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._disk = trio.CapacityLimiter(4)

    async def fill_edges(self, base: Base, fd: int, start: int, stop: int) -> None:
        """Have the pages in the file that a write to [start, stop) covers in part."""
        for first, last in _edges(start, stop):
            await self.fill(base, fd, first, last)

    async def fill(self, base: Base, fd: int, start: int, stop: int) -> None:
        """Have the bytes [start, stop) in the file, and their pages.

        Raises:
            BaseLostError: the bucket does not have the object any more.
            StoreError: it can't be read.
        """
        stop = min(-(-stop // PAGE) * PAGE, base.size)
        while missing := base.filled.first_missing(start // PAGE * PAGE, stop):
            first, last = missing
            last = min(last, first + COPY_CHUNK)
            try:
                await self._bring(base, fd, first, last)
            except (StaleVersionError, NotFoundError) as error:
                raise BaseLostError(str(error)) from error
            base.filled.add(first, -(-last // PAGE) * PAGE)

    async def _bring(self, base: Base, fd: int, start: int, stop: int) -> None:
        file = base.file
        try:
            await self._fetcher.wait_for(file, start, stop)
            if not await self._cache.ensure_open(file):
                raise NotKeptError
            if not await self._cache.integrity.copy(file, fd, start, stop):
                raise NotKeptError
        except NotKeptError:
            data = await self._fetcher.read_unkept(base.version, start, stop)
            await trio.to_thread.run_sync(_write, fd, data, start, limiter=self._disk)


def _write(fd: int, data: bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _edges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The pages that [start, stop) covers in part."""
    first, last = start // PAGE * PAGE, stop // PAGE * PAGE
    if start > first:
        yield first, first + PAGE
    if stop > last and (last > first or start == first):
        yield last, last + PAGE


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """What of a file is no hole."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at
