"""Edits of large objects: the pages that the local file lacks, and the object that has them.

The local file has holes in place of the missing pages, so the next process finds them again.
posix/write/sparse_edit.py downloads these pages.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusefs.cache.cached_file import MOST_RANGES, CacheFile
from fusefs.cache.ranges import RangeMap
from fusefs.store.interface import ObjectVersion

PAGE = 4096
MIB = 1 << 20
# An object of at least this size is edited without being downloaded, and uploaded in parts.
IN_PARTS = 8 << 20


@dataclass(slots=True, eq=False)
class EditBase:
    """The object that provides the bytes which an edited file lacks. For the event loop.

    The object provides the first `size` bytes of the file, except the `filled` pages, which are in
    the file itself; programs have written to the `changed` pages (or MiB, if pages are many). The
    object's cache `file` is pinned. `tokens` are the staged file's tokens: an object with one of
    them is the file's own upload, and can provide the same bytes.
    """

    file: CacheFile
    size: int
    filled: RangeMap = field(default_factory=RangeMap)
    changed: RangeMap = field(default_factory=RangeMap)
    tokens: set[str] = field(default_factory=set)

    @property
    def version(self) -> ObjectVersion:
        assert self.file.version is not None
        return self.file.version

    def wrote(self, start: int, stop: int) -> None:
        """Note that a program wrote the bytes [start, stop): the file now has their pages."""
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        self.filled.add(first, last)
        if self.changed.count >= MOST_RANGES:
            first, last = start // MIB * MIB, -(-stop // MIB) * MIB
        self.changed.add(first, last)

    def lacks(self, start: int, stop: int) -> bool:
        """True if the file itself lacks some of the bytes [start, stop), which the object has."""
        return not self.filled.covers(start, min(stop, self.size))

    def keeps(self, start: int, stop: int) -> bool:
        """True if the object has all the bytes [start, stop), and no program wrote to them."""
        return stop <= self.size and self.changed.first_missing(start, stop) == (start, stop)

    def own(self, size: int) -> RangeMap:
        """The ranges that the file itself contains, given that it has `size` bytes."""
        own = RangeMap((start, min(stop, size)) for start, stop in self.filled)
        own.add(self.size, size)
        return own

    def recover(self, fd: int, start: int, stop: int) -> None:
        """Note as written the pages of [start, stop) that are no holes in `fd`. Blocks briefly.

        An earlier process wrote them, or a write that failed in its middle.
        """
        self.size = min(self.size, os.fstat(fd).st_size)
        for first, last in _extents(fd, start // PAGE * PAGE, stop):
            self.wrote(first, last)


def has_small_holes(fd: int) -> bool:
    """True if holes can be single pages; ZFS and tmpfs with huge pages have larger blocks."""
    return os.fstat(fd).st_blksize <= PAGE


def page_edges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the pages, at most two, that [start, stop) covers only in part."""
    first, last = start // PAGE * PAGE, stop // PAGE * PAGE
    if start > first:
        yield first, first + PAGE
    if stop > last and (last > first or start == first):
        yield last, last + PAGE


def _extents(fd: int, at: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of a file's data in [at, stop), between its holes."""
    while at < stop:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, min(at, stop)
