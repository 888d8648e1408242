"""One file of the cache as the event loop sees it: which bytes it has, and its users."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import trio

from fusefs.cache.catalog import Row
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.ranges import RangeMap
from fusefs.linux.clock import steady_time
from fusefs.store.interface import ObjectVersion

# Files up to this size are compared with their checksums when they are first opened.
CHECKED_AT_OPEN = 16 << 20


# Numbers, for another Enum's hash, which each open takes four times, is a function in Python.
class Rank(enum.IntEnum):
    """The place of a file in the order of eviction (eviction_order.py)."""

    KEPT = enum.auto()
    PASSING = enum.auto()
    AHEAD = enum.auto()
    PLANNED = enum.auto()


class OpenFile(NamedTuple):
    """A file as a thread has opened it; `ranges` is None if it is the one that was known.

    `fault` is what is wrong with its bytes, where they were compared, `sums`
    are checksums of those that had none, `used_at` is its last use by the catalog.
    """

    fd: int
    generation: str
    st_ino: int
    ranges: bytes | None
    fault: OSError | Sum | None = None
    sums: Sequence[Sum] = ()
    used_at: float = 0.0


class CacheFile:
    """One file of the cache, there or about to be. Belongs to the event loop.

    `pins` counts users, `downloads` those that are under way; `fd` is -1 while
    it is not open. `is_kept` turns False when the disk fails for the file: its
    version is then read uncached. Where that says nothing about the file
    (`is_passed_over`), it is kept again when its last user has gone. `is_ours`
    turns False when another mount keeps the same version: this file then goes
    with its last user. `sums` are the checksums that the catalog does not
    have yet; `is_checked` says that this process has written the file or compared
    it with its checksums; `is_retained` that it is not evicted (retention.py). `rank`, `last_use`
    and `ahead_since` belong to the order of eviction (eviction_order.py), which counts
    time in bytes fetched. `read` is what has been read since it was fetched; None: all.
    `used_at` is in seconds since the epoch, `written_at` in those of the
    monotonic clock.
    """

    __slots__ = (
        "_opening",
        "ahead_since",
        "downloads",
        "fd",
        "generation",
        "is_checked",
        "is_kept",
        "is_ours",
        "is_passed_over",
        "is_retained",
        "last_use",
        "name",
        "pins",
        "present",
        "rank",
        "read",
        "recorded",
        "size",
        "st_ino",
        "sums",
        "used_at",
        "version",
        "written_at",
    )

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.version: ObjectVersion | None = None
        self.generation = ""
        self.st_ino = 0
        self.fd = -1
        self.pins = 0
        self.downloads = 0
        self.present = RangeMap()
        self.recorded = 0  # bytes of `present` that are in the catalog
        self.is_kept = True
        self.is_ours = True
        self.is_checked = True
        self.is_passed_over = False
        self.is_retained = False
        self.rank: Rank | None = None
        self.last_use: int | None = None
        self.ahead_since = 0
        self.read: RangeMap | None = None
        self.sums: list[Sum] | None = None
        self.used_at = 0.0
        self.written_at = 0.0
        self._opening: trio.Lock | None = None

    @classmethod
    def from_row(cls, row: Row) -> CacheFile:
        """The file of a row of the catalog, which is closed and has no users."""
        file = cls(row.name, row.size)
        file.become(row.generation, row.st_ino, row.ranges)
        file.is_retained = row.is_retained
        # The clock may have been set back since: no job would evict what is used in the future.
        file.used_at = min(row.used_at, steady_time())
        return file

    @classmethod
    def unkept(cls) -> CacheFile:
        """A pinned file without bytes: of content that the bucket does not have yet."""
        file = cls("", 0)
        file.pins = 1
        return file

    @classmethod
    def dropped(cls, name: str, size: int, st_ino: int) -> CacheFile:
        """A file that is no longer in the cache, and that the kernel reads for a program."""
        file = cls(name, size)
        file.st_ino = st_ino
        file.is_kept = file.is_ours = False
        return file

    def row(self) -> Row:
        """Its row of the catalog, with the checksums that the catalog does not have yet."""
        ranges, sums = self.present.pack(), tuple(self.sums or ())
        return Row(
            self.name, self.generation, self.st_ino, self.size, ranges, self.used_at, sums=sums
        )

    @property
    def is_complete(self) -> bool:
        return self.present.total == self.size

    @property
    def needs_check(self) -> bool:
        """True if it is to be compared with its checksums when it is opened."""
        return not self.is_checked and self.size <= CHECKED_AT_OPEN

    @property
    def unrecorded(self) -> int:
        """The number of bytes that are present and not in the catalog."""
        return self.present.total - self.recorded

    @property
    def unread(self) -> int:
        """The number of bytes that were not read since their fetch."""
        return self.present.total - self.read.total if self.read is not None else 0

    @property
    def is_opening(self) -> bool:
        """True if it is being opened, created or evicted."""
        return self._opening is not None and self._opening.locked()

    @property
    def opening(self) -> trio.Lock:
        """Held while the file is opened, created or evicted."""
        if self._opening is None:
            self._opening = trio.Lock()
        return self._opening

    def arrived(self, start: int, stop: int) -> int:
        """Note that the bytes [start, stop) were fetched; return how many of them are new."""
        if self.read is None:
            self.read = RangeMap(iter(self.present))
        return self.present.add(start, stop)

    def first_read(self, start: int, stop: int) -> int:
        """Note a read of [start, stop); return how many bytes were not read since their fetch."""
        if self.read is None:
            return 0
        new = self.read.add(start, stop)
        if self.read.total == self.size:
            self.read = None
        return new

    def become(self, generation: str, st_ino: int, ranges: bytes) -> None:
        """Stand for another file on the disk, which has the packed `ranges`."""
        self.generation, self.st_ino = generation, st_ino
        self.present = RangeMap.unpack(ranges)
        self.read = None
        self.recorded = self.present.total
        self.sums = None
        # A file without ranges will be written by this process.
        self.is_checked = not ranges

    def summed(self, sums: list[Sum]) -> None:
        """Add checksums of some of its bytes."""
        if self.sums is None:
            self.sums = sums
        else:
            self.sums += sums

    def recorded_sums(self, count: int) -> None:
        """Drop the first `count` pending checksums: the catalog has them."""
        if self.sums is not None:
            self.sums = self.sums[count:] or None

    def lose(self) -> None:
        """Have none of its bytes used; which file it is stays known."""
        self.present = RangeMap()
        self.read = None
        self.recorded = 0
        self.sums = None

    def forget(self) -> None:
        """Stand for a version of which nothing is on the disk."""
        self.become("", 0, b"")
