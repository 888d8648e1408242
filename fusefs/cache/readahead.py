"""Readahead: windows that grow with success and stop with failure.

Two guesses are made, and both are dropped as soon as they turn out wrong.

*The next bytes of a file* (`Window`, one per open file): as long as reads go
on in order, everything up to a window ahead of them is on its way. The window
starts small, doubles with each stretch that was read in order, and collapses
when the reader jumps. Reads of one program arrive slightly out of order (the
kernel's read-ahead sends several at once), so "in order" has some tolerance.

*The other files of a directory* (`Siblings`, one per directory): training
reads a folder of small files in whatever order. When several small files of a
directory had to be fetched, the others are fetched ahead, in the directory's
order, as many at a time as have been of use so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download, Fetcher
from fusefs.cache.file_cache import FileCache
from fusefs.store.interface import ObjectInfo

FIRST_WINDOW = 4 << 20
# Eight parts side by side. With sixteen a first read was a tenth slower here:
# that many threads get in each other's way, and in the way of the reader.
LAST_WINDOW = 8 * PART
# How far reads may be out of order and still count as sequential.
TOLERANCE = 4 << 20

# A file that one request brings as fast as its first byte.
SMALL = 1 << 20
SIBLINGS_AFTER = 4
MOST_SIBLINGS = 64


class Window:
    """What one open file will read next. Belongs to the event loop."""

    __slots__ = ("_ahead", "_downloads", "_expected", "_fetcher", "_file", "_size")

    def __init__(self, fetcher: Fetcher, file: CacheFile) -> None:
        self._fetcher = fetcher
        self._file = file
        self._expected = 0  # where a sequential reader reads next
        self._ahead = 0  # up to where downloads have been started
        self._size = 0
        self._downloads: list[Download] = []

    def reads(self, start: int, stop: int) -> None:
        """Note a read of [start, stop) and start to download what comes next. Does not wait."""
        distance = start - self._expected
        if not -TOLERANCE <= distance <= TOLERANCE:
            self._size = 0
            self._expected = self._ahead = stop
            self.close()
            return
        if stop <= self._expected:
            return
        self._expected = stop
        if self._file.is_complete or self._ahead - stop > self._size // 2:
            return
        self._size = min(max(FIRST_WINDOW, 2 * self._size), LAST_WINDOW)
        ahead = min(self._file.size, stop + self._size)
        # Whole parts, so that requests do not get small as the window creeps on.
        if ahead < self._file.size and self._size > PART:
            ahead -= ahead % PART
        self._want(max(stop, self._ahead), ahead)

    def close(self) -> None:
        """End the interest in all downloads; those without readers stop."""
        for download in self._downloads:
            download.unwant()
        self._downloads = []

    def _want(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        self._ahead = stop
        self._downloads = [download for download in self._downloads if not download.is_done]
        self._downloads += self._fetcher.want(self._file, start, stop)


class Siblings:
    """Fetches small files of one directory ahead. Belongs to the event loop.

    `order` iterates over the directory's files, as far as they are known.
    """

    def __init__(self, fetcher: Fetcher, cache: FileCache, order: Iterator[ObjectInfo]) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._order = order
        self._ahead: dict[str, Download] = {}  # by key: started, and the file not yet opened
        self._opened = 0
        self._useful = 0

    def opened(self, info: ObjectInfo, *, was_there: bool) -> None:
        """Note that a small file of the directory is being opened; fetch others.

        `was_there` says whether all of it was in the cache.
        """
        if self._ahead.pop(info.key, None) is not None:
            self._useful += 1
        elif was_there:
            return  # it was not fetched ahead: this says nothing about the guess
        self._opened += 1
        if self._opened < SIBLINGS_AFTER:
            return
        most = min(MOST_SIBLINGS, SIBLINGS_AFTER + 2 * self._useful)
        if len(self._ahead) >= most:
            return
        for other in islice(self._order, MOST_SIBLINGS):
            if not self._fetch(other) or len(self._ahead) >= most:
                return

    def close(self) -> None:
        for download in self._ahead.values():
            download.unwant()
        self._ahead = {}

    def _fetch(self, info: ObjectInfo) -> bool:
        """Start to fetch a file that is small and not there; False if the cache has no room."""
        if not 0 < info.size <= SMALL:
            return True
        known = self._cache.find(info.version)
        if known is not None and (known.is_complete or known.downloads):
            return True
        file = self._cache.pin(info.version)
        try:
            downloads = self._fetcher.want(file, 0, info.size)
        finally:
            self._cache.unpin(file)
        for download in downloads:
            self._ahead[info.key] = download
        return bool(downloads)
