"""The session that serves a mount through pyfuse3 (libfuse), for `--session pyfuse3`.

Everything works here except passthrough, taking over a mount, and fallocate,
which pyfuse3 lacks. libfuse shows the node id as st_ino, so the inode table uses
the stable inode number as node id wherever that is free; a changed object gets a
new node id.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyfuse3
import trio

from fusefs.fuse.interrupts import OPERATIONS, WaitingRequest
from fusefs.fuse.protocol import Opcode
from fusefs.linux.mount import MountError, MountRequest, helper_options
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.operations import Operations
from fusefs.posix.types import Answer, Caller, NameKind, NewAttributes
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.requests import RequestTimes
from fusefs.telemetry.stalls import served

logger = logging.getLogger("fusefs.session")

T = TypeVar("T")
# The most requests that are processed at a time; all others wait in the kernel.
MOST_TASKS = 99


class PyfuseNotifications(KernelNotifier):
    """The notifications that libfuse can send."""

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
        """Mount for the duration of the block; raises MountError if libfuse refuses."""
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
        """False, as the mount does not outlive this process, and the reason."""
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
        with self._errors(Opcode.LOOKUP):
            answer = self._operations.lookup(parent, name, _caller(context))
            found = await self._result(Opcode.LOOKUP, parent, answer, context.pid)
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
            self._operations.forget(nodeid, nlookup)

    async def getattr(
        self, nodeid: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._errors(Opcode.GETATTR):
            answer = self._operations.getattr(nodeid)
            return self.pack(*await self._result(Opcode.GETATTR, nodeid, answer, context.pid))

    async def open(
        self, nodeid: int, flags: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        with self._errors(Opcode.OPEN):
            answer = self._operations.open(nodeid, flags, _caller(context))
            opened = await self._result(Opcode.OPEN, nodeid, answer, context.pid)
        return pyfuse3.FileInfo(fh=opened.fh, keep_cache=opened.keep_cache)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        with self._errors(Opcode.READ):
            data = await self._result(
                Opcode.READ, self._opened(fh), self._operations.read(fh, offset, size)
            )
        assert isinstance(data, (bytes, bytearray, memoryview))
        # The memory of an immediate answer may be reused before libfuse sends it.
        return data if isinstance(data, bytes) else bytes(data)

    async def release(self, fh: int) -> None:
        self._operations.release(fh)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Wait for pending removals in a directory; a new name is durable when its object is."""
        nodeid = self._listed(fh)
        if self._operations.mutations is None or not nodeid:
            return
        with self._errors(Opcode.FSYNCDIR):
            await self._result(Opcode.FSYNCDIR, nodeid, self._mutations.fsync_directory(nodeid))

    async def opendir(self, nodeid: int, context: pyfuse3.RequestContext) -> int:
        with self._errors(Opcode.OPENDIR):
            handle, _ = self._operations.opendir(nodeid, _caller(context))
            return handle.fh

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        with self._errors(Opcode.READDIR):
            buffer = _Pyfuse3Entries(self, token)
            read = self._operations.readdir(fh, start_id, buffer)
            await self._result(Opcode.READDIR, self._listed(fh), read)

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
        with self._errors(Opcode.GETXATTR):
            answer = self._operations.getxattr(nodeid, name.decode(errors="replace"))
            return await self._result(Opcode.GETXATTR, nodeid, answer, context.pid)

    async def listxattr(self, nodeid: int, context: pyfuse3.RequestContext) -> list[bytes]:
        with self._errors(Opcode.LISTXATTR):
            answer = self._operations.listxattr(nodeid)
            names = await self._result(Opcode.LISTXATTR, nodeid, answer, context.pid)
            return [name.encode() for name in names]

    # Changes. On a read-only mount the kernel sends none of them.

    @property
    def _mutations(self) -> Mutations:
        if self._operations.mutations is None:
            raise OSError(errno.EROFS, "the mount is read-only")
        return self._operations.mutations

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, context: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        with self._errors(Opcode.CREATE):
            made = self._mutations.create(parent, name, mode, flags, _caller(context))
            inode, opened = await self._result(Opcode.CREATE, parent, made, context.pid)
            return pyfuse3.FileInfo(fh=opened.fh, keep_cache=True), self.pack(inode, 0.0)

    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._errors(Opcode.MKNOD):
            made = self._mutations.mknod(parent, name, mode, _caller(context))
            return self.pack(await self._waited(Opcode.MKNOD, parent, made, context.pid), 0.0)

    async def mkdir(
        self, parent: int, name: bytes, mode: int, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._errors(Opcode.MKDIR):
            made = self._mutations.mkdir(parent, name, mode, _caller(context))
            return self.pack(await self._waited(Opcode.MKDIR, parent, made, context.pid), 0.0)

    async def symlink(
        self, parent: int, name: bytes, target: bytes, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._errors(Opcode.SYMLINK):
            made = self._mutations.symlink(parent, name, target, _caller(context))
            return self.pack(await self._waited(Opcode.SYMLINK, parent, made, context.pid), 0.0)

    async def readlink(self, nodeid: int, context: pyfuse3.RequestContext) -> bytes:
        with self._errors(Opcode.READLINK):
            target = self._operations.readlink(nodeid)
            return await self._waited(Opcode.READLINK, nodeid, target, context.pid)

    async def unlink(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._errors(Opcode.UNLINK):
            done = self._mutations.unlink(parent, name, _caller(context))
            await self._result(Opcode.UNLINK, parent, done, context.pid)

    async def rmdir(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._errors(Opcode.RMDIR):
            done = self._mutations.rmdir(parent, name, _caller(context))
            await self._waited(Opcode.RMDIR, parent, done, context.pid)

    async def rename(
        self,
        parent: int,
        name: bytes,
        to: int,
        new_name: bytes,
        flags: int,
        context: pyfuse3.RequestContext,
    ) -> None:
        with self._errors(Opcode.RENAME2):
            done = self._mutations.rename(parent, name, to, new_name, flags, _caller(context))
            await self._waited(Opcode.RENAME2, parent, done, context.pid)

    async def link(
        self, nodeid: int, parent: int, name: bytes, context: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        with self._errors(Opcode.LINK):
            made = self._mutations.link(nodeid, parent, name, _caller(context))
            return self.pack(await self._waited(Opcode.LINK, parent, made, context.pid), 0.0)

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
        with self._errors(Opcode.SETATTR):
            changed = self._mutations.setattr(nodeid, new)
            return self.pack(*await self._waited(Opcode.SETATTR, nodeid, changed, context.pid))

    async def setxattr(
        self, nodeid: int, name: bytes, value: bytes, context: pyfuse3.RequestContext
    ) -> None:
        with self._errors(Opcode.SETXATTR):
            done = self._mutations.setxattr(nodeid, name, value, 0, _caller(context))
            await self._waited(Opcode.SETXATTR, nodeid, done, context.pid)

    async def removexattr(self, nodeid: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        with self._errors(Opcode.REMOVEXATTR):
            done = self._mutations.removexattr(nodeid, name, _caller(context))
            await self._waited(Opcode.REMOVEXATTR, nodeid, done, context.pid)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        with self._errors(Opcode.WRITE):
            written = self._mutations.writer.write(fh, offset, memoryview(data))
            return await self._result(Opcode.WRITE, self._opened(fh), written)

    async def flush(self, fh: int) -> None:
        if self._operations.writer is not None:
            with self._errors(Opcode.FLUSH):
                flushed = self._operations.writer.flusher.flush(fh)
                await self._result(Opcode.FLUSH, self._opened(fh), flushed)

    async def fsync(self, fh: int, datasync: bool) -> None:
        with self._errors(Opcode.FSYNC):
            synced = self._mutations.writer.flusher.fsync(fh)
            await self._result(Opcode.FSYNC, self._opened(fh), synced)

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
        """The node id of an open file; 0 if the handle is unknown."""
        handle = self._operations.handles.files.get(fh)
        return handle.inode.nodeid if handle is not None else 0

    def _listed(self, fh: int) -> int:
        """The node id of an open directory; 0 if the handle is unknown."""
        handle = self._operations.handles.directories.get(fh)
        return handle.inode.nodeid if handle is not None else 0

    async def _result(self, opcode: Opcode, nodeid: int, answer: Answer[T], pid: int = 0) -> T:
        """Return an operation's answer, awaiting it if needed; `pid` is 0 if libfuse gives none."""
        ACTIVITY.note()
        if not isinstance(answer, Coroutine):
            return answer
        return await self._waited(opcode, nodeid, answer, pid)

    async def _waited(
        self, opcode: Opcode, nodeid: int, answer: Coroutine[Any, Any, T], pid: int
    ) -> T:
        """Await an operation's answer and return it; the request is in `waiting` meanwhile."""
        unique = id(answer)
        self.waiting[unique] = WaitingRequest(
            opcode, nodeid, pid, time.monotonic(), trio.CancelScope()
        )
        try:
            with served():
                return await answer
        finally:
            del self.waiting[unique]

    @contextmanager
    def _errors(self, opcode: Opcode) -> Iterator[None]:
        self.requests += 1
        began = time.monotonic()
        try:
            yield
            self.times.answered(opcode, began)
        except OSError as error:
            self.times.failed(opcode, began, error.errno)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except Exception as error:  # an unexpected error must not end the mount
            logger.exception("answering EIO: a fault of this program")
            self.times.failed(opcode, began, errno.EIO)
            raise pyfuse3.FUSEError(errno.EIO) from error


class _Pyfuse3Entries:
    """The buffer of one READDIRPLUS reply of pyfuse3; all entries have their inodes."""

    is_plus = True
    is_empty = True
    takes_names = False

    def __init__(self, handlers: Pyfuse3Handlers, token: pyfuse3.ReaddirToken) -> None:
        self._handlers = handlers
        self._token = token

    def add_dot(self, name: bytes, ino: int, offset: int) -> bool:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = ino
        entry.st_mode = stat.S_IFDIR
        return self._reply(name, entry, offset)

    def add(self, name: bytes, inode: Inode, offset: int, valid_s: float) -> bool:
        return self._reply(name, self._handlers.pack(inode, valid_s), offset)

    def add_name(self, name: bytes, ino: int, offset: int, kind: NameKind) -> bool:
        raise AssertionError("each entry has its inode")

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
