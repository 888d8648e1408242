"""Downloads into the cache: each range is downloaded once, however many readers wait for it.

A `Download` is one ranged GET into one cache file. All bytes before its position
have been written. A reader waits until the position passes the end of the bytes it
needs, so it is woken when they arrive and not when the whole range ends. If no running
download will bring a reader's bytes, the reader starts one; later readers join it.

A download is cancelled when its readers were cancelled and the prefetch that
wanted it was closed. The bytes that have arrived by then stay in the cache.

When the cache has no room or its disk fails, `wait_for` raises `NotKeptError`,
and the caller reads the bytes past the cache (`read_unkept`).

All of this belongs to the event loop; the store's engine writes large ranges in
threads of its own (`FileSink`).
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import trio

from fusefs.cache.cached_file import BLOCK, CacheFile, Rank
from fusefs.cache.disk import DiskLatency
from fusefs.cache.evictor import Evictor
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity.checksums import Sum, sums_of_bytes
from fusefs.cache.readahead.path_meter import DownloadMeter, PathMeter
from fusefs.cache.unkept import UnkeptBuffers
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import LARGE, NewFile, ObjectVersion, Priority, Source, read_bytes
from fusefs.telemetry.stalls import WaitCause, Work, stage

T = TypeVar("T")

# The least that the first read of a file downloads: most programs read on from there.
FIRST_BYTES = 1 << 20
# One GET of a sequential reader: long enough to make requests cheap, short
# enough for several to run in parallel.
PART = 8 << 20
# A peak of `Demand` is remembered at least this long, and at most twice as long.
DEMAND_PERIOD_S = 0.25


class NotKeptError(Exception):
    """The cache has no room or fails; the caller must read past the cache."""


@dataclass(slots=True, eq=False)
class Download:
    """The download of one range [start, stop) of one file.

    All bytes before `position` have arrived. `demanded` counts the waiting readers, `wanted` the
    interested prefetches and jobs. Unless a reader waits, the download evicts no file used at or
    after `keep_used_since` (seconds since the epoch; inf: no file is protected, -inf: only files of
    less value than one fetched ahead may be evicted). `on_end` is called at the download's end.
    The bytes before `waited_to` are those that readers have waited for.
    """

    file: CacheFile
    start: int
    stop: int
    keep_used_since: float = math.inf
    on_end: Callable[[Download], None] | None = None
    position: int = field(init=False)
    waited_to: int = field(init=False)
    since: float = field(default_factory=time.monotonic)
    demanded: int = 0
    wanted: int = 0
    is_done: bool = False
    work: Work = field(default_factory=Work)
    error: Exception | None = None
    cancel_scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _waiters: list[tuple[int, trio.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.position = self.waited_to = self.start

    def advance(self, position: int) -> None:
        """Record that all bytes before `position` are in the file; wake their readers."""
        self.position = position
        if self._waiters:
            reached = [event for needed, event in self._waiters if needed <= position]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > position]
            for event in reached:
                event.set()

    def finish(self, error: Exception | None) -> None:
        """Mark the download as ended and wake all readers, which raise `error` unless None."""
        self.error = error
        self.is_done = True
        for _, event in self._waiters:
            event.set()
        self._waiters = []
        if self.on_end is not None:
            self.on_end(self)

    async def reach(self, position: int) -> None:
        """Wait until the bytes before `position` have arrived, or the download has ended."""
        if not self.is_done:
            event = trio.Event()
            self._waiters.append((position, event))
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
        """Subtract a prefetch or job from `wanted`; cancel the download if nothing wants it now."""
        self.wanted -= 1
        self.cancel_if_unwanted()

    def cancel_if_unwanted(self) -> None:
        if not self.demanded and not self.wanted and not self.is_done:
            self.cancel_scope.cancel()


class Demand:
    """Counts the downloads that readers wait for. `clock` gives monotonic seconds.

    A busy daemon sees only some of its readers wait at any moment, because it has not received the
    other readers' requests yet. The recent peak shows the real number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._since = clock()
        # The highest `count` of this period, and of the period before.
        self._most = self._most_before = 0

    def change(self, by: int) -> None:
        """Add `by`, which may be negative, to the number of downloads that readers wait for."""
        self.count += by
        self._begin_period()
        self._most = max(self._most, self.count)

    @property
    def peak(self) -> int:
        """The highest recent number of downloads that readers waited for at a time."""
        self._begin_period()
        return max(self._most, self._most_before)

    def _begin_period(self) -> None:
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= DEMAND_PERIOD_S:
            self._most_before = self._most if passed_s < 2 * DEMAND_PERIOD_S else self.count
            self._most = self.count
            self._since = now


class Downloader:
    """All downloads of one mount; they run in `nursery`.

    Reads past the cache take at most `unkept` bytes of memory. `most_parts` bounds the
    width of the path (path_meter.py); at most `most_small` small files are fetched ahead of readers
    at a time. If `source` includes a cluster cache, `on_fetched` is called with a pinned file and
    the range that a download has brought, even if the download was cancelled, as its last reader
    may have left between the last byte and the end.
    """

    def __init__(
        self,
        source: Source,
        evictor: Evictor,
        nursery: trio.Nursery,
        *,
        unkept: int = 64 << 20,
        most_parts: int = 32,
        most_small: int = 32,
        on_fetched: Callable[[CacheFile, int, int], None] | None = None,
    ) -> None:
        self.path = PathMeter(most_parts, PART)
        self.most_small = most_small
        self.unkept = UnkeptBuffers(unkept)
        self.disk_latency = DiskLatency()
        self._source = source
        self._cache = evictor.cache
        self._evictor = evictor
        self.nursery = nursery
        self.demand = Demand()
        # True if a successful download proves that the version is current in the bucket.
        self.proves_versions = on_fetched is None
        self._on_fetched = on_fetched
        # The bytes that readers have waited for, which were not fetched early enough.
        self.waited_bytes = 0
        # The running downloads by file.
        self._of: dict[CacheFile, list[Download]] = {}

    @property
    def under_way(self) -> int:
        """The number of downloads under way."""
        return sum(map(len, self._of.values()))

    @property
    def room(self) -> int:
        """The size in bytes to which the cache may grow now (`Quota.limit`)."""
        return self._cache.quota.limit

    async def wait_for(self, file: CacheFile, start: int, stop: int) -> None:
        """Wait until the bytes [start, stop) are in the file, which the caller has pinned.

        Starts or joins downloads of the missing bytes. If the caller is cancelled,
        a download that nothing else wants is cancelled, too.

        Raises:
            StaleVersionError: the object in the bucket is no longer this version.
            StoreError: S3 could not serve the range; `.errno` is the answer to the program.
            NotKeptError: the cache has no room for the bytes, or its disk fails.
        """
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            raise NotKeptError
        while (missing := file.present.first_missing(start, stop)) is not None:
            running = self.find(file, missing[0])
            download = running or self._demand(file, *missing)
            until = min(stop, download.stop)
            self.waited_bytes += max(0, until - max(missing[0], download.waited_to))
            download.waited_to = max(download.waited_to, until)
            await self._wait(download, until, is_new=running is None)
            if download.error is not None and not file.present.covers(*missing):
                raise download.error

    async def _wait(self, download: Download, position: int, *, is_new: bool) -> None:
        """Wait as a reader until `download` (just begun if `is_new`) has reached `position`."""
        download.demanded += 1
        if download.demanded == 1:
            self.demand.change(1)
            if not is_new:
                self._source.hurry()  # the download may wait for a connection at low priority
        download.work.wait(1)
        is_cancelled = True
        try:
            await download.reach(position)
            is_cancelled = False
        finally:
            download.work.wait(-1)
            download.demanded -= 1
            if not download.demanded:
                self.demand.change(-1)
            if is_cancelled:
                download.cancel_if_unwanted()

    async def fill(self, file: CacheFile, start: int, stop: int, keep_used_since: float) -> int:
        """Download the missing bytes of [start, stop) of a pinned file, at low priority.

        The range is at most a `PART`. No file that was used at or after `keep_used_since`
        (seconds since the epoch) is evicted. Returns how many bytes were missing. If the caller
        is cancelled, downloads that nothing else wants are cancelled, too.

        Raises:
            StoreError, NotKeptError: as for `wait_for`.
        """
        brought = await self._fill(file, start, stop, keep_used_since)
        file.first_read(start, stop)  # so that the bytes do not count as fetched but unread
        return brought

    async def _fill(self, file: CacheFile, start: int, stop: int, keep_used_since: float) -> int:
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            raise NotKeptError
        brought = 0
        while (missing := file.present.first_missing(start, stop)) is not None:
            download = self.find(file, missing[0])
            if download is None:
                until = self._free_until(file, *missing)
                download = self._start(Download(file, missing[0], until, keep_used_since))
            # Files that may be evicted for this job or an earlier one may be evicted now.
            download.keep_used_since = max(keep_used_since, download.keep_used_since)
            download.wanted += 1
            try:
                await download.reach(download.stop + 1)
            finally:
                download.unwant()
            if download.error is not None and not file.present.covers(*missing):
                raise download.error
            brought += min(stop, download.stop) - missing[0]
        return brought

    async def fill_all(self, file: CacheFile) -> None:
        """Download a file's missing parts at low priority, `path.width` parts at a time.

        Stops at the first part that fails; the reader of that part gets the error itself.
        """
        self._cache.pin_again(file)
        turns = trio.Semaphore(self.path.width)

        async def fill(start: int) -> None:
            try:
                await self._fill(file, start, min(start + PART, file.size), math.inf)
            except (StoreError, NotKeptError):
                nursery.cancel_scope.cancel()
            turns.release()

        try:
            async with trio.open_nursery() as nursery:
                for start in range(0, file.size, PART):
                    if not file.present.covers(start, min(start + PART, file.size)):
                        await turns.acquire()
                        nursery.start_soon(fill, start)
        finally:
            self._cache.unpin(file)

    def want(
        self,
        file: CacheFile,
        start: int,
        stop: int,
        on_end: Callable[[Download], None] | None = None,
    ) -> list[Download]:
        """Start or join downloads of the missing parts of [start, stop); return the downloads.

        Stops early if the cache has no room for a file that was not opened yet. The caller must
        call `unwant` on each download. `on_end` is called when a download started here has ended.
        """
        started = []
        at = start
        while (gap := file.present.first_missing(at, stop)) is not None:
            if (running := self.find(file, gap[0])) is not None:
                running.wanted += 1
                started.append(running)
                at = running.stop
                continue
            part_stop = min(gap[1], gap[0] - gap[0] % PART + PART)
            part_stop = self._free_until(file, gap[0], part_stop)
            if not self._cache.order.fetch_ahead(file):
                break
            since = -math.inf if file.rank is Rank.AHEAD else math.inf
            download = self._start(Download(file, gap[0], part_stop, since, on_end))
            download.wanted = 1
            started.append(download)
            at = part_stop
        return started

    def find(self, file: CacheFile, offset: int) -> Download | None:
        """The running download that will bring the byte at `offset`, or None."""
        for download in self._of.get(file, ()):
            is_ending = download.is_done or download.cancel_scope.cancel_called
            if download.position <= offset < download.stop and not is_ending:
                return download
        return None

    async def read_unkept(self, version: ObjectVersion, start: int, stop: int) -> bytearray:
        """Download the bytes [start, stop) into memory, past the cache; raises StoreError."""
        async with self.unkept.taken(stop - start):
            return await read_bytes(self._source, version, start, stop)

    def describe(self) -> list[str]:
        """Describe each running download in one line."""
        return [download.describe() for running in self._of.values() for download in running]

    def _demand(self, file: CacheFile, start: int, stop: int) -> Download:
        """Start to download [start, stop) for a waiting reader, extended to a minimum size."""
        least = BLOCK if start else FIRST_BYTES
        stop = -(-max(stop, start + least) // BLOCK) * BLOCK
        gap = file.present.first_missing(start, min(stop, file.size))
        assert gap is not None
        return self._start(Download(file, start, self._free_until(file, *gap)))

    def _free_until(self, file: CacheFile, start: int, stop: int) -> int:
        """The start of the next running download after `start`, at most `stop`."""
        return min(
            [stop, *(other.start for other in self._of.get(file, ()) if other.start > start)]
        )

    def _start(self, download: Download) -> Download:
        file = download.file
        file.downloads += 1
        self._of.setdefault(file, []).append(download)
        self._cache.pin_again(file)
        self.nursery.start_soon(self._run, download)
        return download

    async def _run(self, download: Download) -> None:
        """Run a download to its end; never raises its error, which its waiters raise."""
        file = download.file
        error: Exception | None = NotKeptError()
        download.work.begin()
        try:
            with download.cancel_scope:
                await self._bring(download)
                error = None
        except NotKeptError:
            pass  # as `error` says
        except StoreError as failure:
            error = replace(failure)  # without a traceback, which would keep this frame
        finally:
            file.downloads -= 1
            self._of[file].remove(download)
            if not file.downloads:
                del self._of[file]
            download.finish(error)
            if self._on_fetched is not None and download.position > download.start:
                self._on_fetched(file, download.start, download.position)
            if download.wanted and file.last_use is None and file.is_complete and file.fd >= 0:
                # Then the file's first open does not wait for the disk.
                self._cache.keep_open(file, self.nursery)
            self._cache.unpin(file)

    async def _bring(self, download: Download) -> None:
        file = download.file
        is_whole = download.stop - download.start == file.size
        if is_whole and self._cache.is_new(file) and not file.opening.locked():
            # The download of a small file also creates it, which saves one wait.
            file.opening.acquire_nowait()
            try:
                await self._keep(download)
            finally:
                file.opening.release()
        elif not await self._cache.ensure_open(file):
            raise NotKeptError
        elif not file.present.covers(download.position, download.stop):
            await self._keep(download)
        # Else the catalog knew the file, which was not in memory.

    async def _keep(self, download: Download) -> None:
        size = download.stop - download.start
        refused: float | None = None
        while (since := math.inf if download.demanded else download.keep_used_since) != refused:
            if await self._evictor.reserve(size, keep_used_since=since):
                break
            refused = since  # a reader or job may join, for which more files may be evicted
        else:
            raise NotKeptError
        try:
            with DownloadMeter(self.path, size) as meter:
                sink = FileSink(self._cache, self.disk_latency, meter, download)
                await self._stream(download, sink)
        except OSError as error:
            # An error of the cache disk: the store raises no OSError.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._cache.warn(error.strerror or "it is full")
            else:
                self._cache.disable(download.file, error)
            raise NotKeptError from error
        finally:
            self._cache.quota.release(download.stop - download.position)

    async def _stream(self, download: Download, sink: FileSink) -> None:
        file = download.file
        while True:
            version = file.version
            assert version is not None
            try:
                start, stop = download.position, download.stop
                await self._source.download(version, start, stop, sink, priority=download.urgency)
                return
            except (NotFoundError, StaleVersionError):
                if file.version == version:
                    raise
                # The object was renamed meanwhile: fetch the rest from its new key.


class FileSink:
    """Writes one download into its cache file (see `fusefs.store.interface.Sink`).

    The sink is also the `NewFile` that creates the cache file of a small object.
    """

    def __init__(
        self, cache: FileCache, latency: DiskLatency, meter: DownloadMeter, download: Download
    ) -> None:
        self._cache = cache
        self._latency = latency
        self._meter = meter
        self._download = download
        self._opening = trio.Lock()  # two sources may bring the first bytes

    async def open(self) -> int | NewFile:
        start, stop, file = self._download.start, self._download.stop, self._download.file
        is_new = file.fd < 0 and start == 0 and stop == file.size <= LARGE
        return self if is_new else await self._descriptor()

    def new_path(self) -> str:
        return self._cache.disk.new_path(self._download.file.name)

    def created(self, path: str, fd: int) -> int:
        file = self._download.file
        if file.fd < 0:
            self._cache.set_open(file, self._cache.disk.created(path, fd))
        else:  # another source has begun to bring the same bytes
            try:
                os.pwrite(file.fd, os.pread(fd, file.size, 0), 0)
            finally:
                os.close(fd)
                os.unlink(path)
        return file.fd

    async def _descriptor(self) -> int:
        file = self._download.file
        if file.fd < 0:
            async with self._opening:
                if file.fd < 0:
                    create = partial(self._cache.disk.create, file.name, file.size)
                    self._cache.set_open(file, await self._on_disk(create))
        return file.fd

    async def write(self, offset: int, data: memoryview) -> None:
        fd = await self._descriptor()

        def write() -> None:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)

        await self._on_disk(write)
        self.arrived(offset + len(data), sums_of_bytes(data, offset))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Do a small disk operation in the event loop if the disk is quick, else in a thread."""
        with stage(WaitCause.CACHE_DISK):
            if self._latency.is_quick:
                return self._latency.timed(work, is_in_loop=True)
            return await trio.to_thread.run_sync(
                partial(self._latency.timed, work, is_in_loop=False)
            )

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        download = self._download
        size = max(0, stop - download.position)
        if size:
            self._meter.arrived(size)
            self._cache.quota.release(size)
        if size or sums:
            self._cache.arrived(download.file, stop - size, stop, [Sum(*one) for one in sums])
        if size:
            download.advance(stop)
