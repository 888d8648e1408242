"""Readahead within one open file: its next reads are guessed from its last reads.

*Sequential* reads (`Window`): the bytes up to a window ahead of the reads are downloaded. The
window grows fourfold each time that a window's length was read in order, up to the reader's share
of the path (path_meter.py), and collapses when the reader jumps. The kernel sends several reads at
once, so "in order" has some tolerance. Threads or processes that share a handle read several
stretches of the file at once, and each stretch has a window of its own.

*Random* reads (`RandomReads`): page faults all over a mapped file, strides, or reading backwards.
When the reader has waited for a quarter of the time that the whole file would take, the whole file
is fetched, so that the waste is bounded by the time already waited. If a file is read in short
stretches, like a sample or an index, a quarter of its bytes must have arrived, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download, Downloader

FIRST_WINDOW = 4 << 20
GROWTH = 4
# How far reads may be out of order and still count as sequential.
TOLERANCE = 4 << 20
# The same tolerance for the second read of a stretch, as a random jump may be short by chance.
NEAR = 256 << 10
# Stretches of one handle that are read at the same time.
MOST_WINDOWS = 32
# A larger file is not fetched whole, as it would evict too much.
LARGEST_SHARE_OF_CACHE = 0.5
# The share of the download time of the whole file that its reader must have waited.
WAITED_SHARE = 0.25
# The share of the file that must be present as well, unless it is read in stretches that are LONG
# on average. Fetching all of a large file slows down a program that reads only some places of it,
# to half of its rate if processors are the limit.
PRESENT_SHARE = 0.25
LONG = 1 << 20


@dataclass(slots=True, eq=False)
class Readahead:
    """The readahead of one open file. Belongs to the event loop.

    `go_on` is called when a sequential reader comes near the file's end, with the
    number of bytes by which its window reaches past the end.
    """

    downloader: Downloader
    file: CacheFile
    go_on: Callable[[int], None] = lambda _size: None
    _windows: list[Window] = field(init=False)  # the last used first
    _scattered: RandomReads = field(init=False)
    _has_several: bool = False
    _stretches: int = 1
    _read_bytes: int = 0

    def __post_init__(self) -> None:
        self._windows = [Window(self, 0)]
        self._scattered = RandomReads(self.downloader, self.file)

    def reads(self, start: int, stop: int) -> None:
        """Note a read of [start, stop) and start downloads of the next bytes. Does not wait."""
        if self.file.is_complete:
            return
        self._read_bytes += stop - start
        for index, window in enumerate(self._windows):
            if window.is_next(start):
                if index:
                    self._has_several |= window.is_in_order
                    self._windows.insert(0, self._windows.pop(index))
                window.reads(stop)
                return
        self._jumped(stop)

    def _jumped(self, stop: int) -> None:
        """Begin a new window at `stop`, the end of a read that continued no known window."""
        self._stretches += 1
        if not self._has_several:
            # Probably the same reader at another place, not one more reader.
            for window in self._windows:
                window.pause()
        if len(self._windows) == MOST_WINDOWS:
            self._windows.pop().close()
        self._windows.insert(0, Window(self, stop))

    def waited(self, began: float, ended: float) -> None:
        """Count a read's wait, `began` to `ended` (monotonic s), unless reads are in order."""
        if not self._windows[0].is_in_order:
            are_long = self._read_bytes >= LONG * self._stretches
            self._scattered.waited(began, ended, are_long=are_long)

    def close(self) -> None:
        """Cancel downloads that nothing else wants; end the reader's share of the path."""
        for window in self._windows:
            window.close()
        self._scattered.close()
        self.downloader.path.leaves(self)


class Window:
    """A stretch of a file that is read in order; the next read should begin at `expected`."""

    __slots__ = ("_ahead", "_downloads", "_expected", "_grown_at", "_reader", "_size")

    def __init__(self, reader: Readahead, expected: int) -> None:
        self._reader = reader
        self._downloads: list[Download] = []
        self._expected = expected
        self._ahead = 0  # the offset up to which downloads were started
        self._size = 0
        self._grown_at = 0  # the reader's offset when the window got its size

    @property
    def is_in_order(self) -> bool:
        """True if at least one read has begun at or near the expected offset."""
        return self._size > 0

    def is_next(self, start: int) -> bool:
        """True if a read that begins at `start` continues the stretch, exactly or nearly."""
        tolerance = TOLERANCE if self._size else NEAR
        return -tolerance <= start - self._expected <= tolerance

    def reads(self, stop: int) -> None:
        """Note a read in order that ends at `stop`; download more if few bytes are ahead of it."""
        if stop <= self._expected:
            return
        self._expected = stop
        ahead = self._ahead - stop
        if ahead > self._size - min(PART, self._size // 2):
            return
        downloader = self._reader.downloader
        room = int(LARGEST_SHARE_OF_CACHE * downloader.room) // PART
        parts = max(1, min(downloader.path.share(self._reader), room))
        # The second condition is for windows extended long before the reader nears their end.
        if ahead <= self._size // 2 or stop - self._grown_at >= self._size:
            self._size = max(FIRST_WINDOW, GROWTH * self._size)
            self._grown_at = stop
        self._size = min(self._size, parts * PART)
        file = self._reader.file
        until = min(file.size, stop + self._size)
        # Whole parts, so that requests stay large as the window advances in small steps.
        if until < file.size and self._size > PART:
            until -= until % PART
        start = max(stop, self._ahead)
        if start < until:
            self._downloads = [download for download in self._downloads if not download.is_done]
            self._downloads += downloader.want(file, start, until)
        self._ahead = max(until, self._ahead)
        if until == file.size:
            self._reader.go_on(stop + self._size - file.size)

    def pause(self) -> None:
        """Cancel the window's downloads that nothing else wants, until the next read in order."""
        self.close()
        self._ahead = self._expected

    def close(self) -> None:
        """Cancel the window's downloads that nothing else wants."""
        downloads, self._downloads = self._downloads, []
        for download in downloads:
            download.unwant()


class RandomReads:
    """Fetches a whole file once random reads of the file have waited for long enough."""

    __slots__ = ("_downloader", "_file", "_scope", "_until", "_waited_s")

    def __init__(self, downloader: Downloader, file: CacheFile) -> None:
        self._downloader = downloader
        self._file = file
        self._waited_s = 0.0
        self._until = 0.0  # waits before this time have been counted
        self._scope: trio.CancelScope | None = None

    def waited(self, began: float, ended: float, *, are_long: bool) -> None:
        """Count the time a read has waited; time in which several reads wait counts once.

        `are_long`: the ranges read in order are long, so the whole file will probably be read.
        """
        self._waited_s += max(0.0, ended - max(began, self._until))
        self._until = max(ended, self._until)
        size = self._file.size
        waited_for = self._waited_s * self._downloader.path.bandwidth
        if self._scope is not None or waited_for < WAITED_SHARE * size:
            return
        if not are_long and self._file.present.total < PRESENT_SHARE * size:
            return
        if size <= LARGEST_SHARE_OF_CACHE * self._downloader.room:
            self._scope = trio.CancelScope()
            self._downloader.nursery.start_soon(self._fetch)

    async def _fetch(self) -> None:
        assert self._scope is not None
        with self._scope:
            await self._downloader.fill_all(self._file)

    def close(self) -> None:
        """Stop fetching the whole file."""
        if self._scope is not None:
            self._scope.cancel()
