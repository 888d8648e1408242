"""The session that serves a mount through pyfuse3 (libfuse), for `--session pyfuse3`.

This session has all functions except passthrough, taking over a mount, and fallocate, which pyfuse3
lacks. libfuse shows the node id as st_ino, so the inode table uses the stable inode number as node
id wherever that is free; a changed object gets a new node id.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyfuse3
import trio

from fusefs.fuse.interrupts import OPERATIONS, WaitingRequest
from fusefs.fuse.protocol import Opcode
from fusefs.linux.mount import MountError, MountRequest, helper_options
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.operations import Operations
from fusefs.posix.types import Caller, NameKind, NewAttributes, answered
from fusefs.store.errors import StoreError
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.requests import RequestTimes
from fusefs.telemetry.stalls import served

logger = logging.getLogger("fusefs.session")

# The most requests that are processed at a time; further requests wait in the kernel.
MOST_TASKS = 99


class PyfuseNotifications(KernelNotifier):
    """Sends the kernel one kind of notification through libfuse: to drop a node's attributes."""

    def invalidate_attributes(self, nodeid: int) -> None:
        pyfuse3.invalidate_inode(nodeid, attr_only=True)


class PyfuseSession:
    """The session of one mount under pyfuse3, which allows one mount per process."""

    name = "pyfuse3"

    def __init__(self, request: MountRequest, operations: Operations) -> None:
        self._request = request
        self._handlers = Pyfuse3Handlers(operations)
        self.times = self._handlers.times
        self.polled_s = 0.0
        self.compiled_requests: int | None = None

    @property
    def requests(self) -> int:
        return self._handlers.requests

    @property
    def waiting(self) -> list[WaitingRequest]:
        return list(self._handlers.waiting.values())

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount for the duration of the block; raise MountError if libfuse refuses."""
        try:
            pyfuse3.init(self._handlers, str(self._request.mountpoint), _options(self._request))
        except RuntimeError as error:
            raise MountError(
                f"libfuse can't mount on {self._request.mountpoint}: {error}"
            ) from error
        try:
            yield
        finally:
            pyfuse3.close(unmount=True)

    @property
    def survival(self) -> tuple[bool, str]:
        """A pair: False, as the mount does not outlive this process, and the reason."""
        return False, "a mount of the pyfuse3 session ends with its daemon"

    async def run(self) -> bool:
        """Answer requests until the file system is unmounted; return True."""
        await pyfuse3.main(max_tasks=MOST_TASKS)
        return True


class Pyfuse3Handlers(pyfuse3.Operations):
    """The methods that pyfuse3 calls; each calls the operation of the same name."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations
        self.requests = 0
        self.times = RequestTimes(OPERATIONS)
        self.waiting: dict[int, WaitingRequest] = {}

    async def lookup(
        self, parent: int, name: bytes, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.LOOKUP, parent, context.pid):
            found = await answered(self._operations.lookup(parent, name, _caller(context)))
            if found.inode is not None:
                entry = self.pack(found.inode, found.valid_s)
                if not found.has_attributes:
                    entry.attr_timeout = 0
                return entry
        if not found.valid_s:
            raise pyfuse3.FUSEError(errno.ENOENT)
        # Inode 0 means that the name does not exist, and lets the kernel cache that.
        absent = pyfuse3.EntryAttributes()
        absent.st_ino = 0
        absent.entry_timeout = found.valid_s
        return absent

    async def forget(self, forgotten: Sequence[tuple[int, int]]) -> None:
        for nodeid, nlookup in forgotten:
            self._operations.inodes.forget(nodeid, nlookup)

    async def getattr(
        self, nodeid: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.GETATTR, nodeid, context.pid):
            inode = await answered(self._operations.getattr(nodeid))
            return self.pack(inode, inode.valid_s)

    async def open(
        self, nodeid: int, flags: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        with self._request(Opcode.OPEN, nodeid, context.pid):
            opened = await answered(self._operations.open(nodeid, flags, _caller(context)))
        return pyfuse3.FileInfo(fh=opened.fh, keep_cache=opened.keep_cache)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        with self._request(Opcode.READ, self._opened(fh)):
            data = await answered(self._operations.read(fh, offset, size))
        assert isinstance(data, (bytes, bytearray, memoryview))
        # The memory of an immediate answer may be reused before libfuse sends it.
        return data if isinstance(data, bytes) else bytes(data)

    async def release(self, fh: int) -> None:
        self._operations.release(fh)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Wait until the bucket has a directory's removals; fsync of a file covers its new name."""
        nodeid = self._listed(fh)
        if self._operations.mutations is None or not nodeid:
            return
        with self._request(Opcode.FSYNCDIR, nodeid):
            await answered(self._mutations.fsync_directory(nodeid))

    async def opendir(self, nodeid: int, context: pyfuse3.RequestContext) -> int:
        with self._request(Opcode.OPENDIR, nodeid, context.pid):
            handle, _ = self._operations.opendir(nodeid, _caller(context))
            return handle.fh

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        with self._request(Opcode.READDIR, self._listed(fh)):
            await answered(self._operations.readdir(fh, start_id, _Pyfuse3Entries(self, token)))

    async def releasedir(self, fh: int) -> None:
        self._operations.releasedir(fh)

    async def statfs(self, context: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        shown = pyfuse3.StatvfsData()
        # A bucket has no limit: show 2^60 bytes, all free.
        shown.f_bsize = shown.f_frsize = 4096
        shown.f_blocks = shown.f_bfree = shown.f_bavail = 1 << 48
        shown.f_files = shown.f_ffree = shown.f_favail = 1 << 40
        shown.f_namemax = 255
        return shown

    async def getxattr(self, nodeid: int, name: bytes, context: pyfuse3.RequestContext) -> bytes:
        with self._request(Opcode.GETXATTR, nodeid, context.pid):
            return await answered(self._operations.getxattr(nodeid, name.decode(errors="replace")))

    async def listxattr(self, nodeid: int, context: pyfuse3.RequestContext) -> list[bytes]:
        with self._request(Opcode.LISTXATTR, nodeid, context.pid):
            return [name.encode() for name in await answered(self._operations.listxattr(nodeid))]

    # Changes. On a read-only mount the kernel sends no such requests.

    @property
    def _mutations(self) -> Mutations:
        if self._operations.mutations is None:
            raise OSError(errno.EROFS, "the mount is read-only")
        return self._operations.mutations

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, context: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        with self._request(Opcode.CREATE, parent, context.pid):
            made = self._mutations.create(parent, name, mode, flags, _caller(context))
            inode, opened = await answered(made)
            return pyfuse3.FileInfo(fh=opened.fh, keep_cache=True), self.pack(inode, 0.0)

    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.MKNOD, parent, context.pid):
            return self.pack(await self._mutations.mknod(parent, name, mode, _caller(context)), 0.0)

    async def mkdir(
        self, parent: int, name: bytes, mode: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.MKDIR, parent, context.pid):
            return self.pack(await self._mutations.mkdir(parent, name, mode, _caller(context)), 0.0)

    async def symlink(
        self, parent: int, name: bytes, target: bytes, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.SYMLINK, parent, context.pid):
            made = self._mutations.symlink(parent, name, target, _caller(context))
            return self.pack(await made, 0.0)

    async def readlink(self, nodeid: int, context: pyfuse3.RequestContext) -> bytes:
        with self._request(Opcode.READLINK, nodeid, context.pid):
            return await self._operations.readlink(nodeid)

    async def unlink(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._request(Opcode.UNLINK, parent, context.pid):
            await answered(self._mutations.unlink(parent, name, _caller(context)))

    async def rmdir(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._request(Opcode.RMDIR, parent, context.pid):
            await self._mutations.rmdir(parent, name, _caller(context))

    async def rename(
        self,
        parent: int,
        name: bytes,
        to: int,
        new_name: bytes,
        flags: int,
        context: pyfuse3.RequestContext,
    ) -> None:
        with self._request(Opcode.RENAME2, parent, context.pid):
            await self._mutations.rename(parent, name, to, new_name, flags, _caller(context))

    async def link(
        self, nodeid: int, parent: int, name: bytes, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._request(Opcode.LINK, parent, context.pid):
            made = self._mutations.link(nodeid, parent, name, _caller(context))
            return self.pack(await made, 0.0)

    async def setattr(
        self,
        nodeid: int,
        attributes: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        context: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        new = NewAttributes(
            mode=attributes.st_mode if fields.update_mode else None,
            uid=attributes.st_uid if fields.update_uid else None,
            gid=attributes.st_gid if fields.update_gid else None,
            size=attributes.st_size if fields.update_size else None,
            mtime_ns=attributes.st_mtime_ns if fields.update_mtime else None,
            has_handle=fh is not None,
        )
        with self._request(Opcode.SETATTR, nodeid, context.pid):
            inode = await self._mutations.setattr(nodeid, new)
            return self.pack(inode, inode.valid_s)

    async def setxattr(
        self, nodeid: int, name: bytes, value: bytes, context: pyfuse3.RequestContext
    ) -> None:
        with self._request(Opcode.SETXATTR, nodeid, context.pid):
            await self._mutations.setxattr(nodeid, name, value, 0, _caller(context))

    async def removexattr(self, nodeid: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._request(Opcode.REMOVEXATTR, nodeid, context.pid):
            await self._mutations.setxattr(nodeid, name, None, 0, _caller(context))

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        with self._request(Opcode.WRITE, self._opened(fh)):
            return await answered(self._mutations.writer.write(fh, offset, memoryview(data)))

    async def flush(self, fh: int) -> None:
        if self._operations.writer is not None:
            with self._request(Opcode.FLUSH, self._opened(fh)):
                await answered(self._operations.writer.flusher.flush(fh))

    async def fsync(self, fh: int, datasync: bool) -> None:
        with self._request(Opcode.FSYNC, self._opened(fh)):
            await answered(self._mutations.writer.flusher.fsync(fh))

    def pack(self, inode: Inode, valid_s: float) -> pyfuse3.EntryAttributes:
        """Convert the attributes of an inode to pyfuse3's type."""
        shown = self._operations.attributes(inode)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode.nodeid
        entry.st_mode = shown.mode
        entry.st_nlink = shown.nlink
        entry.st_uid, entry.st_gid = shown.uid, shown.gid
        entry.st_size = shown.size
        entry.st_blocks = shown.blocks
        entry.st_blksize = 4096
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = shown.mtime_ns
        entry.entry_timeout = entry.attr_timeout = valid_s
        return entry

    def _opened(self, fh: int) -> int:
        """Return the node id of an open file; 0 if the handle is unknown."""
        handle = self._operations.handles.files.get(fh)
        return handle.inode.nodeid if handle is not None else 0

    def _listed(self, fh: int) -> int:
        """Return the node id of an open directory; 0 if the handle is unknown."""
        handle = self._operations.handles.directories.get(fh)
        return handle.inode.nodeid if handle is not None else 0

    @contextmanager
    def _request(self, opcode: Opcode, nodeid: int, pid: int = 0) -> Iterator[None]:
        """Count and time the request that the `with` body answers; `pid` is 0 if unknown."""
        ACTIVITY.note()
        self.requests += 1
        number, began = self.requests, time.monotonic()
        self.waiting[number] = WaitingRequest(opcode, nodeid, pid, began, trio.CancelScope())
        try:
            with served():
                yield
            self.times.answered(opcode, began)
        except (OSError, StoreError) as error:
            self.times.failed(opcode, began, error.errno)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except Exception as error:  # an unexpected error must not end the mount
            logger.exception("answering EIO: a fault of this program")
            self.times.failed(opcode, began, errno.EIO)
            raise pyfuse3.FUSEError(errno.EIO) from error
        finally:
            del self.waiting[number]


class _Pyfuse3Entries:
    """The buffer of one READDIRPLUS reply of pyfuse3, which takes only entries with inodes."""

    is_plus = True
    is_empty = True
    takes_names = False

    def __init__(self, handlers: Pyfuse3Handlers, token: pyfuse3.ReaddirToken) -> None:
        self._handlers = handlers
        self._token = token

    def add_name(self, name: bytes, ino: int, offset: int, kind: NameKind) -> bool:
        entry = pyfuse3.EntryAttributes()  # "." or "..": all others have their inodes
        entry.st_ino = ino
        entry.st_mode = stat.S_IFDIR
        return self._reply(name, entry, offset)

    def add(self, name: bytes, inode: Inode, offset: int, valid_s: float) -> bool:
        return self._reply(name, self._handlers.pack(inode, valid_s), offset)

    def _reply(self, name: bytes, entry: pyfuse3.EntryAttributes, offset: int) -> bool:
        has_room = bool(pyfuse3.readdir_reply(self._token, name, entry, offset))
        self.is_empty = self.is_empty and not has_room
        return has_room


def _caller(context: pyfuse3.RequestContext) -> Caller:
    return Caller(0, context.uid, context.gid, context.pid)


def _options(request: MountRequest) -> set[str]:
    # pyfuse3 accepts only ASCII; the source is only for display.
    source = request.source.encode("ascii", "replace").decode()
    return {*pyfuse3.default_options, *helper_options(request, source)}
