"""Downloads into the cache: each range is downloaded once, however many readers wait for it.

A `Download` is one ranged GET into one cache file. It has a position, and
everything before that has been written; a reader waits for the position to
pass the end of what it needs, so it is woken when its bytes arrive and not
when the range ends. A reader that needs bytes which no download will bring
starts one; the next readers join it.

A download ends early when its readers were cancelled and the prefetch that
wanted it has been closed. What arrived until then is kept.

When the cache has no room or its disk fails, `wait_for` raises `NotKeptError`,
and the bytes are read without being kept (`read_unkept`).

All of this belongs to the event loop; large ranges are written by the store's engine in
threads of its own (`FileSink`).
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from fusefs.cache.cached_file import CacheFile, Rank
from fusefs.cache.disk import DiskLatency
from fusefs.cache.evictor import Evictor
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity.checksums import Sum, sums_of_bytes
from fusefs.cache.quota import Quota
from fusefs.cache.readahead.demand import Demand
from fusefs.cache.readahead.path_meter import DownloadMeter, PathMeter
from fusefs.cache.unkept import UnkeptBuffers
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import LARGE, BytesSink, NewFile, ObjectVersion, Priority, Source
from fusefs.telemetry.stalls import WaitCause, Work, stage

T = TypeVar("T")

# What a random read brings at least: a request costs as much time as this many
# bytes, so less would save nothing, and more would be wasted on a jumping reader.
BLOCK = 256 << 10
# What the first read of a file brings: most readers of the beginning go on.
FIRST_BYTES = 1 << 20
# One GET of a sequential reader: long enough to make requests cheap, short
# enough for several to run side by side.
PART = 8 << 20


class NotKeptError(Exception):
    """The cache cannot take the bytes: read them without it."""


class Download:
    """One range [start, stop) of one file that is being downloaded.

    `position` is up to where bytes have arrived; `demanded` counts the readers
    that wait, `wanted` the prefetches and jobs that are interested. For jobs what was
    used since `keep_used_since`, in seconds since the epoch, is not evicted. `on_end`
    is called when it has ended, `note_demand` with 1 when the first reader waits for it and
    with -1 when none does any more.
    """

    __slots__ = (
        "_note_demand",
        "_waiters",
        "cancel_scope",
        "demanded",
        "error",
        "file",
        "is_done",
        "keep_used_since",
        "on_end",
        "position",
        "since",
        "start",
        "stop",
        "waited_to",
        "wanted",
        "work",
    )

    def __init__(
        self, file: CacheFile, start: int, stop: int, note_demand: Callable[[int], None]
    ) -> None:
        self.file = file
        self._note_demand = note_demand
        self.start = start
        self.stop = stop
        self.position = self.waited_to = start
        self.since = time.monotonic()
        self.keep_used_since: float | None = None
        self.demanded = 0
        self.wanted = 0
        self.is_done = False
        self.work = Work()
        self.error: Exception | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.cancel_scope = trio.CancelScope()
        self._waiters: list[tuple[int, trio.Event]] = []

    def join(self, keep_used_since: float) -> None:
        """A job wants it as well: what may be evicted for either is evicted for it."""
        self.keep_used_since = max(keep_used_since, self._kept_since())

    def kept_since(self) -> float:
        """The time since when used files are not evicted for it, in seconds since the epoch.

        -inf: it is fetched ahead, and has the room that there is for that alone.
        """
        return math.inf if self.demanded else self._kept_since()

    def _kept_since(self) -> float:
        """As `kept_since`, without those that wait for it."""
        if self.keep_used_since is not None:
            return self.keep_used_since
        return -math.inf if self.file.rank is Rank.AHEAD else math.inf

    def advance(self, position: int) -> None:
        """Wake the readers whose bytes lie before `position`: all before it is in the file."""
        self.position = position
        if self._waiters:
            reached = [event for needed, event in self._waiters if needed <= position]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > position]
            for event in reached:
                event.set()

    def finish(self, error: Exception | None) -> None:
        """End the download and wake all readers; with an error they raise it."""
        self.error = error
        self.is_done = True
        for _, event in self._waiters:
            event.set()
        self._waiters = []
        self.on_end()

    def note_wait(self, start: int, stop: int) -> int:
        """A reader waits for [start, stop); return how many bytes none has waited for so far."""
        new = max(0, stop - max(start, self.waited_to))
        self.waited_to = max(self.waited_to, stop)
        return new

    async def reach(self, position: int) -> None:
        """Wait until the bytes before `position` have arrived, or the download has ended.

        Cancelling the caller stops the download unless others want it.
        """
        event = trio.Event()
        self._waiters.append((position, event))
        self.demanded += 1
        if self.demanded == 1:
            self._note_demand(1)
        self.work.wait(1)
        try:
            await event.wait()
        except trio.Cancelled:
            self._leave()
            self._stop_if_unwanted()
            raise
        finally:
            self.work.wait(-1)
        self._leave()

    def _leave(self) -> None:
        self.demanded -= 1
        if not self.demanded:
            self._note_demand(-1)

    async def ended(self) -> None:
        """Wait until the download has ended, without raising its priority."""
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
        """End the interest of a prefetch; a download that is not wanted by others is stopped."""
        self.wanted -= 1
        self._stop_if_unwanted()

    def _stop_if_unwanted(self) -> None:
        if not self.demanded and not self.wanted and not self.is_done:
            self.cancel_scope.cancel()


class Downloader:
    """All downloads of one mount; they run in `nursery`.

    What is read past the cache takes at most `unkept` bytes of memory. Ahead of
    their readers at most `most_parts` parts of large files and `most_small` small
    files are to be under way. Where the `source` is a cluster cache as well, `on_fetched` is
    called with a pinned file and the range that a download has brought, also of one that was
    cancelled: its last reader may have left between the last byte and the end.
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
        self._nursery = nursery
        self._running: set[Download] = set()
        self.demand = Demand()
        # Whether what a download brings shows that the version is the current one.
        self.proves_versions = on_fetched is None
        self._on_fetched = on_fetched
        # What readers have waited for, and so was not fetched ahead of them.
        self.waited_bytes = 0
        # The downloads of each file that has any.
        self._of: dict[CacheFile, list[Download]] = {}

    @property
    def under_way(self) -> int:
        """The number of downloads under way."""
        return len(self._running)

    @property
    def room(self) -> int:
        """The number of bytes that the cache may use now."""
        return self._cache.quota.limit

    def in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` beside the downloads, and end it with them."""
        self._nursery.start_soon(work)

    async def wait_for(self, file: CacheFile, start: int, stop: int) -> None:
        """Return once the bytes [start, stop) are in the file, which the caller has pinned.

        Starts or joins the downloads that are missing. Cancelling the caller
        leaves them running for other readers, and stops them if there are none.

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
            until = min(stop, download.stop)
            self.waited_bytes += download.note_wait(missing[0], until)
            await download.reach(until)
            if download.error is not None and not file.present.covers(*missing):
                raise download.error

    async def fill(self, file: CacheFile, start: int, stop: int, keep_used_since: float) -> int:
        """Download what is missing of [start, stop) in a pinned file, at low priority.

        The range is at most a part. Evicts nothing that was used since
        `keep_used_since`, in seconds since the epoch. Returns how many bytes were
        missing. Cancelling stops the downloads that are not wanted by others.

        Raises:
            StoreError, NotKeptError: as for `wait_for`.
        """
        brought = await self._fill(file, start, stop, keep_used_since)
        file.first_read(start, stop)  # its first reader finds it in the cache
        return brought

    async def _fill(self, file: CacheFile, start: int, stop: int, keep_used_since: float) -> int:
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            raise NotKeptError
        brought = 0
        while (missing := file.present.first_missing(start, stop)) is not None:
            download = self.find(file, missing[0])
            if download is None:
                download = self._start(file, missing[0], self._free_until(file, *missing))
                download.keep_used_since = keep_used_since
            else:
                download.join(keep_used_since)
            download.wanted += 1
            try:
                await download.ended()
            finally:
                download.unwant()
            if download.error is not None and not file.present.covers(*missing):
                raise download.error
            brought += min(stop, download.stop) - missing[0]
        return brought

    async def fill_all(self, file: CacheFile) -> None:
        """Download what a file lacks, at low priority, as many parts at a time as the path bears.

        Ends early where a part can't be had: its reader gets the error.
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

    def want(self, file: CacheFile, start: int, stop: int) -> list[Download]:
        """Start or join what is missing of [start, stop) ahead of its use, in parts.

        For a file that was not opened yet there may be no room in the cache.
        The caller keeps the downloads and calls `unwant` when it loses interest.
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
            if not self._cache.fetch_ahead(file):
                break
            download = self._start(file, gap[0], part_stop)
            download.wanted = 1
            started.append(download)
            at = part_stop
        return started

    def find(self, file: CacheFile, offset: int) -> Download | None:
        """The download that will bring the byte at `offset`."""
        for download in self._of.get(file, ()):
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
            sink = BytesSink(start, stop - start)
            await self._source.download(version, start, stop, sink)
        return sink.data

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
        """The offset where the next download that is under way begins, `stop` at most."""
        return min(
            [stop, *(other.start for other in self._of.get(file, ()) if other.start > start)]
        )

    def _start(self, file: CacheFile, start: int, stop: int) -> Download:
        download = Download(file, start, stop, self._note_demand)
        file.downloads += 1
        self._of.setdefault(file, []).append(download)
        self._cache.pin_again(file)
        self._nursery.start_soon(self._run, download)
        return download

    def _note_demand(self, change: int) -> None:
        self.demand.change(change)
        if change > 0:
            self._source.hurry()

    async def _run(self, download: Download) -> None:
        """Bring one range in; its error is raised by the waiters, never here."""
        file = download.file
        self._running.add(download)
        error: Exception | None = NotKeptError()
        download.work.begin()
        try:
            with download.cancel_scope:
                error = await self._bring(download)
        finally:
            self._running.discard(download)
            file.downloads -= 1
            self._of[file].remove(download)
            if not file.downloads:
                del self._of[file]
            download.finish(error)
            if self._on_fetched is not None and download.position > download.start:
                self._on_fetched(file, download.start, download.position)
            if download.wanted and file.last_use is None and file.is_complete and file.fd >= 0:
                self._cache.keep_open(file)  # its first open is spared the wait for the disk
            self._cache.unpin(file)

    async def _bring(self, download: Download) -> Exception | None:
        file = download.file
        is_whole = download.stop - download.start == file.size
        if is_whole and self._cache.is_new(file) and not file.opening.locked():
            # What brings a small file creates it as well: one wait less.
            file.opening.acquire_nowait()
            try:
                return await self._keep(download)
            finally:
                file.opening.release()
        if not await self._cache.ensure_open(file):
            return NotKeptError()
        if file.present.covers(download.position, download.stop):
            return None  # the catalog knew the file, which was not in memory
        return await self._keep(download)

    async def _keep(self, download: Download) -> Exception | None:
        size = download.stop - download.start
        if not await self._reserve(download, size):
            return NotKeptError()
        reservation = Reservation(self._cache.quota, size)
        try:
            with self.path.download(size) as meter:
                sink = FileSink(self._cache, self.disk_latency, meter, download, reservation)
                await self._stream(download, sink)
        except OSError as error:
            # The cache disk, for the store raises no OSError.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._cache.warn(error.strerror or "it is full")
            else:
                self._cache.disable(download.file, error)
            return NotKeptError()
        except StoreError as error:
            return error
        finally:
            reservation.close()
        return None

    async def _reserve(self, download: Download, size: int) -> bool:
        since = download.kept_since()
        while not await self._evictor.reserve(
            size, keep_used_since=since, is_ahead=since == -math.inf
        ):
            refused, since = since, download.kept_since()
            if since <= refused:
                return False
            # A reader or a job has joined it meanwhile, for which more is evicted.
        return True

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
                # It was renamed meanwhile: the bucket has the rest under its new key.


class FileSink:
    """The destination of one download: its cache file (see `fusefs.store.interface.Sink`).

    It is a `NewFile` for a small object of which there is no file yet.
    """

    def __init__(
        self,
        cache: FileCache,
        latency: DiskLatency,
        meter: DownloadMeter,
        download: Download,
        reservation: Reservation,
    ) -> None:
        self._cache = cache
        self._latency = latency
        self._meter = meter
        self._download = download
        self._reservation = reservation
        self._opening = trio.Lock()  # two sources may bring the first bytes

    async def open(self) -> int | NewFile:
        start, stop, file = self._download.start, self._download.stop, self._download.file
        is_new = file.fd < 0 and start == 0 and stop == file.size <= LARGE
        return self if is_new else await self._descriptor()

    def new_path(self) -> str:
        return self._cache.new_path(self._download.file)

    def created(self, path: str, fd: int) -> int:
        file = self._download.file
        if file.fd < 0:
            self._cache.created(file, path, fd)
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
                    created = await self._on_disk(lambda: self._cache.create(file))
                    self._cache.set_open(file, created)
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
        """Do something small with the disk: here if it is quick, else in a thread."""
        with stage(WaitCause.CACHE_DISK):
            is_in_loop = self._latency.is_quick
            if is_in_loop:
                return self._timed(work, is_in_loop=True)
            return await trio.to_thread.run_sync(lambda: self._timed(work, is_in_loop=False))

    def _timed(self, work: Callable[[], T], *, is_in_loop: bool) -> T:
        began = self._latency.begin()
        result = work()
        self._latency.end(began, is_in_loop=is_in_loop)
        return result

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        download = self._download
        size = max(0, stop - download.position)
        if size:
            self._meter.arrived(size)
            self._reservation.use(size)
        if size or sums:
            self._cache.arrived(download.file, stop - size, stop, [Sum(*one) for one in sums])
        if size:
            download.advance(stop)


class Reservation:
    """Bytes of the quota that are set aside for one download."""

    def __init__(self, quota: Quota, size: int) -> None:
        self._quota = quota
        self._remaining = size

    def use(self, size: int) -> None:
        """Take `size` bytes off the reservation: they are in the file now."""
        self._remaining -= size
        self._quota.release(size)

    def close(self) -> None:
        """Give back what was not used."""
        self.use(self._remaining)
