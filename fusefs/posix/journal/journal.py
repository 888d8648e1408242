"""The journal: an append-only log of the nodes and handles that the kernel knows.

The next process can serve a mount only if it knows the kernel's nodes, lookup counts and handles,
so each of these is appended here before the reply that gives it to the kernel.

The log is a file that is mapped shared: an append is a copy into memory (0.3 microseconds, while a
write would take 3), which the kernel keeps when the process is killed. At most the last STEP of the
mapping is in this process's memory. The blocks are allocated before they are written, so a full
disk is an error of `posix_fallocate` and not a SIGBUS. A kill in the middle of a copy loses only
that record, whose reply was not sent; any other missing or changed record is damage (records.py),
and no daemon continues such a log: the kernel would show one file's content for another's.

A record has the whole state of one item. So a log can be compacted while it is written to: the new
file receives each item once, a few at a time, and all new records besides. Lookup counts are upper
bounds: a FORGET that was read and not logged is lost.

A mountpoint may have two mounts, one that was detached while programs used it and the next one. So
each mount's log has a name of its own, and no daemon removes or replaces another's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from pathlib import Path
from zlib import crc32

from fusefs.posix.journal.records import (
    COUNT,
    CRC,
    HEAD,
    HEADER_SIZE,
    ID,
    MARK,
    NUMBER,
    OPEN,
    SLOT,
    SLOTS,
    STALE,
    TABLE,
    WHOLE_COUNT,
    WHOLE_ID,
    WHOLE_OPEN,
    KernelState,
    Kind,
    Replayed,
    header,
    node_payload,
    replay,
    start_payload,
)
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.journal")

# The log grows by this much at a time: large enough to be rare, small enough for tmpfs.
STEP = 4 << 20
# A kill tears at most one record, which is shorter than this.
TORN = 64 << 10
# A log is rewritten when it is this large and twice as large as its items need.
COMPACT_FROM = 32 << 20


class _Log:
    """A log file, mapped into memory, to which records are appended; begun anew without `read`.

    `read` is the replay of its records, after which the log goes on. `size` and `crc` are those of
    the `count` records so far; the file is allocated up to `limit`.
    """

    __slots__ = ("_fd", "count", "crc", "limit", "memory", "path", "size")

    def __init__(self, path: Path, read: Replayed | None = None) -> None:
        self.path = path
        kept = os.O_TRUNC if read is None else 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | kept | os.O_CLOEXEC, 0o600)
        self.size, self.count, self.crc = HEADER_SIZE, 0, 0
        if read is not None:
            self.size, self.count, self.crc = read.stop, read.count, read.crc
        try:
            # The disk may be full by now, so the file is never made smaller.
            allocated = os.fstat(self._fd).st_size
            self.limit = max(-(-(self.size + 1) // STEP) * STEP, allocated)
            if self.limit > allocated:
                os.posix_fallocate(self._fd, allocated, self.limit - allocated)
            self.memory = mmap.mmap(self._fd, self.limit)
        except OSError:
            os.close(self._fd)
            raise
        # Zeros replace a record that a kill has torn.
        self.memory[self.size : self.size + TORN] = bytes(min(TORN, self.limit - self.size))
        if read is None:
            self.memory[:HEADER_SIZE] = header()
        else:
            # The last daemon may have been killed before it committed the last record.
            SLOT.pack_into(self.memory, SLOTS[self.count & 1], self.size, self.crc)

    def append(self, body: bytes) -> None:
        """Append a record; `body` has everything but the CRC."""
        # Inlined: each function call would add a tenth to the time of an append.
        self.crc = crc = crc32(body, self.crc)
        stop = self.size + len(body) + CRC.size
        if stop > self.limit:
            self._grow()
        self.memory[self.size : stop] = body + crc.to_bytes(CRC.size, "little")
        self.size = stop
        self.count += 1
        SLOT.pack_into(self.memory, SLOTS[self.count & 1], stop, crc)

    def _grow(self) -> None:
        os.posix_fallocate(self._fd, self.limit, STEP)
        self.limit += STEP
        self.memory.resize(self.limit)
        # The written pages stay in the page cache; this process needs only the header.
        written = self.size // mmap.PAGESIZE * mmap.PAGESIZE
        if written > mmap.PAGESIZE:
            self.memory.madvise(mmap.MADV_DONTNEED, mmap.PAGESIZE, written - mmap.PAGESIZE)

    def is_own(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        self.memory.close()
        os.close(self._fd)


class Journal:
    """The log of one mount. Belongs to the event loop.

    If the disk is full or fails, the journal turns itself off with one warning:
    the mount continues, but cannot be taken over. Without a path it is off from the start.
    Each method that logs an item is called before the kernel learns of the item.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path or Path()
        self._log: _Log | None = None
        self._next: _Log | None = None
        self._compacted_size = 0
        self._init_record = b""
        if path is None:
            return
        try:
            path.unlink(missing_ok=True)  # another daemon may still have the old file mapped
            self._log = _Log(path)
        except OSError as error:
            self._give_up(error)
        self._append(Kind.START, start_payload())

    @classmethod
    def resume(cls, path: Path) -> tuple[Journal, KernelState]:
        """Read the log of a daemon that is gone, and continue it. Blocks; errors as of `replay`."""
        _next_of(path).unlink(missing_ok=True)
        read = replay(path)
        journal = cls(None)
        journal._path = path
        journal._compacted_size = read.current_bytes
        journal._init_record = read.state.init_out
        journal._log = _Log(path, read)
        return journal, read.state

    def node(self, *fields: *tuple[int, int, int, str, int, ObjectInfo | None, int]) -> None:
        """Log a node: the kernel is about to get it, or its name, key or version has changed.

        The fields are those of `LoggedNode`.
        """
        self._append(Kind.NODE, node_payload(*fields))

    def count(self, nodeid: int, nlookup: int) -> None:
        """Log a node's new lookup count."""
        self._write(WHOLE_COUNT.pack(COUNT.size, Kind.COUNT, nodeid, nlookup))

    def gone(self, nodeid: int) -> None:
        """Log that the kernel has forgotten a node."""
        self._append(Kind.GONE, ID.pack(nodeid))

    def mark(self, nodeid: int, number: int, position: str) -> None:
        """Log a numbered position in a directory; number 0 drops all positions (offsets.py)."""
        self._append(Kind.MARK, MARK.pack(nodeid, number) + position.encode())

    def replaced(self, nodeid: int) -> None:
        """Log that a node no longer stands for its name; see `InodeTable.mark_replaced`."""
        self._append(Kind.REPLACED, ID.pack(nodeid))

    def removed(self, nodeid: int) -> None:
        """Log that a node's file lost its name in a removal or rename; see `InodeTable.detach`."""
        self._append(Kind.REMOVED, ID.pack(nodeid))

    def number(self, place: int, number: int) -> None:
        """Log the number at a place (file_numbers.py); a number equal to it drops the record."""
        self._append(Kind.NUMBER, NUMBER.pack(place, number))

    def stale(self, nodeid: int, pid: int, *, is_pending: bool) -> None:
        """Log that a process got ESTALE for a node (`is_pending`), or looked the name up since."""
        self._append(Kind.STALE, STALE.pack(nodeid, pid, is_pending))

    def opened(
        self, unique: int, fh: int, nodeid: int, flags: int, mode: int, backing_id: int
    ) -> None:
        """Log an open handle; with backing id 0 the daemon answers the handle's reads."""
        self._write(
            WHOLE_OPEN.pack(OPEN.size, Kind.OPEN, unique, fh, nodeid, flags, mode, backing_id)
        )

    def closed(self, fh: int) -> None:
        self._write(WHOLE_ID.pack(ID.size, Kind.CLOSED, fh))

    def negotiated(self, init_out: bytes) -> None:
        """Log the answer to INIT, which stays valid for the next daemon."""
        self._init_record = init_out
        self._append(Kind.INIT, init_out)

    def table(self, next_id: int, next_fh: int, mounted_ns: int) -> None:
        """Log the next unused node id and handle number, and the mount's time (ns, epoch)."""
        self._append(Kind.TABLE, TABLE.pack(next_id, next_fh, mounted_ns))

    def begun(self, unique: int) -> None:
        """Log that a request will make a change; if resent, it may find the change made already."""
        self._append(Kind.BEGUN, ID.pack(unique))

    @property
    def plain_log(self) -> _Log | None:
        """The log for compiled code to append to; None in a compaction, or without a journal."""
        return self._log if self._next is None else None

    @property
    def wants_compaction(self) -> bool:
        """True if the log is large, and has doubled since it was last compacted."""
        log = self._log
        if log is None or self._next is not None:
            return False
        return log.size > max(COMPACT_FROM, 2 * self._compacted_size)

    @property
    def is_compacting(self) -> bool:
        """True if records are written to the old and to a new log."""
        return self._next is not None

    def begin_compaction(self) -> bool:
        """Begin a new log, which gets all new records as well until `finish_compaction`.

        The caller writes each open handle and each inode once, in any order
        and with pauses, by `opened` and `node`, as long as `is_compacting`. Returns False if the
        disk has no room: `wants_compaction` is True again when the log has grown further.
        """
        try:
            self._next = _Log(_next_of(self._path))
        except OSError as error:
            self._give_up_compaction(error)
            return False
        self._append(Kind.START, start_payload())
        self._append(Kind.INIT, self._init_record)
        return self.is_compacting

    def finish_compaction(self) -> None:
        """Replace the old log by the new one, which has all items by now."""
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
        """Stop writing; `remove` the log if no daemon is to take the mount over."""
        own = [self._path] if self._log is not None and self._log.is_own(self._path) else []
        if self._next is not None:
            own.append(self._next.path)
        for log in (self._log, self._next):
            if log is not None:
                log.close()
        self._log = self._next = None
        if remove:
            for name in own:
                name.unlink(missing_ok=True)

    def _append(self, kind: int, payload: bytes) -> None:
        self._write(HEAD.pack(len(payload), kind) + payload)

    def _write(self, body: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.append(body)
        except OSError as error:
            self._give_up(error)
            return
        if self._next is not None:
            try:
                self._next.append(body)
            except OSError as error:
                self._give_up_compaction(error)

    def _give_up_compaction(self, error: OSError) -> None:
        """Stop a compaction after an error; the old log stays in use."""
        assert self._log is not None
        logger.warning("the journal %s can't be rewritten now: %s", self._path, error.strerror)
        self._compacted_size = self._log.size
        if self._next is not None:
            self._next.close()
            self._next = None
        with contextlib.suppress(OSError):
            _next_of(self._path).unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "the journal %s has stopped, so no other daemon can take this mount over: %s",
            self._path,
            os.strerror(error.errno or errno.EIO),
        )
        self.close(remove=True)


def _next_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.next")


def path_of(directory: Path, connection: int) -> Path:
    """The path of a mount's log, by its FUSE connection's number; 0: the number is unknown."""
    return directory / (f"journal.{connection}" if connection else "journal")
