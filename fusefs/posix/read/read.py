"""READ of a served handle: from the page cache, the disk, or the bucket, in this order.

Bytes in the page cache are returned at once. A thread reads bytes that are only on the disk. Bytes
that are not on the disk are downloaded first. If the cache has no room for a version, or its disk
fails, the version's bytes are downloaded into memory ("past the cache").
"""

from __future__ import annotations

import errno
import os
import time

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import NotKeptError
from fusefs.cache.integrity.direct_reader import is_lost
from fusefs.linux.files import closing
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.nodes.edit_base import EditBase
from fusefs.posix.nodes.handles import FileHandle
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.types import Answer, InFile, answered
from fusefs.posix.write.sparse_edit import SparseEditor
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.telemetry.stalls import WaitCause, stage

# The size of the buffer for the answer of one request (max_pages of 4 KiB).
MAX_READ = 1 << 20
# Copying more bytes in the event loop takes longer than leaving them to a thread.
LONGEST_COPIED = 64 << 10


class Reader(MountPart):
    """The reads of one mount. Belongs to the event loop.

    `editor` downloads the bytes that an edited file lacks; None on a read-only mount.
    """

    def __init__(self, state: MountState, editor: SparseEditor | None) -> None:
        super().__init__(state)
        self._editor = editor
        self._buffer = memoryview(bytearray(MAX_READ))
        self._nowait = os.RWF_NOWAIT
        self._disk = trio.CapacityLimiter(16)

    def read(
        self, fh: int, offset: int, size: int, *, in_file: bool = False
    ) -> Answer[memoryview | bytes | bytearray | InFile]:
        """Read the bytes [offset, offset + size) of a handle's version; see `Operations.read`."""
        try:
            handle = self._handles.files[fh]
        except KeyError:
            raise OSError(errno.EBADF, f"unknown file handle {fh}") from None
        if handle.inode.staged is not None:
            return self._read_staged(handle.inode.staged, offset, size)
        file = handle.file
        stop = min(offset + size, file.size)
        if offset >= stop:
            return b""
        if file.is_complete or file.present.covers(offset, stop):
            if handle.readahead is not None:
                handle.readahead.reads(offset, stop)
            data = self._answer_now(handle, offset, stop - offset, in_file=in_file)
            if data is not None:
                self._count(handle, offset, stop)
                return data
        return self._read_later(handle, offset, stop, in_file=in_file)

    async def read_again(self, fh: int, offset: int, size: int) -> memoryview | bytes | bytearray:
        """Read the bytes of a READ that `read` has counted, and answered with an `InFile`."""
        handle = self._handles.files.get(fh)
        data: memoryview | bytes | bytearray | InFile
        if handle is None or handle.inode.staged is not None:
            data = await answered(self.read(fh, offset, size))
        elif (there := self._read_now(handle.file, offset, size)) is not None:
            return there  # the cache's file system has just turned out to lack RWF_NOWAIT
        else:
            data = await self._read_later(handle, offset, offset + size, again=True)
        assert not isinstance(data, InFile)
        return data

    def _read_staged(
        self, staged: StagedFile, offset: int, size: int
    ) -> Answer[memoryview | bytes | bytearray]:
        """Read `size` bytes of a staged file, or fewer at its end."""
        if staged.base is not None and staged.base.lacks(offset, offset + size):
            return self._read_edited(staged, staged.base, offset, size)
        data = self._buffer[: min(size, MAX_READ)]
        try:
            count = os.preadv(staged.fd, (data,), offset, self._nowait)
            # A read is short at the file's end, but also if the page cache lacks the rest.
            if count == len(data) or offset + count >= staged.size():
                self._counters.answered(count, 0)
                return data[:count]
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
        return self._pread_later(staged, offset, size)

    async def _read_edited(
        self, staged: StagedFile, base: EditBase, offset: int, size: int
    ) -> bytes:
        assert self._editor is not None
        async with staged.lock:
            staged.check_kept()
            await self._editor.fill(base, staged.fd, offset, offset + size)
        return await self._pread_later(staged, offset, size)

    async def _pread_later(self, staged: StagedFile, offset: int, size: int) -> bytes:
        staged.check_kept()
        # The file may be set aside, and its descriptor closed, while this waits for a thread.
        with closing(os.dup(staged.fd)) as fd, stage(WaitCause.CACHE_DISK):
            data = await trio.to_thread.run_sync(
                _read_what_is_there, fd, offset, size, limiter=self._disk
            )
        self._counters.answered(len(data), 0)
        return data

    def _answer_now(
        self, handle: FileHandle, offset: int, size: int, *, in_file: bool
    ) -> memoryview | InFile | None:
        """Return bytes of a handle's cache file; None if the page cache lacks some of them.

        With `in_file`, return an `InFile` for a large range, which the FUSE session reads.
        """
        if in_file and handle.file.fd >= 0 and LONGEST_COPIED < size <= MAX_READ:
            return InFile(handle.fh, handle.file, offset, size, self._nowait)
        return self._read_now(handle.file, offset, size)

    def _read_now(self, file: CacheFile, offset: int, size: int) -> memoryview | None:
        """Read from the page cache; None if it lacks some of the bytes."""
        if file.fd < 0 or size > MAX_READ:
            return None
        data = self._buffer[:size]
        try:
            count = os.preadv(file.fd, (data,), offset, self._nowait)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not self._nowait:
                return None
            # tmpfs does not support RWF_NOWAIT, but its reads wait for no disk either.
            self._nowait = 0
            return self._read_now(file, offset, size)
        return data if count == size else None

    async def _read_later(
        self,
        handle: FileHandle,
        offset: int,
        stop: int,
        *,
        in_file: bool = False,
        again: bool = False,
    ) -> memoryview | bytes | InFile:
        file = handle.file
        self._cache.pin_again(file)  # the handle may be released before the answer is there
        try:
            if file.is_kept:
                try:
                    data = await self._read_kept(handle, offset, stop, in_file=in_file)
                    if not again:
                        self._count(handle, offset, stop)
                    return data
                except NotKeptError:
                    pass
            return await self._read_unkept(handle, offset, stop)
        except NotFoundError:
            self._state.mark_stale(handle.inode)
            raise OSError(errno.ESTALE, "the object has been deleted") from None
        except StaleVersionError:
            self._state.mark_stale(handle.inode)
            raise
        finally:
            self._cache.unpin(file)

    async def _read_kept(
        self, handle: FileHandle, offset: int, stop: int, *, in_file: bool
    ) -> memoryview | bytes | InFile:
        file = handle.file
        is_there = file.present.covers(offset, stop)
        # Another mount may have evicted a file that is not open here; `wait_for` opens it.
        if file.fd < 0 or not is_there:
            began = time.monotonic()
            if handle.readahead is not None and not is_there:
                handle.readahead.reads(offset, stop)
            await self._downloader.wait_for(file, offset, stop)
            if handle.readahead is not None:
                handle.readahead.waited(began, time.monotonic())
            # The bytes that were just downloaded are in the page cache.
            data = self._answer_now(handle, offset, stop - offset, in_file=in_file)
            if data is not None:
                return data
        try:
            with stage(WaitCause.CACHE_DISK):
                return await trio.to_thread.run_sync(
                    read_fully, file.fd, offset, stop - offset, limiter=self._disk
                )
        except OSError as error:
            if is_lost(error):
                self._cache.integrity.drop(file, error)
            else:
                self._cache.disable(file, error, for_now=True)
            raise NotKeptError from error

    def _count(self, handle: FileHandle, offset: int, stop: int) -> None:
        size = stop - offset
        if handle.readahead is not None:
            fetched = handle.file.first_read(offset, stop)
            self._counters.read(size, fetched)
            self._counters.answered(size, fetched)
        elif handle.fetched:
            # The open of a complete file was counted as a read of the whole file.
            fetched = min(size, handle.fetched)
            handle.fetched -= fetched
            self._counters.answered(size, fetched)
        else:
            self._counters.cache_bytes += size

    async def _read_unkept(self, handle: FileHandle, offset: int, stop: int) -> memoryview:
        """Read past the cache; bytes downloaded ahead stay in memory for later reads."""
        self._counters.miss(stop - offset)
        self._counters.unkept_bytes += stop - offset
        self._counters.answered(stop - offset, stop - offset)
        buffers = self._downloader.unkept
        start, data = buffers.of(handle)
        if not (start <= offset and stop <= start + len(data)):
            start = offset
            end = min(handle.file.size, max(stop, offset + buffers.ahead(handle)))
            data = await self._download_unkept(handle, start, end)
            if self._handles.files.get(handle.fh) is handle:
                buffers.keep(handle, start, data)
        return memoryview(data)[offset - start : stop - start]

    async def _download_unkept(self, handle: FileHandle, start: int, stop: int) -> bytearray:
        while True:
            # A rename may have given the object another key since the open.
            version = handle.file.version or handle.version
            try:
                return await self._downloader.read_unkept(version, start, stop)
            except (NotFoundError, StaleVersionError):
                if handle.file.version in (None, version):
                    raise
                # The object was renamed meanwhile: try its new key.


def _read_what_is_there(fd: int, offset: int, size: int) -> bytes:
    """Read `size` bytes, or fewer at the file's end. Blocks."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


def read_fully(fd: int, offset: int, size: int) -> bytes:
    """Read exactly `size` bytes, which are known to be there. Blocks.

    Raises:
        OSError: the disk failed, or the file has become shorter (EIO).
    """
    data = _read_what_is_there(fd, offset, size)
    if len(data) < size:
        raise OSError(errno.EIO, "the cache file is too short")
    return data
