"""What a download brings: written to its file, and noted in the event loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from fusefs.cache.cached_file import OpenFile
from fusefs.cache.disk_latency import Pace
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity.checksums import RunningSums
from fusefs.cache.quota import Space

if TYPE_CHECKING:
    from fusefs.cache.downloader import Download


class Incoming:
    """The bytes of one download on their way into the file, and into the books."""

    def __init__(
        self, cache: FileCache, pace: Pace, download: Download, reserved: Reservation
    ) -> None:
        self._cache = cache
        self._pace = pace
        self._download = download
        self._reserved = reserved
        self._fd = download.file.fd
        self._created: OpenFile | None = None
        self._written_to = download.start
        self._sums = RunningSums()
        self._token = trio.lowlevel.current_trio_token()

    def write(self, offset: int, chunk: memoryview) -> None:
        """Write a chunk. Blocks: a large one is for a thread."""
        began = self._pace.begin()
        if self._fd < 0:
            self._created = self._cache.create(self._download.file)
            self._fd = self._created.fd
        done = 0
        while done < len(chunk):
            done += os.pwrite(self._fd, chunk[done:], offset + done)
        self._pace.end(began)
        self._sums.add(offset, chunk)
        self._written_to = offset + done
        if self._written_to < self._download.stop:  # the end is noted with the download's own
            self._token.run_sync_soon(self.note)

    def note(self) -> None:
        """Note what has been written by now, in the event loop."""
        download, stop = self._download, self._written_to
        if self._created is not None:
            self._cache.adopt(download.file, self._created)
            self._created = None
        if download.position < stop:
            self._cache.arrived(download.file, download.position, stop, self._sums.take())
            self._reserved.use(stop - download.position)
            download.advance(stop)


class Reservation:
    """Room set aside for one download."""

    def __init__(self, space: Space, size: int) -> None:
        self._space = space
        self._left = size

    def use(self, size: int) -> None:
        self._left -= size
        self._space.settle(size)

    def close(self) -> None:
        self.use(self._left)
