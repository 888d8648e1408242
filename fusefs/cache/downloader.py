"""Ranges on their way in: each is downloaded once, however many wait for it.

A `Download` is one ranged GET into one cache file. It has a position, and
everything before that has been written; a reader waits for the position to
pass the end of what it needs, so it is woken when its bytes arrive and not
when the range ends. Whoever needs bytes that no download will bring starts
one; the next ones join it.

A download ends early when nobody wants it any more: its readers were
cancelled, and the prefetch that asked for it has been closed. What arrived
until then is kept.

When the cache has no room or its disk fails, `wait_for` says so, and the
bytes are read without being kept (`read_unkept`).

All of this belongs to the event loop; only the writing of chunks happens in
the store's threads.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk_latency import Pace
from fusefs.cache.file_cache import FileCache
from fusefs.cache.incoming import Incoming, Reservation
from fusefs.cache.quota import Space
from fusefs.cache.unkept import UnkeptBuffers
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectVersion, Priority, Store

# What a random read brings at least: a request costs as much time as this many
# bytes, so less would save nothing, and more would be wasted on a jumping reader.
BLOCK = 256 << 10
# What the first read of a file brings: who reads the beginning mostly goes on.
FIRST_BYTES = 1 << 20
# One GET of a sequential reader: long enough to make requests cheap, short
# enough for several to run side by side.
PART = 8 << 20


class NotKeptError(Exception):
    """The cache cannot take the bytes: read them without it."""


class Download:
    """One range [start, stop) of one file on its way.

    `position` is up to where bytes have arrived; `demanded` counts the readers
    that wait, `wanted` the prefetches that are interested. What was used since
    `spares`, in seconds since the epoch, is not evicted for it.
    """

    __slots__ = (
        "_hurry",
        "_waiters",
        "cancel_scope",
        "demanded",
        "error",
        "file",
        "is_done",
        "position",
        "since",
        "spares",
        "start",
        "stop",
        "wanted",
    )

    def __init__(self, file: CacheFile, start: int, stop: int, hurry: Callable[[], None]) -> None:
        self.file = file
        self._hurry = hurry
        self.start = start
        self.stop = stop
        self.position = start
        self.since = time.monotonic()
        self.spares = math.inf
        self.demanded = 0
        self.wanted = 0
        self.is_done = False
        self.error: Exception | None = None
        self.cancel_scope = trio.CancelScope()
        self._waiters: list[tuple[int, trio.Event]] = []

    def advance(self, position: int) -> None:
        self.position = position
        if self._waiters:
            reached = [event for needed, event in self._waiters if needed <= position]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > position]
            for event in reached:
                event.set()

    def finish(self, error: Exception | None) -> None:
        self.error = error
        self.is_done = True
        for _, event in self._waiters:
            event.set()
        self._waiters = []

    async def reach(self, position: int) -> None:
        """Wait until the bytes before `position` are there, or the download has ended.

        The download goes on if the caller is cancelled and others want it.
        """
        event = trio.Event()
        self._waiters.append((position, event))
        self.demanded += 1
        if self.demanded == 1:
            self._hurry()
        try:
            await event.wait()
        except trio.Cancelled:
            self.demanded -= 1
            self._stop_if_unwanted()
            raise
        self.demanded -= 1

    async def ended(self) -> None:
        """Wait until the download has ended, without hurry."""
        if not self.is_done:
            event = trio.Event()
            self._waiters.append((self.stop + 1, event))
            await event.wait()

    def urgency(self) -> Priority:
        return Priority.DEMAND if self.demanded else Priority.PREFETCH

    def describe(self) -> str:
        key = self.file.version.key if self.file.version is not None else self.file.name
        return (
            f"downloading {key!r} [{self.start}, {self.stop}): at {self.position} for"
            f" {time.monotonic() - self.since:.1f} s, {self.demanded} readers wait"
        )

    def unwant(self) -> None:
        """A prefetch has no more interest in it."""
        self.wanted -= 1
        self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        if not self.demanded and not self.wanted and not self.is_done:
            self.cancel_scope.cancel()


class Fetcher:
    """All downloads of one mount; they live in the nursery that it is given.

    What is read past the cache takes at most `unkept` bytes of memory.
    """

    def __init__(
        self, store: Store, cache: FileCache, space: Space, nursery: trio.Nursery,
        *, unkept: int = 64 << 20,
    ) -> None:  # fmt: skip
        self.unkept = UnkeptBuffers(unkept)
        self._store = store
        self._cache = cache
        self._space = space
        self._nursery = nursery
        self._running: set[Download] = set()
        self.pace = Pace()

    @property
    def under_way(self) -> int:
        return len(self._running)

    async def wait_for(self, file: CacheFile, start: int, stop: int) -> None:
        """Return once the bytes [start, stop) are in the file, which the caller has pinned.

        Starts or joins the downloads that are missing. Cancelling the caller
        leaves them running for whoever else waits, and stops them when nobody does.

        Raises:
            StaleVersionError: the object in the bucket is no longer this version.
            StoreError: S3 could not serve the range; `.errno` says how to answer.
            NotKeptError: the cache has no room for it.
        """
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            raise NotKeptError
        while (missing := file.present.first_missing(start, stop)) is not None:
            download = self.find(file, missing[0])
            if download is None:
                download = self._demand(file, *missing)
            await download.reach(min(stop, download.stop))
            if download.error is not None and not file.present.covers(*missing):
                raise download.error

    async def fill(self, file: CacheFile, start: int, stop: int, spares: float) -> int:
        """Have the bytes [start, stop) in a pinned file, behind what programs wait for.

        They are at most a part. Evicts nothing that was used since `spares`.
        Returns how many bytes were missing. Cancelling stops what nobody else wants.

        Raises:
            StoreError, NotKeptError: as for `wait_for`.
        """
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            raise NotKeptError
        brought = 0
        while (missing := file.present.first_missing(start, stop)) is not None:
            download = self.find(file, missing[0])
            if download is None:
                download = self._start(file, missing[0], self._free_until(file, *missing))
                download.spares = spares
            download.wanted += 1
            try:
                await download.ended()
            finally:
                download.unwant()
            if download.error is not None and not file.present.covers(*missing):
                raise download.error
            brought += min(stop, download.stop) - missing[0]
        return brought

    def want(self, file: CacheFile, start: int, stop: int) -> list[Download]:
        """Start or join what is missing of [start, stop) ahead of its use, in parts.

        The caller keeps the downloads and says `unwant` when it loses interest.
        """
        started = []
        at = start
        while (gap := file.present.first_missing(at, stop)) is not None:
            running = self.find(file, gap[0])
            if running is not None:
                running.wanted += 1
                started.append(running)
                at = running.stop
                continue
            part_stop = min(gap[1], gap[0] - gap[0] % PART + PART)
            part_stop = self._free_until(file, gap[0], part_stop)
            download = self._start(file, gap[0], part_stop)
            download.wanted = 1
            started.append(download)
            at = part_stop
        return started

    def find(self, file: CacheFile, offset: int) -> Download | None:
        """The download that will bring the byte at `offset`."""
        for download in file.downloads:
            is_ending = download.is_done or download.cancel_scope.cancel_called
            if download.position <= offset < download.stop and not is_ending:
                return download
        return None

    async def read_unkept(self, version: ObjectVersion, start: int, stop: int) -> bytearray:
        """Download the bytes [start, stop) into memory, past the cache.

        Raises:
            StoreError: as for `wait_for`.
        """
        async with self.unkept.taken(stop - start):
            data = bytearray(stop - start)

            def write(offset: int, chunk: memoryview) -> None:
                data[offset - start : offset - start + len(chunk)] = chunk

            await self._store.download(version, start, stop, write, in_loop=True)
        return data

    def describe(self) -> list[str]:
        """A line for each download that is under way."""
        return [download.describe() for download in self._running]

    def _demand(self, file: CacheFile, start: int, stop: int) -> Download:
        """Start the download that a reader waits for, with what lies behind its range."""
        least = BLOCK if start else FIRST_BYTES
        stop = -(-max(stop, start + least) // BLOCK) * BLOCK
        gap = file.present.first_missing(start, min(stop, file.size))
        assert gap is not None
        return self._start(file, start, self._free_until(file, *gap))

    def _free_until(self, file: CacheFile, start: int, stop: int) -> int:
        """Where the next download that is under way begins, `stop` at most."""
        return min([stop, *(other.start for other in file.downloads if other.start > start)])

    def _start(self, file: CacheFile, start: int, stop: int) -> Download:
        download = Download(file, start, stop, self._store.hurry)
        file.downloads.append(download)
        self._cache.pin_again(file)
        self._nursery.start_soon(self._run, download)
        return download

    async def _run(self, download: Download) -> None:
        """Bring one range in; its outcome is told to the waiters, never raised."""
        file = download.file
        self._running.add(download)
        error: Exception | None = NotKeptError()
        try:
            with download.cancel_scope:
                error = await self._bring(download)
        finally:
            self._running.discard(download)
            file.downloads.remove(download)
            download.finish(error)
            if download.wanted and file.is_complete and file.fd >= 0:
                self._cache.lingering.keep(file)
            self._cache.unpin(file)

    async def _bring(self, download: Download) -> Exception | None:
        file = download.file
        is_whole = download.stop - download.start == file.size
        if is_whole and self._cache.is_new(file) and not file.opening.locked():
            # The thread that brings a small file creates it as well: one wait less.
            file.opening.acquire_nowait()
            try:
                return await self._keep(download)
            finally:
                file.opening.release()
        if not await self._cache.ensure_open(file):
            return NotKeptError()
        return await self._keep(download)

    async def _keep(self, download: Download) -> Exception | None:
        size = download.stop - download.start
        if not await self._space.reserve(size, spares=download.spares):
            return NotKeptError()
        reserved = Reservation(self._space, size)
        try:
            await self._stream(download, Incoming(self._cache, self.pace, download, reserved))
        except OSError as error:
            # The cache disk, for the store raises nothing of this kind.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._cache.warn(error.strerror or "it is full")
            else:
                self._cache.refuse(download.file, error)
            return NotKeptError()
        except StoreError as error:
            return error
        finally:
            reserved.close()
        return None

    async def _stream(self, download: Download, incoming: Incoming) -> None:
        file = download.file
        while True:
            version = file.version
            assert version is not None
            try:
                await self._store.download(
                    version,
                    download.position,
                    download.stop,
                    incoming.write,
                    priority=download.urgency,
                    in_loop=self.pace.is_quick,
                )
                return
            except (NotFoundError, StaleVersionError):
                if file.version == version:
                    raise
                # It was renamed meanwhile: the rest is there under its new key.
            finally:
                # What has been written is noted before anybody lets go of the file.
                incoming.note()
