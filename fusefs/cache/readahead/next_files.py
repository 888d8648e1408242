"""The next large file of a folder: shards are read one after the other, in the order of names.

When a reader in order comes so near the end of a large file that its window
reaches behind it, the rest of the window is fetched of the file that follows in
the listing, leaving out those that are whole, open or begun: of several workers
that read a folder's shards each gets one of its own. Every file that is opened
shows whether the guess was right; where more than one in two was wrong, none is
made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from fusefs.cache.downloader import PART, Download, Fetcher
from fusefs.cache.file_cache import FileCache
from fusefs.cache.readahead.siblings import SMALL
from fusefs.store.interface import ObjectInfo

# Before a guess was right, an eighth of what was read may be fetched of the next file in vain.
FIRST_SHARE = 8
# Files that follow and are looked at.
LOOKED_AT = 64
# Files that were begun and not opened yet, of all folders.
MOST_BEGUN = 32


class Shards(Protocol):
    """What is known of the folders."""

    def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
        """The files of a folder: those behind a key, then those before it."""


class NextFiles:
    """Begins the large files of a mount's folders ahead. Belongs to the event loop."""

    def __init__(self, fetcher: Fetcher, cache: FileCache, listing: Shards) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._listing = listing
        self._begun: OrderedDict[str, list[Download]] = OrderedDict()  # by their keys
        self._right = self._wrong = 0

    def opened(self, key: str, *, was_there: bool) -> None:
        """Note that a large file is opened, of which `was_there` something."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            self._right += 1
            for download in begun:
                download.unwant()
        elif self._begun and not was_there:
            self._wrong += 1

    def go_on(self, prefix: str, read: ObjectInfo, size: int) -> None:
        """Fetch the first `size` bytes, at most, of the file that follows `read` in its folder."""
        if not self._right:
            size = min(size, read.size // FIRST_SHARE)
        size -= size % PART
        if size <= 0 or self._wrong > self._right + 1:
            return
        for info in islice(self._listing.files(prefix, read.key), LOOKED_AT):
            if info.key <= read.key or info.key in self._begun:
                return
            if info.size > SMALL and self._begin(info, size):
                return

    def _begin(self, info: ObjectInfo, size: int) -> bool:
        known = self._cache.find(info.version)
        if known is not None and (known.is_complete or known.pins):
            return False
        file = self._cache.pin(info.version)
        try:
            self._begun[info.key] = self._fetcher.want(file, 0, min(info.size, size))
        finally:
            self._cache.unpin(file)
        if len(self._begun) > MOST_BEGUN:
            self._wrong += 1
            _, downloads = self._begun.popitem(last=False)
            for download in downloads:
                download.unwant()
        return True

    def close(self) -> None:
        """End the interest in all of it."""
        for downloads in self._begun.values():
            for download in downloads:
                download.unwant()
        self._begun = OrderedDict()
