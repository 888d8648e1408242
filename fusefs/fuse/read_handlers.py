"""The handlers of requests that change nothing: unpack, call the operation, pack the reply.

A handler gets the node id, the request's body and the caller. It returns the reply, None
if the request gets no reply, or a coroutine that returns the reply or None. Errors are
raised as OSError or StoreError. Packed attributes are cached in their inode.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable, Coroutine
from functools import partial
from types import CoroutineType
from typing import Any, TypeVar, cast

from fusefs.fuse import protocol
from fusefs.fuse.protocol import Fopen, Opcode
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.operations import Operations
from fusefs.posix.types import Answer, Caller, InFile, LookupResult, NameKind, OpenResult

FOREVER_S = 1 << 40

CHANGING = (
    Opcode.SETATTR,
    Opcode.SYMLINK,
    Opcode.MKNOD,
    Opcode.MKDIR,
    Opcode.UNLINK,
    Opcode.RMDIR,
    Opcode.RENAME,
    Opcode.RENAME2,
    Opcode.LINK,
    Opcode.WRITE,
    Opcode.SETXATTR,
    Opcode.REMOVEXATTR,
    Opcode.CREATE,
    Opcode.FALLOCATE,
    Opcode.COPY_FILE_RANGE,
    Opcode.TMPFILE,
)

Buffer = bytes | bytearray | memoryview
Payload = Buffer | InFile | None  # None: no reply is due
Result = Payload | Coroutine[Any, Any, Payload]


Handler = Callable[[int, memoryview, Caller], Result]
Answered = TypeVar("Answered")


class ReadHandlers:
    """The handlers of requests that change nothing; `table` maps opcodes to them."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.table: dict[int, Handler] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._batch_forget,
            Opcode.GETATTR: self._getattr,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: partial(self._read_directory, is_plus=False),
            Opcode.READDIRPLUS: partial(self._read_directory, is_plus=True),
            Opcode.RELEASEDIR: self._releasedir,
            Opcode.STATFS: self._statfs,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.READLINK: self._readlink,
        }
        self.table.update(dict.fromkeys(CHANGING, _refuse_change))

    # Names

    def _lookup(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        return packed(self._operations.lookup(nodeid, bytes(body[:-1]), caller), self._entry)

    def _entry(self, found: LookupResult) -> bytes:
        if found.inode is None:
            if not found.valid_s:
                raise OSError(errno.ENOENT, "no such name")
            seconds, rest = _valid(found.valid_s)
            return protocol.ENTRY_OUT_HEAD.pack(0, 0, seconds, 0, rest, 0) + bytes(
                protocol.ATTR.size
            )
        of_attributes = max(found.valid_s, found.inode.valid_s) if found.has_attributes else 0.0
        return self.packed_entry(found.inode, found.valid_s, of_attributes)

    def packed_entry(
        self, inode: Inode, valid_s: float, attributes_valid_s: float | None = None
    ) -> bytes:
        """Pack an inode's fuse_entry_out; `attributes_valid_s` is `valid_s` by default."""
        seconds, rest = _valid(valid_s)
        of_attributes, rest_of_attributes = seconds, rest
        if attributes_valid_s is not None:
            of_attributes, rest_of_attributes = _valid(attributes_valid_s)
        head = protocol.ENTRY_OUT_HEAD.pack(
            inode.nodeid, 0, seconds, of_attributes, rest, rest_of_attributes
        )
        return head + (inode.packed or self.pack(inode))

    def pack(self, inode: Inode) -> bytes:
        """Pack an inode's attributes (fuse_attr), and cache the result in the inode.

        Attributes of a staged file, or shown from a `lead` node (inode.py), may change: not cached.
        """
        shown = self._operations.attributes(inode)
        seconds, rest = divmod(shown.mtime_ns, 1_000_000_000)
        packed = protocol.ATTR.pack(
            shown.ino,
            shown.size,
            shown.blocks,
            seconds,
            seconds,
            seconds,
            rest,
            rest,
            rest,
            shown.mode,
            shown.nlink,
            shown.uid,
            shown.gid,
            0,
            4096,
            0,
        )
        if inode.staged is None and inode.lead is None:
            inode.packed = packed
        return packed

    def _forget(self, nodeid: int, body: memoryview, _caller: Caller) -> Payload:
        self._operations.inodes.forget(nodeid, protocol.FORGET_IN.unpack_from(body)[0])
        return None

    def _batch_forget(self, _nodeid: int, body: memoryview, _caller: Caller) -> Payload:
        count, _ = protocol.BATCH_FORGET_IN.unpack_from(body)
        for index in range(count):
            at = protocol.BATCH_FORGET_IN.size + index * protocol.FORGET_ONE.size
            self._operations.inodes.forget(*protocol.FORGET_ONE.unpack_from(body, at))
        return None

    def _getattr(self, nodeid: int, _body: memoryview, _caller: Caller) -> Result:
        return packed(self._operations.getattr(nodeid), self.attr_out)

    def attr_out(self, inode: Inode) -> bytes:
        seconds, rest = _valid(inode.valid_s)
        return protocol.ATTR_OUT_HEAD.pack(seconds, rest, 0) + (inode.packed or self.pack(inode))

    # Files

    def _open(self, nodeid: int, body: memoryview, caller: Caller) -> Result:
        flags, _ = protocol.OPEN_IN.unpack_from(body)
        return packed(self._operations.open(nodeid, flags, caller), open_out)

    def _read(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        return self._operations.read(fh, offset, size, in_file=True)

    def _flush(self, _nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
        return b""  # nothing was written

    def _release(self, _nodeid: int, body: memoryview, _caller: Caller) -> Payload:
        self._operations.release(protocol.RELEASE_IN.unpack_from(body)[0])
        return b""

    # Directories

    def _opendir(self, nodeid: int, _body: memoryview, caller: Caller) -> Payload:
        handle, is_cached = self._operations.opendir(nodeid, caller)
        flags = 0
        if self._operations.may_cache(handle.inode):
            flags = Fopen.CACHE_DIR | (Fopen.KEEP_CACHE if is_cached else 0)
        return protocol.OPEN_OUT.pack(handle.fh, flags, 0)

    def _read_directory(
        self, _nodeid: int, body: memoryview, _caller: Caller, *, is_plus: bool
    ) -> Result:
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        buffer = Entries(self, size, is_plus=is_plus)
        answer = self._operations.readdir(fh, offset, buffer)
        return packed(answer, lambda _none: buffer.data)

    def _releasedir(self, _nodeid: int, body: memoryview, _caller: Caller) -> Payload:
        self._operations.releasedir(protocol.RELEASE_IN.unpack_from(body)[0])
        return b""

    def _statfs(self, _nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
        # A bucket has no limit: show 2^60 bytes, all free.
        blocks = 1 << 48
        return protocol.STATFS.pack(
            blocks, blocks, blocks, 1 << 40, 1 << 40, 4096, 255, 4096, 0, bytes(24)
        )

    # Links and extended attributes

    def _readlink(self, nodeid: int, _body: memoryview, _caller: Caller) -> Result:
        return self._operations.readlink(nodeid)

    def _getxattr(self, nodeid: int, body: memoryview, _caller: Caller) -> Result:
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        name = bytes(body[protocol.GETXATTR_IN.size : -1]).decode(errors="replace")
        return packed(self._operations.getxattr(nodeid, name), lambda value: _sized(value, size))

    def _listxattr(self, nodeid: int, body: memoryview, _caller: Caller) -> Result:
        size, _ = protocol.GETXATTR_IN.unpack_from(body)
        answer = self._operations.listxattr(nodeid)
        return packed(
            answer, lambda names: _sized(b"".join(name.encode() + b"\0" for name in names), size)
        )


def packed(answer: Answer[Answered], pack: Callable[[Answered], Payload]) -> Result:
    """Pack an answer; for a coroutine, return a coroutine that packs its result."""
    if isinstance(answer, CoroutineType):  # takes a tenth of the time of the abstract class
        return when_there(answer, pack)
    return pack(cast("Answered", answer))


async def when_there(
    answer: Coroutine[Any, Any, Answered], pack: Callable[[Answered], Payload]
) -> Payload:
    """Await an answer and pack it."""
    return pack(await answer)


class Entries:
    """The buffer of one READDIR or READDIRPLUS reply; entries are packed as they are added."""

    __slots__ = ("_handlers", "_held", "_size", "_valid", "data", "is_plus")

    takes_names = True

    def __init__(self, handlers: ReadHandlers, size: int, *, is_plus: bool) -> None:
        self._handlers = handlers
        self._size = size
        self.is_plus = is_plus
        self.data = bytearray()
        # The last entry's validity, in seconds and as packed: mostly the next entry's is the same.
        self._held, self._valid = 0.0, (0, 0)

    @property
    def is_empty(self) -> bool:
        return not self.data

    def add(self, name: bytes, inode: Inode, offset: int, valid_s: float) -> bool:
        length = len(name)
        padded = name + _PADDING[-length % 8]
        if len(self.data) + _DIRENTPLUS.size + len(padded) > self._size:
            return False
        if valid_s != self._held:
            self._held, self._valid = valid_s, _valid(valid_s)
        seconds, rest = self._valid
        packed = inode.packed or self._handlers.pack(inode)
        # An entry's type in readdir is the upper bits of its mode in stat.
        kind = _MODE.unpack_from(packed, _MODE_AT)[0] >> 12
        self.data += _DIRENTPLUS.pack(
            inode.nodeid, 0, seconds, seconds, rest, rest, packed, inode.ino, offset, length, kind
        )
        self.data += padded
        return True

    def add_name(self, name: bytes, ino: int, offset: int, kind: NameKind) -> bool:
        """Add a name without attributes (node id 0 in READDIRPLUS); False if it does not fit."""
        head = bytes(_DIRENTPLUS.size - protocol.DIRENT.size) if self.is_plus else b""
        padded = name + _PADDING[-len(name) % 8]
        if len(self.data) + len(head) + protocol.DIRENT.size + len(padded) > self._size:
            return False
        self.data += head + protocol.DIRENT.pack(ino, offset, len(name), _TYPES[kind]) + padded
        return True


# DT_DIR, DT_REG, and DT_UNKNOWN, upon which programs call stat.
_TYPES = {NameKind.DIRECTORY: 4, NameKind.FILE: 8, NameKind.OBJECT: 0}
# fuse_direntplus as one struct, in which the packed attributes are one field.
_DIRENTPLUS = struct.Struct("=QQQQII88sQQII")
_MODE, _MODE_AT = struct.Struct("=I"), protocol.ATTR.offsets()["mode"]
_PADDING = [bytes(count) for count in range(8)]


# Requests that always fail, with their errors. Python's open() calls isatty (IOCTL) on each file.
REFUSED = {int(Opcode.IOCTL): errno.ENOTTY}


def _refuse_change(_nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
    raise OSError(errno.EROFS, "the mount is read-only")


def open_out(opened: OpenResult) -> bytes:
    """Pack fuse_open_out: the reply to OPEN, and the end of the reply to CREATE."""
    # Handles that cannot write have nothing to flush.
    flags = 0 if opened.may_write else _NOFLUSH
    if opened.backing_id:
        # Writing handles send reads and writes to the daemon; their mappings use the file itself.
        flags |= _PASSTHROUGH | (_DIRECT_IO if opened.is_direct else 0)
    elif opened.is_direct and _DROPS_PAGES:
        flags |= _DIRECT_IO
    elif opened.keep_cache:
        flags |= _KEEP_CACHE
    return protocol.OPEN_OUT.pack(opened.fh, flags, opened.backing_id)


def drops_pages(release: str) -> bool:
    """True if kernels of this release drop cached pages that a direct write has made stale.

    Before Linux 6.6 the pages stay: after an append to a file that another program has read,
    that program sees zeros, even after both programs have closed the file. Before 6.18.3 a read
    during such a write brings the old bytes back into the page cache.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    return found is not None and tuple(int(part or 0) for part in found.groups()) >= (6, 18, 3)


_DROPS_PAGES = drops_pages(os.uname().release)
# Plain numbers: joining enum flags takes longer than the rest of an open's reply.
_NOFLUSH, _PASSTHROUGH = int(Fopen.NOFLUSH), int(Fopen.PASSTHROUGH)
_DIRECT_IO, _KEEP_CACHE = int(Fopen.DIRECT_IO), int(Fopen.KEEP_CACHE)


def _sized(value: bytes, size: int) -> bytes:
    """Pack an xattr reply for a buffer of `size` bytes (0: length only); ERANGE if too long."""
    if not size:
        return protocol.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, "too long for the buffer")
    return value


def _valid(seconds: float) -> tuple[int, int]:
    """Split a validity time into whole seconds and nanoseconds."""
    if seconds >= FOREVER_S:
        return FOREVER_S, 0
    whole = int(seconds)
    return whole, int((seconds - whole) * 1_000_000_000)
