"""What the kernel believes, on record: an append-only log of nodes and handles.

A mount can outlive the process that serves it only if the next process knows
what the kernel still holds: which node id stands for which name and version,
how often each was handed out, which handles are open and in which mode. Each
of these is appended here before the reply that makes the kernel believe it:
log, then reply.

The log is a file that is mapped shared: an append is a copy into memory
(0.3 microseconds where a write would cost 3), which the kernel keeps when the
process is killed. Its blocks are allocated before they are written, so a full
disk shows up as an error of `posix_fallocate` and not as a SIGBUS. A record
is its length, its type, a CRC and its payload; the first one that does not
check out ends the log, so a kill in the middle of a copy costs nothing but
that record, whose reply was not sent.

Every record tells the whole state of one item, never a change of it. So a
log may be compacted while it is written to: the new file receives each item
once, a few at a time, and everything that happens meanwhile goes to both.
Lookup counts are upper bounds: a FORGET that was read and not logged is lost.

The first record carries the format and the boot id. A log of another boot is
never used: the kernel that it talks about is gone.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fusefs.posix.inodes import Inode
from fusefs.store.base import ObjectInfo

logger = logging.getLogger("fusefs.journal")

FORMAT = 1
# Grown by this much at a time: large enough to be rare, small enough for tmpfs.
STEP = 4 << 20
# A log is rewritten when it is this large and twice what its items need.
COMPACT_FROM = 32 << 20

_RECORD = struct.Struct("<HHI")  # length of the payload, type, CRC of type and payload
_NODE = struct.Struct("<QQQQQqHHH")  # node id, parent, ino, lookups, size, mtime, 3 lengths
_COUNT = struct.Struct("<QQ")
_ID = struct.Struct("<Q")
_OPEN = struct.Struct("<QQQIii")  # unique, fh, node id, flags, mode, backing id

_START, _NODE_TYPE, _COUNT_TYPE, _GONE_TYPE, _OPEN_TYPE, _CLOSED_TYPE, _INIT_TYPE = range(1, 8)
_DIRECTORY = 0xFFFF  # stands for the length of the ETag of a directory

SERVED, PASSTHROUGH, DIRECTORY = range(3)  # the modes of an open handle


class NodeLog(Protocol):
    """What the node and handle tables tell before a reply."""

    def node(self, inode: Inode) -> None: ...
    def count(self, inode: Inode) -> None: ...
    def gone(self, nodeid: int) -> None: ...
    def opened(
        self, unique: int, fh: int, nodeid: int, flags: int, mode: int, backing_id: int
    ) -> None: ...
    def closed(self, fh: int) -> None: ...
    def negotiated(self, init_out: bytes) -> None: ...


class NoJournal:
    """For a session that cannot be taken over."""

    def node(self, inode: Inode) -> None: ...
    def count(self, inode: Inode) -> None: ...
    def gone(self, nodeid: int) -> None: ...
    def opened(
        self, unique: int, fh: int, nodeid: int, flags: int, mode: int, backing_id: int
    ) -> None: ...
    def closed(self, fh: int) -> None: ...
    def negotiated(self, init_out: bytes) -> None: ...


class _Log:
    """One mapped file that records are appended to."""

    __slots__ = ("_fd", "_limit", "_map", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        self._limit = STEP
        try:
            os.posix_fallocate(self._fd, 0, STEP)
            self._map = mmap.mmap(self._fd, STEP)
        except OSError:
            os.close(self._fd)
            raise

    def append(self, record: bytes) -> None:
        stop = self.size + len(record)
        if stop > self._limit:
            os.posix_fallocate(self._fd, self._limit, STEP)
            self._limit += STEP
            self._map.resize(self._limit)
        self._map[self.size : stop] = record
        self.size = stop

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class Journal:
    """The log of one mount. Belongs to the event loop.

    If the disk cannot take it, the journal turns itself off with one warning:
    the mount goes on, but cannot be taken over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log: _Log | None = None
        self._next: _Log | None = None
        self._compacted_size = 0
        self._init_record = b""
        try:
            self._log = _Log(path)
        except OSError as error:
            self._give_up(error)
        self._append(_START, _start_payload())

    def node(self, inode: Inode) -> None:
        self._append(_NODE_TYPE, _node_payload(inode))

    def count(self, inode: Inode) -> None:
        self._append(_COUNT_TYPE, _COUNT.pack(inode.nodeid, inode.nlookup))

    def gone(self, nodeid: int) -> None:
        self._append(_GONE_TYPE, _ID.pack(nodeid))

    def opened(
        self, unique: int, fh: int, nodeid: int, flags: int, mode: int, backing_id: int
    ) -> None:
        self._append(_OPEN_TYPE, _OPEN.pack(unique, fh, nodeid, flags, mode, backing_id))

    def closed(self, fh: int) -> None:
        self._append(_CLOSED_TYPE, _ID.pack(fh))

    def negotiated(self, init_out: bytes) -> None:
        self._init_record = init_out
        self._append(_INIT_TYPE, init_out)

    @property
    def wants_compaction(self) -> bool:
        log = self._log
        return (
            log is not None
            and self._next is None
            and log.size > max(COMPACT_FROM, 2 * self._compacted_size)
        )

    def begin_compaction(self) -> None:
        """From here until `finish_compaction` everything is also written to a new log.

        The caller writes each open handle and each inode once, in any order
        and with pauses, by `opened` and `node`.
        """
        try:
            self._next = _Log(self._path.with_suffix(".next"))
        except OSError as error:
            self._give_up(error)
            return
        self._append(_START, _start_payload())
        self._append(_INIT_TYPE, self._init_record)

    def finish_compaction(self) -> None:
        if self._log is None or self._next is None:
            return
        try:
            os.replace(self._next.path, self._path)
        except OSError as error:
            self._give_up(error)
            return
        self._log.close()
        self._log, self._next = self._next, None
        self._compacted_size = self._log.size

    def close(self, *, remove: bool) -> None:
        for log in (self._log, self._next):
            if log is not None:
                log.close()
        self._log = self._next = None
        if remove:
            self._path.unlink(missing_ok=True)
            self._path.with_suffix(".next").unlink(missing_ok=True)

    def _append(self, kind: int, payload: bytes) -> None:
        if self._log is None:
            return
        record = _RECORD.pack(len(payload), kind, zlib.crc32(payload, kind)) + payload
        try:
            self._log.append(record)
            if self._next is not None:
                self._next.append(record)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "the journal %s is off, this mount cannot be taken over: %s",
            self._path,
            os.strerror(error.errno or errno.EIO),
        )
        self.close(remove=True)


@dataclass(slots=True)
class LoggedNode:
    """A node as the log tells it; `info` is None for a directory."""

    nodeid: int
    parent: int
    ino: int
    name: str
    nlookup: int
    info: ObjectInfo | None


@dataclass(slots=True)
class LoggedHandle:
    """An open file or directory; `unique` is the request that opened it."""

    unique: int
    fh: int
    nodeid: int
    flags: int
    mode: int
    backing_id: int


@dataclass(slots=True)
class KernelState:
    """All that a log tells: what the kernel held when the last record was written."""

    init_out: bytes = b""
    nodes: dict[int, LoggedNode] = field(default_factory=dict)
    handles: dict[int, LoggedHandle] = field(default_factory=dict)


class UnusableJournalError(Exception):
    """The log is of another boot or another format, or not a log at all."""


def replay(path: Path) -> KernelState:
    """Read a log back.

    Raises:
        UnusableJournalError: it must not be used; the message says why.
        OSError: it can't be read.
    """
    records = _records(path.read_bytes())
    if next(records, None) != (_START, _start_payload()):
        raise UnusableJournalError(f"{path} is of another boot, another format, or damaged")
    state = KernelState()
    for kind, payload in records:
        _apply(state, kind, payload)
    return state


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _RECORD.size <= len(data):
        length, kind, crc = _RECORD.unpack_from(data, at)
        payload = data[at + _RECORD.size : at + _RECORD.size + length]
        if kind == 0 or len(payload) < length or zlib.crc32(payload, kind) != crc:
            return
        yield kind, payload
        at += _RECORD.size + length


def _apply(state: KernelState, kind: int, payload: bytes) -> None:
    if kind == _NODE_TYPE:
        node = _parse_node(payload)
        state.nodes[node.nodeid] = node
    elif kind == _COUNT_TYPE:
        nodeid, nlookup = _COUNT.unpack(payload)
        if nodeid in state.nodes:
            state.nodes[nodeid].nlookup = nlookup
    elif kind == _GONE_TYPE:
        state.nodes.pop(_ID.unpack(payload)[0], None)
    elif kind == _OPEN_TYPE:
        handle = LoggedHandle(*_OPEN.unpack(payload))
        state.handles[handle.fh] = handle
    elif kind == _CLOSED_TYPE:
        state.handles.pop(_ID.unpack(payload)[0], None)
    elif kind == _INIT_TYPE:
        state.init_out = payload


def _start_payload() -> bytes:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"fusefs journal {FORMAT} {boot_id}".encode()


def _node_payload(inode: Inode) -> bytes:
    parent = inode.parent.nodeid if inode.parent is not None else 0
    name = inode.name.encode()
    info = inode.info
    if info is None:
        head = _NODE.pack(
            inode.nodeid, parent, inode.ino, inode.nlookup, 0, 0, len(name), _DIRECTORY, 0
        )
        return head + name
    etag, storage_class = info.etag.encode(), info.storage_class.encode()
    head = _NODE.pack(
        inode.nodeid, parent, inode.ino, inode.nlookup, info.size, info.mtime_ns,
        len(name), len(etag), len(storage_class),
    )  # fmt: skip
    return b"".join((head, name, etag, storage_class, info.key.encode()))


def _parse_node(payload: bytes) -> LoggedNode:
    nodeid, parent, ino, nlookup, size, mtime_ns, name_len, etag_len, class_len = _NODE.unpack_from(
        payload
    )
    at = _NODE.size
    name = payload[at : at + name_len].decode()
    if etag_len == _DIRECTORY:
        return LoggedNode(nodeid, parent, ino, name, nlookup, None)
    at += name_len
    etag = payload[at : at + etag_len].decode()
    storage_class = payload[at + etag_len : at + etag_len + class_len].decode()
    key = payload[at + etag_len + class_len :].decode()
    info = ObjectInfo(key, size, etag, mtime_ns, storage_class)
    return LoggedNode(nodeid, parent, ino, name, nlookup, info)
