"""Finds cache files that the kernel reads by itself and the disk can't read.

The daemon does not learn of an error that a program gets from a file that is
open for passthrough. But such a program mostly opens the file again: so a file
that is opened again soon after its last close is tried first, as is, after an
error, each file before it is opened for passthrough.

To try a file is to read samples of it past the page cache. What a program has
read is in the page cache up to the place where reading failed, so the samples
are taken where the page cache ends, and at some places besides.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterator

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.direct_reader import DirectReader, is_lost
from fusefs.cache.integrity.verify import Integrity
from fusefs.telemetry.stalls import WaitCause, stage

# How soon after its last close an open may be another try of the same program.
AGAIN_WITHIN_S = 5.0
# The files that were closed last: a program that tries again opens few others meanwhile.
MOST_CLOSED = 16
# When more files than this have been tried, the first ones are forgotten.
MOST_TRIED = 4096
# A program may open one file again and again, which must not cost a probe each
# time: the next one comes after twenty times the time that the last one took.
SHARE = 20
LONGEST_PAUSE_S = 1.0
# After an error each file is tried this often.
ALARMED_EVERY_S = 60.0
SAMPLE = 64 << 10
# Files up to this size are read whole.
READ_WHOLE = 1 << 20
MOST_ENDS = 32
SPREAD = 16
# To see what is in the page cache takes a byte for each page.
MOST_MAPPED = 64 << 30

_PAGE = mmap.PAGESIZE


class ReadabilityCheck:
    """Tries files before the kernel reads them. Belongs to the event loop.

    `disable` has a version read past the cache.
    """

    def __init__(
        self, disk: Disk, integrity: Integrity, disable: Callable[[CacheFile, OSError], None]
    ) -> None:
        self._disk = disk
        self._integrity = integrity
        self._disable = disable
        # The names of files that could not be read once.
        self._failed: set[str] = set()
        self._threads = trio.CapacityLimiter(4)
        # When files were closed; when they were tried, and how long to wait until the
        # next time. In seconds of the monotonic clock.
        self.closed_at: dict[CacheFile, float] = {}
        self._tried: dict[CacheFile, tuple[float, float]] = {}

    def closed(self, file: CacheFile) -> None:
        """Note that a program has closed a file that the kernel read."""
        closed = self.closed_at
        closed.pop(file, None)
        closed[file] = time.monotonic()
        if len(closed) > MOST_CLOSED:
            del closed[next(iter(closed))]

    def is_due(self, file: CacheFile) -> bool:
        """Whether a file has to be tried before it is opened for passthrough."""
        if self._integrity.unreadable:
            at, _ = self._tried.get(file, (-math.inf, 0.0))
            return time.monotonic() - at > ALARMED_EVERY_S
        closed = self.closed_at.get(file)
        if closed is None:
            return False
        now = time.monotonic()
        at, pause_s = self._tried.get(file, (-math.inf, 0.0))
        return now - closed <= AGAIN_WITHIN_S and now - at > pause_s

    async def passes(self, file: CacheFile) -> bool:
        """Try a pinned file; return whether it can be read. If not, it leaves the cache."""
        began = time.monotonic()
        self._tried[file] = began, LONGEST_PAUSE_S
        name, generation = file.name, file.generation
        with stage(WaitCause.CACHE_DISK):
            fault = await trio.to_thread.run_sync(
                self._try, name, generation, file.size, limiter=self._threads
            )
        self._note(file, time.monotonic() - began)
        if file.generation != generation or not file.is_kept:
            return False
        if fault is None:
            return True
        if name in self._failed:
            # Fetched again, it can't be read either: do not keep it.
            self._disable(file, fault)
        else:
            self._failed.add(name)
            self._integrity.drop(file, fault)
        return False

    def _note(self, file: CacheFile, took_s: float) -> None:
        tried = self._tried
        tried.pop(file, None)
        tried[file] = time.monotonic(), min(SHARE * took_s, LONGEST_PAUSE_S)
        while len(tried) > MOST_TRIED:
            del tried[next(iter(tried))]

    def _try(self, name: str, generation: str, size: int) -> OSError | None:
        try:
            file = self._disk.open_to_examine(name, generation, is_direct=True)
        except OSError as error:
            return error if is_lost(error) else None  # it may have been renamed, too
        try:
            for offset in samples(file, size):
                file.read(min(SAMPLE, size - offset), offset)
        except OSError as error:
            return error if is_lost(error) else None
        finally:
            file.close()
        return None


def samples(file: DirectReader, size: int) -> Iterator[int]:
    """The offsets at which a file is read to find out whether it can be."""
    if size <= READ_WHOLE:
        yield from range(0, size, SAMPLE)
        return
    yield from _cache_ends(file, size)
    step = max(SAMPLE, size // SPREAD)
    yield from range(0, size, step)
    yield max(0, size - SAMPLE)


def _cache_ends(file: DirectReader, size: int) -> list[int]:
    """The offsets at which a run of pages in the page cache ends."""
    if size > MOST_MAPPED:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    integers = [ctypes.c_int] * 3
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *integers, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        return []
    try:
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        if libc.mincore(address, size, pages):
            return []
    finally:
        libc.munmap(address, size)
    ends, at, cached = [], 0, bytes(pages.raw)
    # The lowest bit of each byte says whether the page is there; the others are 0.
    if cached[:1] == b"\0":
        ends.append(0)
    while len(ends) < MOST_ENDS and (end := cached.find(b"\1\0", at)) >= 0:
        ends.append((end + 1) * _PAGE)
        at = end + 1
    return ends
