"""Readahead of the other small files of a folder: training reads them all, in any order.

After several opens of a folder's small files that were not in the cache, the folder's other files
are fetched ahead: first the files after the opened one in the listing, then from the listing's
start. Once enough such files were opened, the first miss in another folder suffices, and when a
folder was fetched whole, the next folder is begun.

Each opened file raises the number of files that may be fetched ahead and unread, each file evicted
unread lowers it, so a program that reads a few files of a large folder causes little waste. The
number of parallel downloads follows from the latency: enough to keep the daemon busy. If readers
wait for more downloads than that, nothing is fetched ahead, as it would make them wait longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from fusefs.cache.downloader import Download, Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo

# The largest file that arrives hardly later than its first byte.
SMALL = 1 << 20
# Misses in a folder before its other files are fetched ahead.
FOLDER_AFTER = 4
# The most unread files per opened file, and per folder. A program that opens all files in random
# order finds few of the first ones in the cache; when it has opened a tenth of the files, all
# others should have been requested.
UNREAD_EACH = 8
MOST_UNREAD = 4096
# The share of the cache for files that were fetched ahead and not opened yet.
UNREAD_SHARE = 0.25
# The most folders whose files are fetched ahead.
MOST_FOLDERS = 1024
# One miss in a folder suffices as long as at least one in this many files that were fetched
# ahead was opened.
STARTED_EACH = 16
LEAST_WIDTH = 8
# If more readers wait, they keep the daemon busy themselves, however far away the store is.
MOST_WAITING = 32
# The rate a daemon can handle: a small file costs it 0.5 ms of processor time.
FILES_PER_SECOND = 2000
# Entries of a listing, and folders, that are processed before other tasks get their turn.
TURN = 200
FOLDERS_TURN = 8


class Listing(Protocol):
    """The mount's listings: the files and folders that are known without a request."""

    def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
        """Yield a folder's files: first those after the key `behind`, then those before it."""

    def next_folder(self, prefix: str) -> str | None:
        """The prefix of the next folder in the parent's listing, or None if unknown."""


@dataclass(slots=True, eq=False)
class _Folder:
    """The state of one folder; `unread` has its files that were fetched ahead, by key.

    `refused` is a file that the cache had no room for. It is tried before the files in `order`.
    """

    prefix: str
    order: Iterator[ObjectInfo]
    refused: ObjectInfo | None = None
    missed: int = 0
    useful: int = 0
    wasted: int = 0  # evicted before they were opened
    unread: dict[str, tuple[Download, int]] = field(default_factory=dict)
    is_through: bool = False  # True if the next folder was looked for
    evicted_then: int = 0  # files that the cache had evicted when `unread` was last compared

    @property
    def most(self) -> int:
        return min(MOST_UNREAD, UNREAD_EACH * max(0, self.missed + self.useful - self.wasted))


class Siblings:
    """Fetches small files ahead in folders where programs miss some. Belongs to the event loop."""

    def __init__(self, downloader: Downloader, cache: FileCache, listing: Listing) -> None:
        self._downloader = downloader
        self._cache = cache
        self._listing = listing
        # The folders by prefix, the last used at the end.
        self._folders: OrderedDict[str, _Folder] = OrderedDict()
        self._under_way = 0
        self._unread_bytes = 0
        self._most_bytes = 0.0  # the limit of `_unread_bytes`, as of the last `_fetch`
        # Folders that may have more files to fetch, the last used at the end.
        self._waiting: dict[_Folder, None] = {}
        self._started = self._useful = 0

    @property
    def width(self) -> int:
        """The number of files to fetch ahead at a time."""
        wanted = round(FILES_PER_SECOND * self._downloader.path.latency_s)
        return min(self._downloader.most_small, max(LEAST_WIDTH, wanted))

    def opened(self, prefix: str, info: ObjectInfo, *, was_there: bool) -> None:
        """Note the open of a small file of a folder; fetch the folder's other files if worthwhile.

        `was_there` says if the whole file was in the cache.
        """
        folder = self._folders.get(prefix)
        if folder is None:
            if was_there:
                return
            folder = self._begin(prefix, info.key)
        if self._pop(folder, info.key):
            folder.useful += 1
            self._useful += 1
        elif was_there:
            return  # not fetched ahead, so this says nothing about the guess
        else:
            folder.missed += 1
            folder.order, folder.is_through = self._listing.files(prefix, info.key), False
            folder.refused = None
        self._folders.move_to_end(prefix)
        is_good = self._useful >= max(FOLDER_AFTER, self._started // STARTED_EACH)
        if folder.missed >= (1 if is_good else FOLDER_AFTER):
            self._waiting.pop(folder, None)
            self._waiting[folder] = None
            self._fetch()

    def close(self) -> None:
        """Call `unwant` on all downloads of unread files."""
        while self._folders:
            self._end(next(iter(self._folders)))

    def _begin(self, prefix: str, behind: str) -> _Folder:
        folder = self._folders[prefix] = _Folder(prefix, self._listing.files(prefix, behind))
        if len(self._folders) > MOST_FOLDERS:
            self._end(next(iter(self._folders)))
        return folder

    def _end(self, prefix: str) -> None:
        folder = self._folders.pop(prefix)
        self._waiting.pop(folder, None)
        for key, (download, _) in list(folder.unread.items()):
            self._pop(folder, key)
            download.unwant()

    def _pop(self, folder: _Folder, key: str) -> bool:
        _, size = folder.unread.pop(key, (None, -1))
        self._unread_bytes -= max(0, size)
        return size >= 0

    def _fetch(self) -> None:
        """Start downloads of files up to the limits, first in the folder that was used last."""
        # Computed once, as this takes as long as starting a download; the limit hardly changes.
        self._most_bytes = UNREAD_SHARE * self._downloader.room
        if self._is_full():
            # Give up the oldest of several folders, or forget the files of the only one.
            oldest = next(iter(self._folders.values()))
            if len(self._folders) > 1:
                self._end(oldest.prefix)
            else:
                self._forget_evicted(oldest)
        for _ in range(FOLDERS_TURN):
            if not self._waiting or not self._has_room():
                return
            folder = next(reversed(self._waiting))
            if not self._fetch_of(folder):
                return
            self._waiting.pop(folder, None)

    def _fetch_of(self, folder: _Folder) -> bool:
        """Start downloads of a folder's files; False if the folder has more to start later."""
        if len(folder.unread) >= folder.most:
            self._forget_evicted(folder)
        for _ in range(TURN):
            if not self._has_room():
                return False
            if len(folder.unread) >= folder.most:
                return True
            info = folder.refused or next(folder.order, None)
            folder.refused = None
            if info is None:
                self._begin_next(folder)
                return True
            if 0 < info.size <= SMALL and not self._start(folder, info):
                folder.refused = info
                return False
        return True

    def _has_room(self) -> bool:
        width, demand = self.width, self._downloader.demand
        if demand.peak > min(width, MOST_WAITING) or self._is_full():
            return False
        return self._under_way < max(LEAST_WIDTH, width - demand.count)

    def _is_full(self) -> bool:
        return self._unread_bytes >= self._most_bytes

    def _begin_next(self, folder: _Folder) -> None:
        """Begin the folder after `folder` if programs opened enough of its files fetched ahead."""
        if folder.is_through or folder.useful < FOLDER_AFTER:
            return
        folder.is_through = True
        prefix = self._listing.next_folder(folder.prefix)
        if prefix is not None and prefix not in self._folders:
            following = self._begin(prefix, "")
            # This allows some of the folder's files now, and more as soon as these are opened.
            following.missed = FOLDER_AFTER
            self._waiting[following] = None

    def _start(self, folder: _Folder, info: ObjectInfo) -> bool:
        """Start the download of a file unless it is cached; False if the cache has no room."""
        known = self._cache.find(info.version)
        if known is not None and (known.is_complete or known.downloads):
            return True
        file = self._cache.pin(info.version)
        try:
            ended = partial(self._ended, folder, info.key)
            downloads = self._downloader.want(file, 0, info.size, ended)
        finally:
            self._cache.unpin(file)
        for download in downloads:
            self._pop(folder, info.key)
            folder.unread[info.key] = download, info.size
            self._unread_bytes += info.size
            self._under_way += 1
            self._started += 1
        return bool(downloads)

    def _ended(self, folder: _Folder, key: str, download: Download) -> None:
        self._under_way -= 1
        if download.error is not None:
            self._pop(folder, key)
        if isinstance(download.error, StoreError):
            folder.wasted += 1
        # Stop if the cache has no room or the mount ends.
        if not isinstance(download.error, NotKeptError):
            self._fetch()

    def _forget_evicted(self, folder: _Folder) -> None:
        """Count as wasted, and forget, the unread files that the cache has evicted."""
        if not folder.unread or self._cache.evicted == folder.evicted_then:
            return
        folder.evicted_then = self._cache.evicted
        for key, (download, _) in list(folder.unread.items()):
            if download.is_done and not download.file.is_complete:
                self._pop(folder, key)
                folder.wasted += 1
