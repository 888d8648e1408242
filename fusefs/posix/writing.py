"""Writing: a file's content is staged on the local disk, and goes into the bucket whole.

FLUSH (close) and FSYNC of a file that has changed upload it and return when
the bucket has it. An upload reads a content that nobody changes meanwhile:
writes wait for it. What could not be uploaded stays staged, the error is
told to whoever closes, and it is tried again until it is there.

While a file is staged every handle of its node reads the staged content, so
readers on this mount see writes at once. A handle that the kernel reads by
passthrough goes on with the version that it opened: to write, the name gets a
new node. Once nobody has the file open, the staged content becomes the cached
copy of the version that it was uploaded as.
"""

from __future__ import annotations

import errno
import logging
import mimetypes
import os
import secrets
import stat
import time
from collections.abc import Callable

import trio

from fusefs.cache.fetch import Fetcher, NotKeptError
from fusefs.cache.files import FileCache
from fusefs.posix.answers import Answer, Caller, Opened, waiting
from fusefs.posix.directories import Directories
from fusefs.posix.handles import FileHandle, HandleTable
from fusefs.posix.inodes import Inode, InodeTable
from fusefs.posix.meta import PERMISSIONS, Meta
from fusefs.posix.staging import Staged, Staging
from fusefs.store.base import IF_ABSENT, ObjectInfo, Store
from fusefs.store.errors import ConflictError, StoreError

logger = logging.getLogger("fusefs.writing")

WRITING = os.O_WRONLY | os.O_RDWR
# How often uploads that failed are tried again.
RETRY_S = 5.0
COPY_CHUNK = 8 << 20


class Writer:
    """The files of one mount that are written. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        directories: Directories,
        cache: FileCache,
        fetcher: Fetcher,
        staging: Staging,
        inodes: InodeTable,
        handles: HandleTable,
        default_meta: Callable[[Inode], Meta],
    ) -> None:
        self._store = store
        self._directories = directories
        self._cache = cache
        self._fetcher = fetcher
        self.staging = staging
        self._inodes = inodes
        self._handles = handles
        self._default_meta = default_meta
        self._disk = trio.CapacityLimiter(16)
        # Nodes whose content is on its way into staging.
        self._preparing: dict[int, trio.Lock] = {}
        self.empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    # Opening

    async def create(
        self, parent: Inode, name: str, mode: int, flags: int, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a new file and open it.

        Raises:
            OSError: EEXIST, with O_EXCL, and there is one by now.
        """
        prefix = self._inodes.key(parent)
        key = prefix + name
        info = ObjectInfo(key, 0, "", time.time_ns())
        if flags & os.O_EXCL:
            # The bucket decides between two nodes that create one lock file.
            try:
                info = await self._put_empty(key, mode, caller)
            except ConflictError as error:
                raise OSError(errno.EEXIST, str(error)) from error
        inode = self._inodes.create(parent, name, info, key)
        meta = Meta(stat.S_IFREG | mode & PERMISSIONS, caller.uid, caller.gid)
        staged = self.staging.begin(inode, self.staging.prepare(inode), meta, info.etag or None)
        self._directories.changed(prefix, name, info, lasting=True)
        self._inodes.count(inode, time.monotonic())
        return inode, self._opened(staged, flags, caller)

    async def _put_empty(self, key: str, mode: int, caller: Caller) -> ObjectInfo:
        meta = Meta(stat.S_IFREG | mode & PERMISSIONS, caller.uid, caller.gid)
        # If the answer is lost, this tells our object from another node's.
        metadata = meta.as_metadata() | {"created-by": secrets.token_hex(8)}
        return await self._store.put_file(
            key, self.empty, 0, metadata=metadata, content_type=content_type(key),
            condition=IF_ABSENT,
        )  # fmt: skip

    async def put_marker(self, prefix: str, meta: Meta) -> None:
        """Make a prefix a directory, as S3 consoles do."""
        await self._store.put_file(
            prefix, self.empty, 0, metadata=meta.as_metadata(),
            content_type="application/x-directory",
        )  # fmt: skip

    def open(self, inode: Inode, flags: int, caller: Caller) -> Answer[Opened]:
        """Open a file for writing, or one that is staged."""
        if inode.info is None:
            raise OSError(errno.EISDIR, "a directory")
        if inode.staged is not None and not flags & os.O_TRUNC:
            return self._opened(inode.staged, flags, caller)
        return waiting(self._open_later(inode, flags, caller))

    async def _open_later(self, inode: Inode, flags: int, caller: Caller) -> Opened:
        staged = await self.stage(inode, keep=0 if flags & os.O_TRUNC else None)
        return self._opened(staged, flags, caller)

    def _opened(self, staged: Staged, flags: int, caller: Caller) -> Opened:
        inode = staged.inode
        assert inode.info is not None
        file = self._cache.pin(inode.info.version)
        handle = self._handles.open_file(inode, inode.info.version, file, 0, flags, caller.unique)
        return Opened(handle.fh, keep_cache=True, may_write=bool(flags & WRITING))

    async def stage(self, inode: Inode, *, keep: int | None) -> Staged:
        """Have a file staged, with the first `keep` bytes of its content (None: all).

        Raises:
            OSError: ESTALE, the kernel reads the node by passthrough: a new one is to be opened.
        """
        if inode.staged is None:
            if inode.passthrough:
                self._inodes.supersede(inode)
                raise OSError(errno.ESTALE, "the node is open for passthrough")
            async with self._preparing.setdefault(inode.nodeid, trio.Lock()):
                if inode.staged is None:
                    await self._stage_content(inode, keep)
            self._preparing.pop(inode.nodeid, None)
        staged = inode.staged
        assert staged is not None
        if keep is not None and staged.size() != keep:
            async with staged.lock:
                os.ftruncate(staged.fd, keep)
                staged.touch()
        return staged

    async def _stage_content(self, inode: Inode, keep: int | None) -> None:
        assert inode.info is not None
        info = inode.info
        wanted = info.size if keep is None else min(keep, info.size)
        file = self._cache.pin(info.version)
        try:
            if wanted:
                await self._fetcher.wait_for(file, 0, wanted)
            fd = self.staging.prepare(inode)
            try:
                await trio.to_thread.run_sync(_copy, file.fd, fd, wanted, limiter=self._disk)
            except BaseException:
                os.close(fd)
                raise
            meta = inode.meta or self._default_meta(inode)
            staged = self.staging.begin(inode, fd, meta, info.etag)
            staged.uploaded = staged.changes if wanted == info.size else 0
        except NotKeptError:
            raise OSError(errno.ENOSPC, "the cache has no room for the file") from None
        finally:
            self._cache.unpin(file)
        prefix = info.key[: len(info.key) - len(inode.name)]
        self._directories.changed(prefix, inode.name, info, lasting=True)

    # Changing

    def write(self, fh: int, offset: int, data: memoryview) -> Answer[int]:
        """Write to an open file; return how many bytes were."""
        handle = self._handle(fh)
        staged = handle.inode.staged
        if staged is None:
            raise OSError(errno.EBADF, "not open for writing")
        if not staged.lock.locked():
            try:
                count = os.pwritev(staged.fd, (data,), offset, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
                count = 0
            if count == len(data):
                staged.touch()
                return count
        # The memory is the session's and is used again for the next request.
        return self._write_later(staged, offset, bytes(data))

    async def _write_later(self, staged: Staged, offset: int, data: bytes) -> int:
        async with staged.lock:
            try:
                # A cancelled write is finished by its thread all the same.
                return await trio.to_thread.run_sync(
                    _write_fully, staged.fd, data, offset, limiter=self._disk
                )
            finally:
                staged.touch()

    async def allocate(self, fh: int, offset: int, length: int, mode: int) -> None:
        """fallocate(2) with the mode 0; other modes are not there."""
        staged = self._handle(fh).inode.staged
        if staged is None:
            raise OSError(errno.EBADF, "not open for writing")
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only allocating is supported")
        async with staged.lock:
            await trio.to_thread.run_sync(
                os.posix_fallocate, staged.fd, offset, length, limiter=self._disk
            )
            staged.touch()

    async def truncate(self, inode: Inode, size: int) -> None:
        """Make a file as long as `size`; one that nobody has open is uploaded at once."""
        await self.stage(inode, keep=size)
        await self.finish(inode)

    async def change_meta(self, inode: Inode, meta: Meta) -> None:
        """Give a file another mode, owner or time."""
        staged = inode.staged
        if staged is not None:
            staged.meta = meta
            staged.touch()
            self.staging.record(staged)
            await self.finish(inode)
            return
        assert inode.info is not None
        info = await self._store.copy(
            inode.info.version, inode.info.key, metadata=meta.as_metadata()
        )
        self._has(inode, info)
        inode.meta = meta

    # Into the bucket

    def flush(self, fh: int) -> Answer[None]:
        """A descriptor of an open file is closed: have what was written in the bucket."""
        handle = self._handles.files.get(fh)
        if handle is None or handle.inode.staged is None or not handle.flags & WRITING:
            return None
        staged = handle.inode.staged
        return waiting(self.upload(staged)) if staged.is_dirty else None

    def fsync(self, fh: int) -> Answer[None]:
        return self.flush(fh)

    async def finish(self, inode: Inode) -> None:
        """Upload what nobody will close any more, and make it the cached copy."""
        staged = inode.staged
        if staged is None or inode.served:
            return
        if staged.is_dirty:
            await self.upload(staged)
        self._settle(staged)

    async def upload_all(self, prefix: str) -> None:
        """Have everything that is staged below a prefix in the bucket."""
        for staged in self.staging:
            if staged.key.startswith(prefix) and staged.is_dirty:
                await self.upload(staged)

    async def upload(self, staged: Staged) -> None:
        """Have the last content of a file in the bucket."""
        async with staged.lock:
            if not staged.is_dirty:
                return
            changes = staged.changes
            info = await self._store.put_file(
                staged.key, staged.fd, staged.size(), metadata=staged.meta.as_metadata(),
                content_type=content_type(staged.key),
            )  # fmt: skip
            staged.uploaded = changes
            staged.etag = info.etag
            self._has(staged.inode, info)
            self.staging.record(staged)

    def _has(self, inode: Inode, info: ObjectInfo) -> None:
        """The bucket has a version of ours: the node stands for it from now on."""
        assert inode.info is not None
        self._inodes.replace_version(inode, info)
        prefix = info.key[: len(info.key) - len(inode.name)]
        self._directories.changed(prefix, inode.name, info, lasting=inode.staged is not None)

    def _settle(self, staged: Staged) -> None:
        """Nobody has the file open: keep its content as the cached copy."""
        inode = staged.inode
        if staged.is_dirty or inode.served or inode.staged is not staged:
            return
        if not staged.is_unlinked and inode.info is not None and inode.info.size:
            self._cache.take_in(inode.info.version, staged.path)
        inode.meta = staged.meta
        self.staging.release(staged)
        if not staged.is_unlinked and inode.info is not None:
            prefix = inode.info.key[: len(inode.info.key) - len(inode.name)]
            self._directories.changed(prefix, inode.name, inode.info)

    async def released(self, inode: Inode) -> None:
        """A handle of a staged file is gone."""
        try:
            await self.finish(inode)
        except StoreError as error:
            logger.warning("%s is not in the bucket yet: %s", self._inodes.key(inode), error)

    async def forget_unlinked(self, inode: Inode) -> None:
        """The name of a staged file is gone; its content goes with the last handle."""
        staged = inode.staged
        if staged is None:
            return
        async with staged.lock:
            staged.is_unlinked = True
            self.staging.record(staged)
        if not inode.served:
            self.staging.release(staged)

    async def restore(self, inode: Inode) -> None:
        """Take up what an earlier process had staged under a node."""
        staged = self.staging.restore(inode)
        if staged is not None and inode.info is not None and not staged.is_unlinked:
            prefix = inode.info.key[: len(inode.info.key) - len(inode.name)]
            self._directories.changed(prefix, inode.name, inode.info, lasting=True)

    async def drain(self, limit_s: float) -> None:
        """Upload what is pending, for as long as that may take; the rest stays on the disk."""
        with trio.move_on_after(limit_s):
            for staged in self.staging.pending:
                await self.released(staged.inode)
        for staged in self.staging.pending:
            logger.error("%s is not in the bucket; kept in %s", staged.key, staged.path)

    async def run(self) -> None:
        """Try again what could not be uploaded, until cancelled."""
        while True:
            await trio.sleep(RETRY_S)
            for staged in self.staging.pending:
                if not staged.inode.served and not staged.lock.locked():
                    await self.released(staged.inode)

    def _handle(self, fh: int) -> FileHandle:
        try:
            return self._handles.files[fh]
        except KeyError:
            raise OSError(errno.EBADF, f"unknown file handle {fh}") from None


def content_type(key: str) -> str | None:
    """What a browser would take an object for, by its name."""
    return mimetypes.guess_type(key)[0]


def _copy(source: int, target: int, size: int) -> None:
    """Copy the first bytes of a file, by reference where the file system can. Blocks."""
    at = 0
    while at < size:
        count = os.copy_file_range(source, target, min(COPY_CHUNK, size - at), at, at)
        if not count:
            raise OSError(errno.EIO, "the cache file is too short")
        at += count


def _write_fully(fd: int, data: bytes, offset: int) -> int:
    """Write all of it. Blocks."""
    done = 0
    view = memoryview(data)
    while done < len(data):
        done += os.pwrite(fd, view[done:], offset + done)
    return done
