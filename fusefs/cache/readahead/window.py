"""The next bytes of a file: what one open file will read, guessed from what it has read.

*In order* (`Window`): everything up to a window ahead of the reads is on its way. The window
becomes four times as large with each stretch that was read in order, up to the reader's share of
the path (path_meter.py), and collapses when the reader jumps. The kernel sends several reads at
once, so "in order" has some tolerance. Threads or processes that share a handle read several
stretches at once: each has a window of its own.

*Everywhere* (`RandomReads`): a mapped file that faults all over, or one that is read in steps or
backwards. When the reader has waited for a quarter of the time that all of the file would take, all
of it is fetched: what comes too much is bounded by what was waited for. Of a file that is read in
short stretches, as a sample or an index is, a quarter has to have come as well.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download, Downloader
from fusefs.cache.readahead.path_meter import LargeFileReader

FIRST_WINDOW = 4 << 20
GROWTH = 4
# How far reads may be out of order and still count as sequential.
TOLERANCE = 4 << 20
# The same for the second read of a stretch: a jump that is near by chance is no order.
NEAR = 256 << 10
# Stretches of one handle that are read at the same time.
MOST_WINDOWS = 32
# A larger file would push too much out of the cache.
LARGEST_SHARE_OF_CACHE = 0.5
# Of the time that a file would take as a whole, which its reader has waited for scattered reads.
WAITED_SHARE = 0.25
# Of the file, what has come by then, if it is not read in stretches that are LONG on average. A
# program that looks at some places of a large file is slowed down by fetching all of it, to half
# of its rate where processors are the limit.
PRESENT_SHARE = 0.25
LONG = 1 << 20


class Readahead:
    """The readahead of one open file. Belongs to the event loop.

    `go_on` is called when a reader in order comes near the file's end, with the
    bytes by which its window reaches behind it. `last_read` is in seconds of the
    monotonic clock.
    """

    __slots__ = (
        "_downloader",
        "_file",
        "_go_on",
        "_has_several",
        "_read_bytes",
        "_scattered",
        "_stretches",
        "_windows",
        "last_read",
    )

    def __init__(
        self,
        downloader: Downloader,
        file: CacheFile,
        go_on: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self.last_read = 0.0
        self._downloader = downloader
        self._file = file
        self._go_on = go_on
        self._windows = [self._window(0)]  # the one that was read last is the first
        self._has_several = False
        self._stretches, self._read_bytes = 1, 0
        self._scattered = RandomReads(downloader, file)

    def _window(self, expected: int) -> Window:
        return Window(DownloadsAhead(self._downloader, self._file, self), expected, self._go_on)

    def reads(self, start: int, stop: int) -> None:
        """Note a read of [start, stop) and start to download what comes next. Does not wait."""
        if self._file.is_complete:
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
        """Begin a stretch behind a read that belongs to none."""
        self._stretches += 1
        if not self._has_several:
            # Rather a reader that goes on elsewhere than one more of them.
            for window in self._windows:
                window.pause()
        if len(self._windows) == MOST_WINDOWS:
            self._windows.pop().close()
        self._windows.insert(0, self._window(stop))

    def waited(self, began: float, ended: float) -> None:
        """Note when a read has waited, in seconds of the monotonic clock."""
        if not self._windows[0].is_in_order:
            are_long = self._read_bytes >= LONG * self._stretches
            self._scattered.waited(began, ended, are_long=are_long)

    def close(self) -> None:
        """End the interest in all downloads; those without readers stop."""
        for window in self._windows:
            window.close()
        self._scattered.close()
        self._downloader.path.leaves(self)


class DownloadsAhead:
    """The downloads ahead of one reader of a file, at most `parts` at a time."""

    __slots__ = ("_downloader", "_downloads", "_reader", "file")

    def __init__(self, downloader: Downloader, file: CacheFile, reader: LargeFileReader) -> None:
        self.file = file
        self._downloader = downloader
        self._reader = reader
        self._downloads: list[Download] = []

    def parts(self) -> int:
        """The number of parts that the reader may have under way now."""
        room = int(LARGEST_SHARE_OF_CACHE * self._downloader.room) // PART
        return max(1, min(self._downloader.path.share(self._reader), room))

    def want(self, start: int, stop: int) -> None:
        """Have what is missing of [start, stop) on its way."""
        if start < stop:
            self._downloads = [download for download in self._downloads if not download.is_done]
            self._downloads += self._downloader.want(self.file, start, stop)

    def close(self) -> None:
        """End the interest in all of them; those without readers stop."""
        downloads, self._downloads = self._downloads, []
        for download in downloads:
            download.unwant()


class Window:
    """A stretch that is read in order, of which the next read is to begin at `expected`."""

    __slots__ = ("_ahead", "_expected", "_go_on", "_grown_at", "_interest", "_size")

    def __init__(
        self, interest: DownloadsAhead, expected: int, go_on: Callable[[int], None]
    ) -> None:
        self._interest = interest
        self._go_on = go_on
        self._expected = expected
        self._ahead = 0  # up to where downloads have been started
        self._size = 0
        self._grown_at = 0  # where the reader was when it got this size

    @property
    def is_in_order(self) -> bool:
        """True if a second read has followed the first."""
        return self._size > 0

    def is_next(self, start: int) -> bool:
        """True if a read that begins at `start` is in order, or slightly out of it."""
        tolerance = TOLERANCE if self._size else NEAR
        return -tolerance <= start - self._expected <= tolerance

    def reads(self, stop: int) -> None:
        """Note a read in order, up to `stop`."""
        if stop <= self._expected:
            return
        self._expected = stop
        ahead = self._ahead - stop
        if ahead > self._size - min(PART, self._size // 2):
            return
        most = self._interest.parts() * PART
        # Also where the window is always extended before the reader comes near its end.
        if ahead <= self._size // 2 or stop - self._grown_at >= self._size:
            self._size = max(FIRST_WINDOW, GROWTH * self._size)
            self._grown_at = stop
        self._size = min(self._size, most)
        self._extend(stop)

    def _extend(self, stop: int) -> None:
        size = self._interest.file.size
        ahead = min(size, stop + self._size)
        # Whole parts, so that requests do not get small as the window creeps on.
        if ahead < size and self._size > PART:
            ahead -= ahead % PART
        self._interest.want(max(stop, self._ahead), ahead)
        self._ahead = max(ahead, self._ahead)
        if ahead == size:
            self._go_on(stop + self._size - size)

    def pause(self) -> None:
        """Stop what is under way; the next read in order goes on with it."""
        self._interest.close()
        self._ahead = self._expected

    def close(self) -> None:
        """End the interest in all downloads."""
        self._interest.close()


class RandomReads:
    """Reads in no order that can be guessed: fetches the file when waiting for them costs more."""

    __slots__ = ("_downloader", "_file", "_scope", "_until", "_waited_s")

    def __init__(self, downloader: Downloader, file: CacheFile) -> None:
        self._downloader = downloader
        self._file = file
        self._waited_s = 0.0
        self._until = 0.0  # what was waited before has been counted
        self._scope: trio.CancelScope | None = None

    def waited(self, began: float, ended: float, *, are_long: bool) -> None:
        """Note when a read has waited; what several wait at the same time counts once.

        `are_long`: it is read in stretches that are long, so probably all of it will be.
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
            self._downloader.in_background(self._fetch)

    async def _fetch(self) -> None:
        assert self._scope is not None
        with self._scope:
            await self._downloader.fill_all(self._file)

    def close(self) -> None:
        """Stop fetching."""
        if self._scope is not None:
            self._scope.cancel()
