"""The records of the journal, one for each item that the kernel gets to know, and their replay.

Each record has the whole state of one item, never a change of it. The first record of
a log has the format and the boot id.

A log is a header and records: length, type, payload and a CRC-32 that continues that of the record
before. So the valid part of a log ends at the first record that was changed, lost or moved. The
header has two slots for the end of the log, a size and the CRC there; the n-th record is committed
to slot n % 2 after it is written. A kill leaves at most one record that is not committed, or one
slot that is half written. So after n valid records slot (n - 1) % 2 has the end of n - 1 records,
or the log is damaged: if records were lost, the slot has a later end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fusefs.linux import clock
from fusefs.store.interface import ObjectInfo

FORMAT = 3
# Smaller node ids are the root's and the offsets of "." and ".." in directory streams.
FIRST_ID = 16
# Inode numbers from here on are hashes (nodes/file_numbers.py); all node ids are smaller.
LEAST_HASH = 1 << 62

MAGIC = b"fusefs journal3\n"
# Native byte order and size, so that one instruction stores a number: a kill does not tear it.
SLOT = struct.Struct("@QI")  # end of the log (bytes), the CRC there
SLOTS = (32, 48)  # offsets
HEADER_SIZE = 64
HEAD = struct.Struct("<HH")  # length of the payload, type
CRC = struct.Struct("<I")

NODE = struct.Struct("<QQQQQqHHH")  # node id, parent, ino, lookups, size, mtime, 3 lengths
COUNT = struct.Struct("<QQ")
ID = struct.Struct("<Q")
OPEN = struct.Struct("<QQQIii")  # unique, fh, node id, flags, mode, backing id
# The most frequent records, with their HEAD: packing both at once takes half the time.
WHOLE_OPEN, WHOLE_ID, WHOLE_COUNT = (
    struct.Struct(HEAD.format + part.format[1:]) for part in (OPEN, ID, COUNT)
)
TABLE = struct.Struct("<QQq")  # next node id, next fh, time of the mount in ns since the epoch
MARK = struct.Struct("<QI")  # node id of a directory, number of a position; 0 for no more marks
NUMBER = struct.Struct("<QQ")  # a place, the number there (nodes/file_numbers.py)
STALE = struct.Struct("<QII")  # node id, pid, 1 while a lookup is awaited, 0 after it

_DIRECTORY = 0xFFFF  # in place of the ETag's length: the node is a directory


class Kind:
    """The types of records; plain numbers, which are found faster than an enumeration's members."""

    START = 1
    NODE = 2
    COUNT = 3
    GONE = 4
    OPEN = 5
    CLOSED = 6
    INIT = 7
    TABLE = 8
    REPLACED = 9
    STALE = 10
    BEGUN = 11
    MARK = 12
    REMOVED = 13
    NUMBER = 14


@dataclass(slots=True)
class LoggedNode:
    """A node's state in the log: the root has parent 0; `info` is None for a directory.

    `entries_changed_ns` is the time of this mount's last change of a directory's entries, or 0.
    """

    nodeid: int
    parent: int
    ino: int
    name: str
    nlookup: int
    info: ObjectInfo | None
    entries_changed_ns: int = 0


@dataclass(slots=True)
class LoggedHandle:
    """An open file or directory; `unique` is the id of the request that opened it."""

    unique: int
    fh: int
    nodeid: int
    flags: int
    mode: int
    backing_id: int


class Parsed(NamedTuple):
    """A record, with the offset of its end (`stop`) and the CRC of the log up to there."""

    kind: int
    payload: bytes
    stop: int
    crc: int


def header() -> bytes:
    """The header of a log without records; its slot 0 has the end of the header."""
    data = bytearray(HEADER_SIZE)
    data[: len(MAGIC)] = MAGIC
    SLOT.pack_into(data, SLOTS[0], HEADER_SIZE, 0)
    return bytes(data)


def parse(data: bytes) -> Iterator[Parsed]:
    """Yield the records of a log up to the first invalid one."""
    at, crc = HEADER_SIZE, 0
    while at + HEAD.size <= len(data):
        length, kind = HEAD.unpack_from(data, at)
        begin, end = at + HEAD.size, at + HEAD.size + length
        if kind == 0 or end + CRC.size > len(data):
            return
        crc = zlib.crc32(data[at:end], crc)
        if CRC.unpack_from(data, end)[0] != crc:
            return
        at = end + CRC.size
        yield Parsed(kind, data[begin:end], at, crc)


def start_payload() -> bytes:
    """The payload of a log's first record: the format, and the boot id of the running system."""
    return f"fusefs journal {FORMAT} {clock.boot_id()}".encode()


def node_payload(
    nodeid: int,
    parent: int,
    ino: int,
    text: str,
    nlookup: int,
    info: ObjectInfo | None,
    entries_changed_ns: int,
) -> bytes:
    """The payload of a node's record (`text`: the name). A `LoggedNode` would double the time."""
    ids, name = (nodeid, parent, ino, nlookup), text.encode()
    if info is None:
        lengths = len(name), _DIRECTORY, 0
        return NODE.pack(*ids, 0, entries_changed_ns, *lengths) + name
    etag, storage_class = info.etag.encode(), info.storage_class.encode()
    lengths = len(name), len(etag), len(storage_class)
    head = NODE.pack(*ids, info.size, info.mtime_ns, *lengths)
    return b"".join((head, name, etag, storage_class, info.key.encode()))


def parse_node(payload: bytes) -> LoggedNode:
    nodeid, parent, ino, nlookup, size, mtime_ns, name_len, etag_len, class_len = NODE.unpack_from(
        payload
    )
    at = NODE.size
    name = payload[at : at + name_len].decode()
    if etag_len == _DIRECTORY:
        return LoggedNode(nodeid, parent, ino, name, nlookup, None, mtime_ns)
    at += name_len
    etag = payload[at : at + etag_len].decode()
    storage_class = payload[at + etag_len : at + etag_len + class_len].decode()
    key = payload[at + etag_len + class_len :].decode()
    info = ObjectInfo(key, size, etag, mtime_ns, storage_class)
    return LoggedNode(nodeid, parent, ino, name, nlookup, info)


@dataclass(slots=True)
class KernelState:
    """The nodes and handles of the kernel when the last record was written.

    `next_id` and `next_fh` have never been used; `mounted_ns` is 0 if unknown. `replaced` are the
    ids of nodes that have lost their names, `removed` the ids of those whose file has no name left;
    `numbers` are the records of nodes/file_numbers.py; `stale` are (node id, pid) of openers that
    got ESTALE and have not looked the name up since; `begun` are the ids of requests whose changes
    may have been made; `marks` are the directories' marks by node id (nodes/offsets.py).
    """

    init_out: bytes = b""
    nodes: dict[int, LoggedNode] = field(default_factory=dict)
    handles: dict[int, LoggedHandle] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    numbers: dict[int, int] = field(default_factory=dict)
    stale: set[tuple[int, int]] = field(default_factory=set)
    marks: dict[int, dict[str, int]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    next_id: int = FIRST_ID
    next_fh: int = 1
    mounted_ns: int = 0

    def apply(self, kind: int, payload: bytes) -> None:
        if kind == Kind.NODE:
            node = parse_node(payload)
            self.nodes[node.nodeid] = node
            self.next_id = max(self.next_id, node.nodeid + 1)
        elif kind == Kind.COUNT:
            nodeid, nlookup = COUNT.unpack(payload)
            if nodeid in self.nodes:
                self.nodes[nodeid].nlookup = nlookup
        elif kind == Kind.GONE:
            (nodeid,) = ID.unpack(payload)
            self.nodes.pop(nodeid, None)
            self.marks.pop(nodeid, None)
            self.replaced.discard(nodeid)
            self.removed.discard(nodeid)
        elif kind == Kind.OPEN:
            handle = LoggedHandle(*OPEN.unpack(payload))
            self.handles[handle.fh] = handle
            self.next_fh = max(self.next_fh, handle.fh + 1)
        elif kind == Kind.CLOSED:
            self.handles.pop(ID.unpack(payload)[0], None)
        elif kind == Kind.INIT:
            self.init_out = payload
        elif kind == Kind.TABLE:
            next_id, next_fh, self.mounted_ns = TABLE.unpack(payload)
            self.next_id, self.next_fh = max(self.next_id, next_id), max(self.next_fh, next_fh)
        elif kind in (Kind.REPLACED, Kind.REMOVED):
            (nodeid,) = ID.unpack(payload)
            self.replaced.add(nodeid)
            if kind == Kind.REMOVED:
                self.removed.add(nodeid)
            # The id is never reused, even if the kernel did not get it: a new node is not replaced.
            self.next_id = max(self.next_id, nodeid + 1)
        elif kind == Kind.NUMBER:
            place, number = NUMBER.unpack(payload)
            self.numbers.pop(place, None)  # the latest record comes last
            if number != place:
                self.numbers[place] = number
            if number < LEAST_HASH:
                self.next_id = max(self.next_id, number + 1)
        elif kind == Kind.MARK:
            nodeid, number = MARK.unpack_from(payload)
            if number:
                self.marks.setdefault(nodeid, {})[payload[MARK.size :].decode()] = number
            else:
                self.marks.pop(nodeid, None)
        elif kind == Kind.BEGUN:
            self.begun.add(ID.unpack(payload)[0])
        elif kind == Kind.STALE:
            nodeid, pid, is_pending = STALE.unpack(payload)
            (self.stale.add if is_pending else self.stale.discard)((nodeid, pid))


@dataclass(slots=True)
class Replayed:
    """A log that was read: its state, and the place to continue it.

    The last valid record is the `count`-th, ends at `stop` and has this `crc`;
    `current_bytes` estimates the size of a compacted log.
    """

    state: KernelState
    stop: int
    count: int
    crc: int
    current_bytes: int


class UnusableJournalError(Exception):
    """The log is damaged, of another boot or another format, or not a log at all."""


# The most attempts at reading a log that its daemon is writing to.
_ATTEMPTS = 5


def replay(path: Path, *, is_live: bool = False) -> Replayed:
    """Read a log back. Blocks: five seconds for a million nodes.

    `is_live`: the log's daemon may be writing to it meanwhile.

    Raises:
        UnusableJournalError: the log must not be used; the message says why.
        OSError: the log can't be read.
    """
    for _ in range(_ATTEMPTS if is_live else 0):
        try:
            return _replay(path, is_live=True)
        except UnusableJournalError:
            continue  # both slots of the header may have changed while they were read
    return _replay(path, is_live=is_live)


def _replay(path: Path, *, is_live: bool) -> Replayed:
    with path.open("rb", buffering=0) as file:
        # The header is read first, so that the data includes all records that it commits.
        slots = _slots(file.read(HEADER_SIZE))
        file.seek(0)
        data = file.read()
    found = parse(data)
    last = first = next(found, Parsed(0, b"", HEADER_SIZE, 0))
    if first.kind != Kind.START or not first.payload.startswith(b"fusefs journal "):
        raise UnusableJournalError(
            f"{path} is damaged: it is right up to byte {HEADER_SIZE} at most, or no journal at all"
        )
    if first.payload != start_payload():
        raise UnusableJournalError(f"{path} is of another boot or another format")
    state = KernelState()
    count, before = 1, (HEADER_SIZE, 0)
    has_all = (first.stop, first.crc) in slots  # the records up to a slot's end
    for record in found:
        state.apply(record.kind, record.payload)
        before, last = (last.stop, last.crc), record
        count += 1
        has_all = has_all or (is_live and (record.stop, record.crc) in slots)
    if not is_live:
        has_all = slots[(count - 1) % 2] == before
    if not has_all:
        raise UnusableJournalError(
            f"{path} is damaged: {count} records check out, up to byte {last.stop},"
            f" and it was written up to byte {max(size for size, _ in slots)}"
        )
    items = len(state.nodes) + len(state.handles) + len(state.numbers)
    items += sum(map(len, state.marks.values()))
    return Replayed(state, last.stop, count, last.crc, last.stop * items // max(1, count))


def _slots(header: bytes) -> list[tuple[int, int]]:
    if len(header) < HEADER_SIZE:
        return [(0, 0), (0, 0)]
    return [SLOT.unpack_from(header, offset) for offset in SLOTS]
