"""Edits of large objects without downloading them.

The staging file is as long as the object and empty (sparse); it holds the bytes that programs
write, and the object provides the others. A page that is written in part, or read, is downloaded
from the object first, through the cache. At the upload, the parts that no program wrote to are
copied on the server. An upload whose answer was lost may have replaced the object; the new object
has the same bytes where the file has none, so it becomes the new base of the edit.

posix/nodes/edit_base.py records which bytes the file has. Callers hold the file's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from fusefs.cache.downloader import Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.posix.nodes.edit_base import IN_PARTS, PAGE, EditBase, has_small_holes, page_edges
from fusefs.store.contract import Store, find
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectVersion

COPY_CHUNK = 8 << 20


class BaseLostError(StaleVersionError):
    """The object was replaced, so the bytes that an edited file lacks are lost."""


class SparseEditor:
    """The downloads of bytes that edited files lack. Belongs to the event loop."""

    def __init__(self, store: Store, cache: FileCache, downloader: Downloader) -> None:
        self._store = store
        self._cache = cache
        self._downloader = downloader
        self._disk = trio.CapacityLimiter(4)

    async def copy(self, version: ObjectVersion, fd: int, size: int) -> EditBase | None:
        """Make the first `size` bytes of an object the content of an empty file.

        Of a large object only the first page is downloaded: it shows that the object still exists.
        Returns the base for the other bytes, which the caller passes to `drop` at the end, or None
        if the file has all bytes. Raises BaseLostError if the bucket no longer has the version.
        """
        os.ftruncate(fd, size)
        base = EditBase(self._cache.pin(version), size)
        try:
            is_sparse = size > IN_PARTS and has_small_holes(fd)
            await self.fill(base, fd, 0, 1 if is_sparse else size)
        except BaseException:
            self.drop(base)
            raise
        if base.lacks(0, size):
            return base
        self.drop(base)
        return None

    def drop(self, base: EditBase) -> None:
        self._cache.unpin(base.file)

    async def fill_edges(self, base: EditBase, fd: int, start: int, stop: int) -> None:
        """Download the pages that a write to [start, stop) covers in part. Raises as `fill`."""
        for first, last in page_edges(start, stop):
            await self.fill(base, fd, first, last)

    async def fill(self, base: EditBase, fd: int, start: int, stop: int) -> None:
        """Download pages of [start, stop) that a file lacks; BaseLostError if the base is gone."""
        stop = min(-(-stop // PAGE) * PAGE, base.size)
        while missing := base.filled.first_missing(start // PAGE * PAGE, stop):
            first, last = missing
            last = min(last, first + COPY_CHUNK)
            version = base.version
            try:
                await self._bring(base, fd, first, last)
            except (StaleVersionError, NotFoundError) as error:
                if await self.follow(base, version):
                    continue
                raise BaseLostError(str(error)) from error
            base.filled.add(first, -(-last // PAGE) * PAGE)

    async def follow(self, base: EditBase, lost: ObjectVersion) -> bool:
        """Replace the base `lost` by this file's own upload if that took its key; False if not."""
        found = await find(self._store, lost.key)
        if found is None:
            return False
        if base.version == lost != found.version and str(found.token) in base.tokens:
            old, base.file = base.file, self._cache.pin(found.version)
            self._cache.unpin(old)
        return base.version != lost

    async def _bring(self, base: EditBase, fd: int, start: int, stop: int) -> None:
        file = base.file
        try:
            await self._downloader.wait_for(file, start, stop)
            if not await self._cache.ensure_open(file):
                raise NotKeptError
            with _same_time(fd):
                if not await self._cache.integrity.copy(file, fd, start, stop):
                    raise NotKeptError
        except NotKeptError:
            data = await self._downloader.read_unkept(base.version, start, stop)
            with _same_time(fd):
                await trio.to_thread.run_sync(write_fully, fd, data, start, limiter=self._disk)


@contextmanager
def _same_time(fd: int) -> Iterator[None]:
    """Restore a file's modification time on exit: filling the file does not change its content."""
    modified_ns = os.fstat(fd).st_mtime_ns
    try:
        yield
    finally:
        os.utime(fd, ns=(modified_ns, modified_ns))


def write_fully(fd: int, data: bytes | bytearray, offset: int) -> int:
    """Write all of `data` at an offset; return its length. Blocks."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
    return len(data)
