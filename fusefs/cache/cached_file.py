"""State in memory of one cache file: its present bytes, its users and its open descriptor."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from fusefs.cache.catalog import Row
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.ranges import RangeMap
from fusefs.linux.clock import steady_time
from fusefs.store.interface import ObjectVersion

# Files up to this size are compared with their checksums when they are first opened.
CHECKED_AT_OPEN = 16 << 20
# The least that a random read downloads: this many bytes take as long as the request itself,
# so fewer would save nothing, and more would be wasted on a reader that jumps.
BLOCK = 256 << 10
# Random reads of a large file make millions of ranges: from here on they are treated summarily.
MOST_RANGES = 10_000


# IntEnum, as the hash of a plain Enum, computed four times per open, is a Python function.
class Rank(enum.IntEnum):
    """A file's class in the order of eviction (eviction_order.py)."""

    KEPT = enum.auto()
    PASSING = enum.auto()
    AHEAD = enum.auto()
    PLANNED = enum.auto()


class OpenFile(NamedTuple):
    """The result of opening a cache file in a thread.

    `ranges` has the file's present ranges, packed (None: the `CacheFile` has them already); `fault`
    is the disk error or wrong checksum that was found; `sums` are checksums of bytes that had none;
    `used_at` is the last use on record, in seconds since the epoch.
    """

    fd: int
    generation: str
    st_ino: int
    ranges: bytes | None
    fault: OSError | Sum | None = None
    sums: Sequence[Sum] = ()
    used_at: float = 0.0


@dataclass(slots=True, eq=False, repr=False)
class CacheFile:
    """One file of the cache, on the disk or about to be created. Belongs to the event loop.

    `pins` counts users, `handles` the open handles among them, of which the daemon answers the
    reads of `served`; `downloads` counts running downloads; `fd` is -1 while the file is closed.
    `is_kept` turns False when the disk fails for the file, whose version is then read past the
    cache. If the error was not the file's fault (`is_passed_over`), `is_kept` is True again when
    the last user has gone. `is_ours` turns False when the catalog's row of the name belongs to
    another mount's file; this file is then removed when the last user has gone. `sums` are
    checksums that the catalog does not have yet. `is_checked` is True if this process wrote the
    file or compared the bytes with the checksums, `is_retained` if the file must not be evicted
    (retention.py). `rank`, `last_use` and `ahead_since` belong to eviction_order.py, which
    measures time in bytes fetched. `read` has the ranges that were read since they were fetched
    (None: all); after MOST_RANGES ranges, a read counts for all present bytes of its blocks.
    `used_at` is in seconds since the epoch, `written_at` in monotonic seconds.
    """

    name: str
    size: int
    version: ObjectVersion | None = None
    generation: str = ""
    st_ino: int = 0
    fd: int = -1
    pins: int = 0
    handles: int = 0
    served: int = 0
    downloads: int = 0
    present: RangeMap = field(default_factory=RangeMap)
    recorded: int = 0  # bytes of `present` that are in the catalog
    is_kept: bool = True
    is_ours: bool = True
    is_checked: bool = True
    is_passed_over: bool = False
    is_retained: bool = False
    rank: Rank | None = None
    last_use: int | None = None
    ahead_since: int = 0
    read: RangeMap | None = None
    sums: list[Sum] | None = None
    used_at: float = 0.0
    written_at: float = 0.0
    _opening: trio.Lock | None = None

    @classmethod
    def from_row(cls, row: Row) -> CacheFile:
        """Make a closed, unused file from its row of the catalog."""
        file = cls(row.name, row.size)
        file.become(row.generation, row.st_ino, row.ranges)
        file.is_retained = row.is_retained
        # If the clock was set back, jobs would never evict a file with a use in the future.
        file.used_at = min(row.used_at, steady_time())
        return file

    @classmethod
    def unkept(cls) -> CacheFile:
        """Make a pinned, empty `CacheFile` outside the cache, for a file not in the bucket yet."""
        return cls("", 0, pins=1)

    @classmethod
    def dropped(cls, name: str, size: int, st_ino: int) -> CacheFile:
        """Make a `CacheFile` for a file that left the cache and is still read by the kernel."""
        return cls(name, size, st_ino=st_ino, is_kept=False, is_ours=False)

    def row(self) -> Row:
        """Make the file's catalog row, with the checksums that the catalog does not have yet."""
        ranges, sums = self.present.pack(), tuple(self.sums or ())
        return Row(
            self.name, self.generation, self.st_ino, self.size, ranges, self.used_at, sums=sums
        )

    @property
    def is_complete(self) -> bool:
        return self.present.total == self.size

    @property
    def needs_check(self) -> bool:
        """True if the file must be compared with its checksums when it is opened."""
        return not self.is_checked and self.size <= CHECKED_AT_OPEN

    @property
    def unrecorded(self) -> int:
        """The number of present bytes that the catalog does not have yet."""
        return self.present.total - self.recorded

    @property
    def unread(self) -> int:
        """The number of present bytes that were never read after their fetch."""
        return self.present.total - self.read.total if self.read is not None else 0

    @property
    def is_opening(self) -> bool:
        """True if the file is being opened, created or evicted."""
        return self._opening is not None and self._opening.locked()

    @property
    def opening(self) -> trio.Lock:
        """The lock that is held while the file is opened, created or evicted."""
        if self._opening is None:
            self._opening = trio.Lock()
        return self._opening

    def arrived(self, start: int, stop: int) -> int:
        """Add the fetched bytes [start, stop) to `present`; return how many are new."""
        if self.read is None:
            self.read = RangeMap.unpack(self.present.pack())
        return self.present.add(start, stop)

    def first_read(self, start: int, stop: int) -> int:
        """Note that [start, stop) was read; return how many of these bytes were not read before."""
        if self.read is None:
            return 0
        size, run = stop - start, self.present.run_at(start)
        if run is not None and self.read.count >= MOST_RANGES:
            start = max(run[0], start // BLOCK * BLOCK)
            stop = max(stop, min(run[1], -(-stop // BLOCK) * BLOCK))
        new = min(size, self.read.add(start, stop))
        if self.read.total == self.size:
            self.read = None
        return new

    def become(self, generation: str, st_ino: int, ranges: bytes) -> None:
        """Make this object describe another file on the disk, which has the packed `ranges`."""
        self.generation, self.st_ino = generation, st_ino
        self.present = RangeMap.unpack(ranges)
        self.read = None
        self.recorded = self.present.total
        self.sums = None
        # A file without ranges will be written by this process.
        self.is_checked = not ranges

    def summed(self, sums: list[Sum]) -> None:
        """Add new checksums, to be written to the catalog with the next row."""
        if self.sums is None:
            self.sums = sums
        else:
            self.sums += sums

    def lose(self) -> None:
        """Mark all bytes as missing, but keep the generation and inode number."""
        self.present = RangeMap()
        self.read = None
        self.recorded = 0
        self.sums = None

    def forget(self) -> None:
        """Make this object describe a version that has no file on the disk."""
        self.become("", 0, b"")
