"""Reading the journal back: what the kernel held when the last record was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fusefs.posix.journal import records
from fusefs.posix.journal.records import (
    HEADER_SIZE,
    SLOT,
    SLOTS,
    Kind,
    LoggedHandle,
    LoggedNode,
    Parsed,
)
from fusefs.posix.nodes.file_numbers import LEAST_HASH
from fusefs.posix.nodes.inode import FIRST_ID


@dataclass(slots=True)
class KernelState:
    """The nodes and handles of the kernel when the last record was written.

    `next_id` and `next_fh` have never been used; `mounted_ns` is 0 if unknown.
    `replaced` are nodes that their names no longer stand for, and `removed` those of them
    whose file has no name; `numbers` are the records of nodes/file_numbers.py; `stale` are
    (node id, pid) of openers that got ESTALE and have not looked up since;
    `begun` are the requests of changes that may have been made; `marks` are those of
    directories by node id (nodes/offsets.py).
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
            node = records.parse_node(payload)
            self.nodes[node.nodeid] = node
            self.next_id = max(self.next_id, node.nodeid + 1)
        elif kind == Kind.COUNT:
            nodeid, nlookup = records.COUNT.unpack(payload)
            if nodeid in self.nodes:
                self.nodes[nodeid].nlookup = nlookup
        elif kind == Kind.GONE:
            (nodeid,) = records.ID.unpack(payload)
            self.nodes.pop(nodeid, None)
            self.marks.pop(nodeid, None)
            self.replaced.discard(nodeid)
            self.removed.discard(nodeid)
        elif kind == Kind.OPEN:
            handle = LoggedHandle(*records.OPEN.unpack(payload))
            self.handles[handle.fh] = handle
            self.next_fh = max(self.next_fh, handle.fh + 1)
        elif kind == Kind.CLOSED:
            self.handles.pop(records.ID.unpack(payload)[0], None)
        elif kind == Kind.INIT:
            self.init_out = payload
        elif kind == Kind.TABLE:
            next_id, next_fh, self.mounted_ns = records.TABLE.unpack(payload)
            self.next_id, self.next_fh = max(self.next_id, next_id), max(self.next_fh, next_fh)
        elif kind in (Kind.REPLACED, Kind.REMOVED):
            (nodeid,) = records.ID.unpack(payload)
            self.replaced.add(nodeid)
            if kind == Kind.REMOVED:
                self.removed.add(nodeid)
            # The kernel may never have got it; another node of this number is not replaced.
            self.next_id = max(self.next_id, nodeid + 1)
        elif kind == Kind.NUMBER:
            self._apply_number(*records.NUMBER.unpack(payload))
        elif kind == Kind.MARK:
            self._apply_mark(payload)
        elif kind == Kind.BEGUN:
            self.begun.add(records.ID.unpack(payload)[0])
        elif kind == Kind.STALE:
            nodeid, pid, is_pending = records.STALE.unpack(payload)
            (self.stale.add if is_pending else self.stale.discard)((nodeid, pid))

    def _apply_number(self, place: int, number: int) -> None:
        self.numbers.pop(place, None)  # the latest is the last
        if number != place:
            self.numbers[place] = number
        if number < LEAST_HASH:
            self.next_id = max(self.next_id, number + 1)

    def _apply_mark(self, payload: bytes) -> None:
        nodeid, number = records.MARK.unpack_from(payload)
        if number:
            self.marks.setdefault(nodeid, {})[payload[records.MARK.size :].decode()] = number
        else:
            self.marks.pop(nodeid, None)


@dataclass(slots=True)
class Replayed:
    """A log that was read: its state, and how it goes on.

    Its last good record is the `count`-th, ends at `stop` and has this `crc`;
    `current_bytes` estimates what a compacted log would take.
    """

    state: KernelState
    stop: int
    count: int
    crc: int
    current_bytes: int


class UnusableJournalError(Exception):
    """The log is damaged, of another boot or another format, or not a log at all."""


# How often the end of a log that is written to is looked for.
_ATTEMPTS = 5


def replay(path: Path, *, is_live: bool = False) -> Replayed:
    """Read a log back. Blocks: five seconds for a million nodes.

    `is_live` if its daemon may be writing to it meanwhile.

    Raises:
        UnusableJournalError: it must not be used; the message says why.
        OSError: it can't be read.
    """
    for _ in range(_ATTEMPTS if is_live else 0):
        try:
            return _replay(path, is_live=True)
        except UnusableJournalError:
            continue  # both slots of the header may have changed while they were read
    return _replay(path, is_live=is_live)


def _replay(path: Path, *, is_live: bool) -> Replayed:
    with path.open("rb", buffering=0) as file:
        # First, so that no record is missing that the header has.
        slots = _slots(file.read(HEADER_SIZE))
        file.seek(0)
        data = file.read()
    found = records.parse(data)
    last = first = next(found, Parsed(0, b"", HEADER_SIZE, 0))
    if first.kind != Kind.START or not first.payload.startswith(b"fusefs journal "):
        raise UnusableJournalError(
            f"{path} is damaged: it is right up to byte {HEADER_SIZE} at most, or no journal at all"
        )
    if first.payload != records.start_payload():
        raise UnusableJournalError(f"{path} is of another boot or another format")
    state = KernelState()
    count, before = 1, (HEADER_SIZE, 0)
    has_all = (first.stop, first.crc) in slots  # that a slot tells of
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
    current = last.stop * items // max(1, count)
    return Replayed(state, last.stop, count, last.crc, current)


def _slots(header: bytes) -> list[tuple[int, int]]:
    if len(header) < HEADER_SIZE:
        return [(0, 0), (0, 0)]
    return [SLOT.unpack_from(header, offset) for offset in SLOTS]
