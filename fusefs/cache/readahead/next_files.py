"""Readahead into the next large file of a folder: shards are often read in the order of names.

When a sequential reader comes so near the end of a large file that its window
reaches past the end, the rest of the window is fetched from the next file of the
listing. Files that are complete, open or already begun are skipped, so that each of
several workers that read a folder's shards gets a file of its own. Each later open of
a file of the folder shows if the guess was right; if more than half were wrong, few
guesses are made.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from fusefs.cache.downloader import PART, Download, Downloader
from fusefs.cache.file_cache import FileCache
from fusefs.cache.readahead.siblings import SMALL, Listing
from fusefs.store.interface import ObjectInfo

# Until a guess was right, at most an eighth of the current file's size is fetched of the next file.
FIRST_SHARE = 8
# The number of next files in the listing that are considered.
LOOKED_AT = 64
# The most files that were begun and not opened yet, in all folders.
MOST_BEGUN = 32
# The most files for which the next file is remembered.
MOST_READ = 1024
# The number of latest guesses that count; while most are wrong, one of TRY_EACH guesses is made.
REMEMBERED = 16
TRY_EACH = 8


@dataclass(slots=True)
class _Begun:
    """A file guessed to be opened next; downloads of the first `stop` bytes were started."""

    prefix: str
    info: ObjectInfo
    stop: int = 0
    downloads: list[Download] = field(default_factory=list)


class NextFiles:
    """Fetches the beginnings of large files ahead of their opens. Belongs to the event loop."""

    def __init__(self, downloader: Downloader, cache: FileCache, listing: Listing) -> None:
        self._downloader = downloader
        self._cache = cache
        self._listing = listing
        self._begun: OrderedDict[str, _Begun] = OrderedDict()  # those not opened yet, by key
        # The guesses by the key of the file being read; None if no guess was made.
        self._next: OrderedDict[str, _Begun | None] = OrderedDict()
        self._right = self._wrong = self._left_out = 0

    def opened(self, prefix: str, key: str, *, was_there: bool) -> None:
        """Note that a large file is opened; `was_there` says if the cache had some of its bytes."""
        # The file's running downloads continue, as its reader wants these bytes first.
        if self._begun.pop(key, None) is not None:
            self._count(is_right=True)
        elif not was_there and any(begun.prefix == prefix for begun in self._begun.values()):
            self._count(is_right=False)

    def go_on(self, prefix: str, read: ObjectInfo, size: int) -> None:
        """Fetch ahead at most `size` bytes of the large file after the file `read` in a folder."""
        if not self._right:
            size = min(size, read.size // FIRST_SHARE)
        size -= size % PART
        if size <= 0:
            return
        if read.key not in self._next:
            self._next[read.key] = self._choose(prefix, read) if self._may_guess() else None
            if len(self._next) > MOST_READ:
                self._next.popitem(last=False)
        begun = self._next[read.key]
        if begun is not None and begun.info.key in self._begun and begun.stop < size:
            self._extend(begun, size)

    def _may_guess(self) -> bool:
        if self._wrong <= self._right + 1:
            return True
        self._left_out += 1
        return self._left_out % TRY_EACH == 0

    def _choose(self, prefix: str, read: ObjectInfo) -> _Begun | None:
        for info in islice(self._listing.files(prefix, read.key), LOOKED_AT):
            if info.key <= read.key:
                return None
            known = self._cache.find(info.version)
            is_free = known is None or not (known.is_complete or known.pins)
            if info.size > SMALL and is_free and info.key not in self._begun:
                begun = self._begun[info.key] = _Begun(prefix, info)
                if len(self._begun) > MOST_BEGUN:
                    self._count(is_right=False)
                    self._end(next(iter(self._begun)))
                return begun
        return None

    def _extend(self, begun: _Begun, size: int) -> None:
        file = self._cache.pin(begun.info.version)
        try:
            begun.downloads += self._downloader.want(file, begun.stop, min(begun.info.size, size))
        finally:
            self._cache.unpin(file)
        if begun.downloads:
            begun.stop = size
        else:  # the cache has no room for it
            del self._begun[begun.info.key]

    def _count(self, *, is_right: bool) -> None:
        self._right += is_right
        self._wrong += not is_right
        if self._right + self._wrong > REMEMBERED:
            self._right //= 2
            self._wrong //= 2

    def _end(self, key: str) -> None:
        for download in self._begun.pop(key).downloads:
            download.unwant()

    def close(self) -> None:
        """Call `unwant` on all downloads of files that were not opened yet."""
        while self._begun:
            self._end(next(iter(self._begun)))
