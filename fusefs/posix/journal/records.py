"""The records of the journal, as bytes: one for each thing that the kernel gets to know.

Each tells the whole state of one item, never a change of it. The first one of
a log carries the format and the boot id.

A log is a header and records: length, type, payload and a CRC-32
that goes on from the record before. So a record that is changed, lost or in
another's place ends what checks out. The header has two slots for how far the
log was written, a size and the CRC there; the n-th record is committed to
slot n % 2 after it is written. A kill leaves at most one record that is not
committed, or one slot that is half written. So after n records that check
out, slot (n - 1) % 2 tells of n - 1 records, or the log is damaged: of a
record that is missing the commit would be there.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fusefs.linux import clock
from fusefs.posix.nodes.inode import Inode
from fusefs.store.interface import ObjectInfo

FORMAT = 3

MAGIC = b"fusefs journal3\n"
# Native, so that a number is stored by one instruction: a kill does not tear it.
SLOT = struct.Struct("@QI")  # how far the log is written, the CRC there
SLOTS = (32, 48)  # offsets
HEADER_SIZE = 64
HEAD = struct.Struct("<HH")  # length of the payload, type
CRC = struct.Struct("<I")

NODE = struct.Struct("<QQQQQqHHH")  # node id, parent, ino, lookups, size, mtime, 3 lengths
COUNT = struct.Struct("<QQ")
ID = struct.Struct("<Q")
OPEN = struct.Struct("<QQQIii")  # unique, fh, node id, flags, mode, backing id
# The records of which there are most, with their HEAD: to pack both at once takes half the time.
WHOLE_OPEN, WHOLE_ID, WHOLE_COUNT = (
    struct.Struct(HEAD.format + part.format[1:]) for part in (OPEN, ID, COUNT)
)
TABLE = struct.Struct("<QQq")  # next node id, next fh, when mounted in ns since the epoch
MARK = struct.Struct("<QI")  # node id of a directory, number of a position; 0 for no more marks
NUMBER = struct.Struct("<QQ")  # a place, the number there (nodes/file_numbers.py)
STALE = struct.Struct("<QII")  # node id, pid, 1 while a lookup is awaited, 0 after it

_DIRECTORY = 0xFFFF  # stands for the length of the ETag of a directory


class Kind:
    """The types of records. Plain numbers: an enumeration's members take longer to find."""

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
    """A node as the log tells it; `info` is None for a directory.

    `entries_changed_ns` is as in `Inode`.
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
    """An open file or directory; `unique` is the request that opened it."""

    unique: int
    fh: int
    nodeid: int
    flags: int
    mode: int
    backing_id: int


class Parsed(NamedTuple):
    """A record, where it ends, and the CRC there."""

    kind: int
    payload: bytes
    stop: int
    crc: int


def header() -> bytes:
    """The header of a log that has no records: slot 0 tells so."""
    data = bytearray(HEADER_SIZE)
    data[: len(MAGIC)] = MAGIC
    SLOT.pack_into(data, SLOTS[0], HEADER_SIZE, 0)
    return bytes(data)


def parse(data: bytes) -> Iterator[Parsed]:
    """The records of a log up to the first that does not check out."""
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
    """The first record of a log: the format, and the boot in which it is of use."""
    return f"fusefs journal {FORMAT} {clock.boot_id()}".encode()


def node_payload(inode: Inode) -> bytes:
    """The record of a node: its ids, lookup count, name and version (no version: a directory)."""
    parent = inode.parent.nodeid if inode.parent is not None else 0
    ids = inode.nodeid, parent, inode.ino, inode.nlookup
    name = inode.name.encode()
    info = inode.info
    if info is None:
        lengths = len(name), _DIRECTORY, 0
        return NODE.pack(*ids, 0, inode.entries_changed_ns, *lengths) + name
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
