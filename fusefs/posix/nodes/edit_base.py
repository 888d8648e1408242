"""The object under a file that is edited: which of the file's bytes are still the object's.

Which pages are in the file is what the local file system says of its holes, so
it survives this process. How the rest is brought: posix/write/sparse_edit.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.ranges import RangeMap
from fusefs.store.interface import ObjectVersion

PAGE = 4096
# From this size on an object is edited without being downloaded, and goes up in parts.
IN_PARTS = 8 << 20


@dataclass(slots=True, eq=False)
class EditBase:
    """The object of which an edited file keeps what no program writes to. For the event loop.

    Its first `size` bytes are the file's, but for what is `filled`: pages that
    are in the file itself. `changed` are those that were written to. The
    object's cache file is pinned. `tokens` are those of the staged file: an object
    with one of them has the same bytes where the file has none.
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
        """Note that the bytes [start, stop) of the file, and their pages, are its own now."""
        first, last = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        self.filled.add(first, last)
        self.changed.add(first, last)

    def lacks(self, start: int, stop: int) -> bool:
        """True if some of the bytes [start, stop) are the object's and not in the file."""
        return not self.filled.covers(start, min(stop, self.size))

    def keeps(self, start: int, stop: int) -> bool:
        """True if the object has the bytes [start, stop), and no program wrote to them."""
        return stop <= self.size and self.changed.first_missing(start, stop) == (start, stop)

    def own(self, size: int) -> RangeMap:
        """The ranges of a file of `size` bytes that are in the file itself."""
        own = RangeMap((start, min(stop, size)) for start, stop in self.filled)
        own.add(self.size, size)
        return own

    def recover(self, fd: int) -> None:
        """Find out what an earlier process has written. Blocks shortly."""
        size = os.fstat(fd).st_size
        self.size = min(self.size, size)
        for start, stop in _extents(fd, size):
            self.wrote(start, stop)


def has_small_holes(fd: int) -> bool:
    """True if holes tell which pages were written: ZFS and huge pages count whole blocks."""
    return os.fstat(fd).st_blksize <= PAGE


def page_edges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The pages that [start, stop) covers in part."""
    first, last = start // PAGE * PAGE, stop // PAGE * PAGE
    if start > first:
        yield first, first + PAGE
    if stop > last and (last > first or start == first):
        yield last, last + PAGE


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that are no holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at
