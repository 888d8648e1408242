"""The handlers of requests that change files: unpack, call the mutation, pack the reply."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from fusefs.fuse import protocol
from fusefs.fuse.protocol import Opcode, Setattr
from fusefs.fuse.read_handlers import (
    Handler,
    Payload,
    ReadHandlers,
    Result,
    open_out,
    packed,
    when_there,
)
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.nodes.inode import UNKNOWN_OWNER
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.types import Caller, NewAttributes, OpenResult

SECOND_NS = 1_000_000_000

# Seconds for which the kernel may cache a new file's attributes, which only this kernel's programs
# can change: Python's open() requests them twice.
NEW_S = 1.0
# Programs have their usual substitutes for copy_file_range and O_TMPFILE. After the first
# ENOSYS the kernel answers EOPNOTSUPP itself, without a request.
_UNSUPPORTED = (Opcode.COPY_FILE_RANGE, Opcode.TMPFILE)


class WriteHandlers:
    """The handlers of requests that change files; `table` maps opcodes to them."""

    def __init__(self, handlers: ReadHandlers, mutations: Mutations) -> None:
        self._handlers = handlers
        self._mutations = mutations
        self.table: dict[int, Handler] = {
            **dict.fromkeys(_UNSUPPORTED, _refuse_unsupported),
            Opcode.CREATE: self._create,
            Opcode.MKNOD: self._mknod,
            Opcode.MKDIR: self._mkdir,
            Opcode.SYMLINK: self._symlink,
            Opcode.UNLINK: self._unlink,
            Opcode.RMDIR: self._rmdir,
            Opcode.RENAME: partial(self._rename, layout=protocol.RENAME_IN),
            Opcode.RENAME2: partial(self._rename, layout=protocol.RENAME2_IN),
            Opcode.SETATTR: self._setattr,
            Opcode.SETXATTR: self._setxattr,
            Opcode.REMOVEXATTR: self._removexattr,
            Opcode.WRITE: self._write,
            Opcode.FLUSH: self._flush,
            Opcode.FSYNC: self._fsync,
            Opcode.FSYNCDIR: self._fsyncdir,
            Opcode.FALLOCATE: self._fallocate,
            Opcode.LINK: self._link,
        }

    # Names. `body` is in the session's buffer, so it is copied before any wait.

    def _create(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        flags, mode, *_ = protocol.CREATE_IN.unpack_from(body)
        name = bytes(body[protocol.CREATE_IN.size : -1])
        return packed(self._mutations.create(nodeid, name, mode, flags, caller), self._created)

    def _created(self, made: tuple[Inode, OpenResult]) -> Payload:
        inode, opened = made
        return self._handlers.packed_entry(inode, 0.0, NEW_S) + open_out(opened)

    def _mknod(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        mode, *_ = protocol.MKNOD_IN.unpack_from(body)
        name = bytes(body[protocol.MKNOD_IN.size : -1])
        return self._made(self._mutations.mknod(nodeid, name, mode, caller))

    def _mkdir(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        mode, _ = protocol.MKDIR_IN.unpack_from(body)
        name = bytes(body[protocol.MKDIR_IN.size : -1])
        return self._made(self._mutations.mkdir(nodeid, name, mode, caller))

    def _symlink(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        name, target, _ = bytes(body).split(b"\0")
        return self._made(self._mutations.symlink(nodeid, name, target, caller))

    def _link(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        (old,) = protocol.LINK_IN.unpack_from(body)
        name = bytes(body[protocol.LINK_IN.size : -1])
        return self._made(self._mutations.link(old, nodeid, name, caller))

    def _made(self, answer: Coroutine[Any, Any, Inode]) -> Result:
        return when_there(answer, lambda inode: self._handlers.packed_entry(inode, 0.0))

    def _unlink(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        return _done(self._mutations.unlink(nodeid, bytes(body[:-1]), caller))

    def _rmdir(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        return _done(self._mutations.rmdir(nodeid, bytes(body[:-1]), caller))

    def _rename(
        self, nodeid: int, body: memoryview, caller: Caller, *, layout: protocol.Layout
    ) -> Result:
        to, flags, *_ = *layout.unpack_from(body), 0  # RENAME has no flags
        name, new_name, _ = bytes(body[layout.size :]).split(b"\0")
        return _done(self._mutations.rename(nodeid, name, to, new_name, flags, caller))

    # Attributes

    def _setattr(self, nodeid: int, body: memoryview, _caller: Caller) -> Result:
        (valid, _, _, size, _, _, mtime, _, _, mtime_rest, _, mode, _, uid, gid, _) = (
            protocol.SETATTR_IN.unpack_from(body)
        )
        new = NewAttributes()
        if valid & Setattr.MODE:
            new.mode = mode
        if valid & Setattr.UID:
            new.uid = uid
        if valid & Setattr.GID:
            new.gid = gid
        if valid & Setattr.SIZE:
            new.size, new.has_handle = size, bool(valid & Setattr.FH)
        if valid & Setattr.MTIME_NOW:
            new.mtime_ns = time.time_ns()
        elif valid & Setattr.MTIME:
            new.mtime_ns = mtime * SECOND_NS + mtime_rest
        if (found := self._mutations.setattr_now(nodeid, new)) is not None:
            return self._handlers.attr_out(found)
        return when_there(self._mutations.setattr(nodeid, new), self._handlers.attr_out)

    def _setxattr(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        size, flags = protocol.SETXATTR_IN_SHORT.unpack_from(body)
        name, _, rest = bytes(body[protocol.SETXATTR_IN_SHORT.size :]).partition(b"\0")
        return _done(self._mutations.setxattr(nodeid, name, rest[:size], flags, caller))

    def _removexattr(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        return _done(self._mutations.setxattr(nodeid, bytes(body[:-1]), None, 0, caller))

    # Contents

    def _write(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, offset, size, flags, owner, open_flags, _ = protocol.WRITE_IN.unpack_from(body)
        start = protocol.WRITE_IN.size
        answer = self._mutations.writer.write(
            fh,
            offset,
            body[start : start + size],
            owner if flags & protocol.WRITE_LOCKOWNER else UNKNOWN_OWNER,
            # The kernel gives no open flags for the write-back of mapped pages.
            is_appended=bool(open_flags & os.O_APPEND),
        )
        if isinstance(answer, int):
            return protocol.WRITE_OUT.pack(answer, 0)
        return when_there(answer, lambda count: protocol.WRITE_OUT.pack(count, 0))

    def _flush(self, _nodeid: int, body: memoryview, caller: Caller) -> Result:
        fh, _, _, owner = protocol.FLUSH_IN.unpack_from(body)
        return _done(self._mutations.writer.flusher.flush(fh, caller.pid, owner))

    def _fsync(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        return _done(self._mutations.writer.flusher.fsync(protocol.FSYNC_IN.unpack_from(body)[0]))

    def _fsyncdir(self, nodeid: int, _body: memoryview, _caller: Caller) -> Result:
        # Only removals need a wait: a new name is as durable as its object.
        return _done(self._mutations.fsync_directory(nodeid))

    def _fallocate(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, offset, length, mode, _ = protocol.FALLOCATE_IN.unpack_from(body)
        return _done(self._mutations.writer.allocate(fh, offset, length, mode))


def _refuse_unsupported(_nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
    raise OSError(errno.ENOSYS, "not supported")


def _done(answer: Coroutine[Any, Any, None] | None) -> Result:
    return b"" if answer is None else when_there(answer, lambda _none: b"")
