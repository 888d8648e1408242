"""One file of the cache as the event loop sees it: what it holds and who uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from fusefs.cache.catalog import Row
from fusefs.cache.ranges import RangeMap
from fusefs.store.base import ObjectVersion

if TYPE_CHECKING:
    from fusefs.cache.fetch import Download


class OpenFile(NamedTuple):
    """A file as a thread has opened it; `ranges` is None if it is the one that was known."""

    fd: int
    generation: str
    st_ino: int
    ranges: bytes | None


class CacheFile:
    """One file of the cache, there or about to be. Belongs to the event loop.

    `fd` is -1 while nobody needs it open; `pins` counts users. `is_kept` turns
    False when the disk refuses the file: its version is then read uncached.
    `is_ours` turns False when another mount keeps the same version: this file
    then goes with its last user.
    """

    __slots__ = (
        "_opening",
        "downloads",
        "fd",
        "generation",
        "is_kept",
        "is_ours",
        "name",
        "pins",
        "present",
        "recorded",
        "size",
        "st_ino",
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
        self.present = RangeMap()
        self.recorded = 0  # bytes of `present` that the catalog knows
        self.is_kept = True
        self.is_ours = True
        self.used_at = 0.0
        self.written_at = 0.0
        self._opening: trio.Lock | None = None
        self.downloads: list[Download] = []

    @classmethod
    def from_row(cls, row: Row) -> CacheFile:
        file = cls(row.name, row.size)
        file.become(row.generation, row.st_ino, row.ranges)
        file.used_at = row.used_at
        return file

    @classmethod
    def unkept(cls) -> CacheFile:
        """A pinned file that nothing is cached in: of what the bucket does not have yet."""
        file = cls("", 0)
        file.pins = 1
        return file

    def row(self) -> Row:
        ranges = self.present.pack()
        return Row(self.name, self.generation, self.st_ino, self.size, ranges, self.used_at)

    @property
    def is_complete(self) -> bool:
        return self.present.total == self.size

    @property
    def unrecorded(self) -> int:
        """How many bytes are there that the catalog does not know."""
        return self.present.total - self.recorded

    @property
    def opening(self) -> trio.Lock:
        """Held by whoever opens or creates the file."""
        if self._opening is None:
            self._opening = trio.Lock()
        return self._opening

    def become(self, generation: str, st_ino: int, ranges: bytes) -> None:
        """Be another file on the disk, which holds the ranges that its row tells."""
        self.generation, self.st_ino = generation, st_ino
        self.present = RangeMap.unpack(ranges)
        self.recorded = self.present.total

    def forget(self) -> None:
        """Nothing of it is on the disk any more."""
        self.become("", 0, b"")
