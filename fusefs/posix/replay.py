"""Reading the journal back: what the kernel held when the last record was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fusefs.posix.inodes import FIRST_ID
from fusefs.posix.records import (
    BEGUN_TYPE,
    CLOSED_TYPE,
    COUNT,
    COUNT_TYPE,
    GONE_TYPE,
    ID,
    INIT_TYPE,
    NODE_TYPE,
    OPEN,
    OPEN_TYPE,
    READABLE_FORMATS,
    STALE,
    STALE_TYPE,
    START_TYPE,
    SUPERSEDED_TYPE,
    TABLE,
    TABLE_TYPE,
    LoggedHandle,
    LoggedNode,
    parse,
    parse_node,
    start_payload,
)


@dataclass(slots=True)
class KernelState:
    """All that a log tells.

    `next_id` and `next_fh` have never been used; `mounted_ns` is 0 if unknown.
    `superseded` are nodes that their names no longer stand for; `stale` are
    (node id, pid) of openers that were told ESTALE and have not looked up since;
    `begun` are the requests of changes that may have been made.
    """

    init_out: bytes = b""
    nodes: dict[int, LoggedNode] = field(default_factory=dict)
    handles: dict[int, LoggedHandle] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)
    stale: set[tuple[int, int]] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    next_id: int = FIRST_ID
    next_fh: int = 1
    mounted_ns: int = 0

    def apply(self, kind: int, payload: bytes) -> None:
        """Take up one record."""
        if kind == NODE_TYPE:
            node = parse_node(payload)
            self.nodes[node.nodeid] = node
            self.next_id = max(self.next_id, node.nodeid + 1)
        elif kind == COUNT_TYPE:
            nodeid, nlookup = COUNT.unpack(payload)
            if nodeid in self.nodes:
                self.nodes[nodeid].nlookup = nlookup
        elif kind == GONE_TYPE:
            (nodeid,) = ID.unpack(payload)
            self.nodes.pop(nodeid, None)
            self.superseded.discard(nodeid)
        elif kind == OPEN_TYPE:
            handle = LoggedHandle(*OPEN.unpack(payload))
            self.handles[handle.fh] = handle
            self.next_fh = max(self.next_fh, handle.fh + 1)
        elif kind == CLOSED_TYPE:
            self.handles.pop(ID.unpack(payload)[0], None)
        elif kind == INIT_TYPE:
            self.init_out = payload
        elif kind == TABLE_TYPE:
            next_id, next_fh, self.mounted_ns = TABLE.unpack(payload)
            self.next_id, self.next_fh = max(self.next_id, next_id), max(self.next_fh, next_fh)
        elif kind == SUPERSEDED_TYPE:
            self.superseded.add(ID.unpack(payload)[0])
        elif kind == BEGUN_TYPE:
            self.begun.add(ID.unpack(payload)[0])
        elif kind == STALE_TYPE:
            nodeid, pid, is_told = STALE.unpack(payload)
            (self.stale.add if is_told else self.stale.discard)((nodeid, pid))


@dataclass(slots=True)
class Replayed:
    """A log that was read: its state, where its last good record ends, and how much is current.

    `current_bytes` estimates what a compacted log would take.
    """

    state: KernelState
    stop: int
    current_bytes: int


class UnusableJournalError(Exception):
    """The log is of another boot or another format, or not a log at all."""


def replay(path: Path) -> Replayed:
    """Read a log back. Blocks: five seconds for a million nodes.

    Raises:
        UnusableJournalError: it must not be used; the message says why.
        OSError: it can't be read.
    """
    records = parse(path.read_bytes())
    kind, payload, stop = next(records, (0, b"", 0))
    if kind != START_TYPE or not payload.startswith(b"fusefs journal "):
        raise UnusableJournalError(f"{path} is damaged, or no journal at all")
    if payload not in [start_payload(format) for format in READABLE_FORMATS]:
        raise UnusableJournalError(f"{path} is of another boot or another format")
    state = KernelState()
    read = Replayed(state, stop, 0)
    count = 0
    for kind, payload, stop in records:
        state.apply(kind, payload)
        read.stop = stop
        count += 1
    items = len(state.nodes) + len(state.handles)
    read.current_bytes = read.stop * items // max(1, count)
    return read
