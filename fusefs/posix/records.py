"""The records of the journal, as bytes: one for each thing that the kernel is told.

A record is its length, its type, a CRC and its payload. Each tells the whole
state of one item, never a change of it. The first one of a log carries the
format and the boot id; format 1 had no table and no stale records, and is
still read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusefs.posix.inodes import Inode
from fusefs.store.base import ObjectInfo

FORMAT = 2
READABLE_FORMATS = (1, 2)

RECORD = struct.Struct("<HHI")  # length of the payload, type, CRC of type and payload
NODE = struct.Struct("<QQQQQqHHH")  # node id, parent, ino, lookups, size, mtime, 3 lengths
COUNT = struct.Struct("<QQ")
ID = struct.Struct("<Q")
OPEN = struct.Struct("<QQQIii")  # unique, fh, node id, flags, mode, backing id
TABLE = struct.Struct("<QQq")  # next node id, next fh, when mounted in ns since the epoch
STALE = struct.Struct("<QII")  # node id, pid, 1 if told and 0 if that is settled

(
    START_TYPE, NODE_TYPE, COUNT_TYPE, GONE_TYPE, OPEN_TYPE, CLOSED_TYPE, INIT_TYPE,
    TABLE_TYPE, SUPERSEDED_TYPE, STALE_TYPE, BEGUN_TYPE,
) = range(1, 12)  # fmt: skip
_DIRECTORY = 0xFFFF  # stands for the length of the ETag of a directory

SERVED, PASSTHROUGH, DIRECTORY = range(3)  # the modes of an open handle


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


def record(kind: int, payload: bytes) -> bytes:
    return RECORD.pack(len(payload), kind, zlib.crc32(payload, kind)) + payload


def parse(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """The records of a log up to the first that does not check out: type, payload, where it ends.

    The last one may have been torn by a kill; its reply was never sent.
    """
    at = 0
    while at + RECORD.size <= len(data):
        length, kind, crc = RECORD.unpack_from(data, at)
        at += RECORD.size
        payload = data[at : at + length]
        at += length
        if kind == 0 or len(payload) < length or zlib.crc32(payload, kind) != crc:
            return
        yield kind, payload, at


def start_payload(format: int = FORMAT) -> bytes:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"fusefs journal {format} {boot_id}".encode()


def node_payload(inode: Inode) -> bytes:
    parent = inode.parent.nodeid if inode.parent is not None else 0
    name = inode.name.encode()
    info = inode.info
    if info is None:
        head = NODE.pack(
            inode.nodeid, parent, inode.ino, inode.nlookup, 0, 0, len(name), _DIRECTORY, 0
        )
        return head + name
    etag, storage_class = info.etag.encode(), info.storage_class.encode()
    head = NODE.pack(
        inode.nodeid, parent, inode.ino, inode.nlookup, info.size, info.mtime_ns,
        len(name), len(etag), len(storage_class),
    )  # fmt: skip
    return b"".join((head, name, etag, storage_class, info.key.encode()))


def parse_node(payload: bytes) -> LoggedNode:
    nodeid, parent, ino, nlookup, size, mtime_ns, name_len, etag_len, class_len = NODE.unpack_from(
        payload
    )
    at = NODE.size
    name = payload[at : at + name_len].decode()
    if etag_len == _DIRECTORY:
        return LoggedNode(nodeid, parent, ino, name, nlookup, None)
    at += name_len
    etag = payload[at : at + etag_len].decode()
    storage_class = payload[at + etag_len : at + etag_len + class_len].decode()
    key = payload[at + etag_len + class_len :].decode()
    info = ObjectInfo(key, size, etag, mtime_ns, storage_class)
    return LoggedNode(nodeid, parent, ino, name, nlookup, info)
