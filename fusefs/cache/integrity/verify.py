"""Compares cache files with the checksums of the bytes that were written to them.

A file that differs, or that the disk cannot read, is dropped: its version has no
cached copy any more, and the next reader downloads it again. Programs that have the
dropped file open for passthrough continue to read it. A file is never rewritten.

Ranges without a checksum (a killed process may not have written the last ones to
the catalog) count as right. The scrub computes their checksums, so that later
damage is noticed.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog import SUMS_PART, Catalog
from fusefs.cache.disk import Disk
from fusefs.cache.integrity import checksums
from fusefs.cache.integrity.checksums import BLOCK, Read, Sum
from fusefs.cache.integrity.direct_reader import DirectReader, is_lost
from fusefs.cache.ranges import RangeMap
from fusefs.store.checksum import crc32

logger = logging.getLogger("fusefs.cache")

# The event loop itself computes the sums of written files up to this size when they
# are closed: it takes 15 µs, and handing the work to a thread would take longer.
SUMMED_AT_ONCE = 128 << 10
# The latest faults that `fusefs status` names.
MOST_NAMED = 10


class Integrity:
    """Compares the files of one cache with their checksums. Belongs to the event loop.

    `discard` drops a file from the cache, and `summed` stores checksums of bytes that had
    none. `differed` and `unreadable` count the dropped files by reason; `latest` describes
    the last `MOST_NAMED` of them.
    """

    def __init__(
        self,
        disk: Disk,
        catalog: Catalog,
        discard: Callable[[CacheFile], None],
        summed: Callable[[CacheFile, list[Sum]], None],
        threads: trio.CapacityLimiter,
    ) -> None:
        self._disk = disk
        self._catalog = catalog
        self._discard = discard
        self._summed = summed
        self._threads = threads
        # Files that were written by programs and have no checksums yet.
        self._written: list[CacheFile] = []
        self._has_written = trio.Event()
        # One thread is enough: programs that read files need the disk.
        self._examiners = trio.CapacityLimiter(1)
        self.differed = 0
        self.unreadable = 0
        self.latest: deque[str] = deque(maxlen=MOST_NAMED)

    def drop(self, file: CacheFile, fault: OSError | Sum) -> None:
        """Drop a file in which `fault` was found, and log the fault."""
        name = file.version.key if file.version is not None else file.name
        if isinstance(fault, Sum):
            self.differed += 1
            why = f"differs from what was stored, in the bytes {fault.start} to {fault.stop}"
        else:
            self.unreadable += 1
            why = f"can't be read from the cache disk ({fault.strerror})"
        self.latest.append(f"{name} {why}")
        logger.error(
            "%s: the cached copy %s; it is dropped, and fetched again from the bucket", name, why
        )
        self._discard(file)

    def sum_written(self, file: CacheFile, fd: int, crc: int | None = None) -> None:
        """Compute the sums of a file that a program wrote: now, or in `run` if the file is large.

        `crc` is the CRC32 of the whole file, if known.
        """
        if crc is not None and file.size <= BLOCK and file.is_complete:
            self._summed(file, [Sum(0, file.size, crc)])
            return
        if file.size <= SUMMED_AT_ONCE and file.is_complete:
            self._summed(file, checksums.sums_of(checksums.reader(fd), 0, file.size))
            return
        self._written.append(file)
        self._has_written.set()

    async def run(self) -> None:
        """Compute the checksums that `sum_written` has postponed, until cancelled."""
        while True:
            await self._has_written.wait()
            self._has_written = trio.Event()
            while self._written:
                await self.examine(self._written.pop())

    async def examine(
        self, file: CacheFile, *, is_direct: bool = False, rest: float = 0.0
    ) -> tuple[int, bool]:
        """Compare a whole file, and drop it if it differs; bytes without a checksum get one.

        Returns the number of compared bytes, and True if the whole file was compared and is right.
        With `is_direct` bytes are read from the disk, not from the page cache. After each part the
        call sleeps for `rest` times as long as the part took. Bytes that are downloaded meanwhile
        are skipped, and so is the rest of a file that is evicted or renamed.
        """
        generation, examined = file.generation, 0
        for start in range(0, file.size, SUMS_PART):
            present = file.present.part(start, start + SUMS_PART)
            if not present.total:
                continue
            pending = [
                sum_ for sum_ in file.sums or () if sum_.start // SUMS_PART == start // SUMS_PART
            ]
            place = (file.name, generation, file.st_ino)
            began = time.monotonic()
            examine_part = partial(self._examine_part, *place, start, present, pending, is_direct)
            outcome = await trio.to_thread.run_sync(examine_part, limiter=self._examiners)
            if outcome is None or file.generation != generation or not file.is_kept:
                return examined, False
            fault, new = outcome
            examined += present.total
            if fault is not None:
                self.drop(file, fault)
                return examined, False
            if new:
                self._summed(file, new)
            if rest:
                await trio.sleep(rest * (time.monotonic() - began))
        return examined, True

    def _examine_part(
        self,
        name: str,
        generation: str,
        st_ino: int,
        start: int,
        present: RangeMap,
        pending: list[Sum],
        is_direct: bool,
    ) -> tuple[OSError | Sum | None, list[Sum]] | None:
        sums = sums_in(self._catalog, st_ino, generation, pending, start, start + SUMS_PART)
        try:
            file = DirectReader(self._disk.path(name, generation), is_direct=is_direct)
        except OSError as error:
            # If not lost, the file may have been evicted or renamed.
            return (error, []) if is_lost(error) else None
        try:
            return examine(file.read, sums, present)
        finally:
            file.close()

    async def is_on_disk(self, file: CacheFile) -> bool:
        """True if a file still exists; another mount may have evicted it."""
        place = (file.name, file.generation, file.st_ino)
        return await trio.to_thread.run_sync(self._disk.has_inode, *place, limiter=self._threads)

    async def copy(self, file: CacheFile, target: int, start: int, stop: int) -> bool:
        """Copy the bytes [start, stop) of a pinned, open file to the descriptor `target`.

        Returns False if some bytes are missing, unreadable or wrong; `target` may then have
        some bytes of the copy. A file whose bytes are wrong or lost on the disk is dropped.

        Raises:
            OSError: `target` can't be written.
        """

        def put(data: memoryview, at: int) -> None:
            while data:
                count = os.pwrite(target, data, at)
                data, at = data[count:], at + count

        return await self._pass_on(file, put, start, stop)

    async def read(self, file: CacheFile, start: int, stop: int) -> bytearray | None:
        """Read the bytes [start, stop) of a pinned, open file and compare their checksums.

        Returns None if some bytes are missing, can't be read now or have no checksum yet, or if
        some are lost on the disk or wrong; in the last two cases the file is dropped.
        """
        content = bytearray()

        def put(data: memoryview, at: int) -> None:
            nonlocal content
            if not content:
                content = bytearray(stop - start)  # in the thread, as it takes milliseconds
            content[at - start : at - start + len(data)] = data

        return content if await self._pass_on(file, put, start, stop, only_summed=True) else None

    async def _pass_on(
        self,
        file: CacheFile,
        put: Callable[[memoryview, int], None],
        start: int,
        stop: int,
        *,
        only_summed: bool = False,
    ) -> bool:
        run = file.present.run_at(start)
        if run is None or run[1] < stop:
            return False
        pending = [sum_ for sum_ in file.sums or () if checksums.is_within(sum_, start, stop)]
        place = (file.st_ino, file.generation)
        # Not `file.present`, which the event loop changes meanwhile.
        wanted = RangeMap(iter([(start, stop)]))

        def work() -> OSError | Sum | None:
            sums = sums_in(self._catalog, *place, pending, start, stop)
            if only_summed and any(checksums.unsummed(wanted, sums)):
                return OSError(errno.EAGAIN, "there is no checksum of it")
            return _copy(file.fd, put, sums, run, start, stop)

        fault = await trio.to_thread.run_sync(work, limiter=self._threads)
        if (file.st_ino, file.generation) != place:
            return False  # evicted, or taken out to be written to
        if isinstance(fault, Sum) or (fault is not None and is_lost(fault)):
            self.drop(file, fault)
        return fault is None


def sums_in(
    catalog: Catalog, st_ino: int, generation: str, pending: list[Sum], start: int, stop: int
) -> list[Sum]:
    """Join `pending` and, if readable, the catalog's checksums of [start, stop). Blocks."""
    try:
        recorded = catalog.sums(st_ino, generation, start, stop)
    except sqlite3.Error as error:
        logger.warning("checksums can't be read: %s", error)
        recorded = []
    return checksums.merged([*recorded, *pending])


def examine(
    read: Read, sums: list[Sum], present: RangeMap
) -> tuple[OSError | Sum | None, list[Sum]]:
    """Compare a file with `sums`; return a fault or None, and sums of bytes without one. Blocks.

    A fault is a sum that does not match its bytes, or the disk's error.
    """
    try:
        if (fault := checksums.first_wrong(read, sums, present)) is not None:
            return fault, []
        ranges = list(checksums.unsummed(present, sums))
        return None, [sum_ for gap in ranges for sum_ in checksums.sums_of(read, *gap)]
    except OSError as error:
        return (error if is_lost(error) else None), []


def _copy(
    source: int,
    put: Callable[[memoryview, int], None],
    sums: list[Sum],
    run: tuple[int, int],
    start: int,
    stop: int,
) -> OSError | Sum | None:
    """Pass the bytes [start, stop) of a file to `put` in pieces; return the first fault or None.

    `run` is the present range around the bytes: checksums that reach beyond `run` are not used.
    """
    for first, last, crc in _pieces(sums, run, start, stop):
        try:
            data = os.pread(source, last - first, first)
        except OSError as error:
            return error
        if len(data) < last - first:
            return OSError(errno.EIO, "the cache file is too short")
        view = memoryview(data)
        if crc is not None and crc32(view) != crc:
            return Sum(first, last, crc)
        view = view[max(0, start - first) : stop - first]
        put(view, max(start, first))
    return None


def _pieces(
    sums: list[Sum], run: tuple[int, int], start: int, stop: int
) -> Iterator[tuple[int, int, int | None]]:
    """Yield reads (first, last, CRC32 if known) that check [start, stop); `run` is present."""
    present = RangeMap(iter([run]))
    usable = [sum_ for sum_ in sums if present.covers(sum_.start, sum_.stop)]
    yield from usable
    for first, last in checksums.unsummed(RangeMap(iter([(start, stop)])), usable):
        for at in range(first, last, BLOCK):
            yield at, min(at + BLOCK, last), None
