"""The filler: stores blocks from S3 in the cluster cache once they are whole on the local disk.

Each node stores the blocks that it has whole: two at a time, from the checked local copy, in the
background. While downloads are under way the filler rests after each block, and drops blocks that
exceed its queue. So its cost is bounded; the next node that reads a dropped block stores it. Only a
job that warms data waits until its blocks are stored.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.file_cache import FileCache
from fusefs.cluster_cache.block import BlockId, Domain, block_ids
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.cluster_cache.tier import ClusterTier, LookupOutcome, StoredState
from fusefs.store.errors import StoreError

logger = logging.getLogger("fusefs.cluster_cache")

AT_A_TIME = 2
JOBS_AT_A_TIME = 8
MOST_QUEUED = 4096
# While downloads are under way, storing takes this share of the machine's processors, estimated by
# its duration: without any rest, downloads on two processors lost 24 %.
SHARE = 0.03
# Shortest rest after a block, and after a small object, which costs the event loop 0.7 ms to store
# and a thread to read.
REST_S, SMALL_REST_S = 0.05, 0.2
MOST_REST_S = 10.0
# Downloads count as over after this time: between small files there are short gaps.
IDLE_S = 0.2
# Pause in seconds after a failure; it doubles with each further failure.
PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
# At most two larger blocks are in memory at a time, including those that jobs store.
SMALL = 1 << 20
SIGNED_HERE = 128 << 10


def rest_after(took_s: float, size: int, processors: int) -> float:
    """Return a worker's rest (s) after storing `size` bytes in `took_s`, to use SHARE of CPUs."""
    least_s = SMALL_REST_S if size <= SMALL else REST_S
    share = SHARE * processors / AT_A_TIME
    return min(max(least_s, took_s * (1 / share - 1)), MOST_REST_S)


class _Fill:
    """A block to be stored, from a cache file that has the whole block."""

    __slots__ = ("block", "done", "file", "outcome", "state")

    def __init__(self, file: CacheFile, block: BlockId, state: StoredState) -> None:
        self.file = file
        self.block = block
        self.state = state
        self.outcome = "dropped"
        self.done = trio.Event()

    @property
    def is_stored(self) -> bool:
        """True if the cluster cache has the block; valid once `done` is set."""
        return self.outcome in ("stored", "present")


class Filler:
    """Stores one mount's blocks in the cluster cache, from a queue. Belongs to the event loop.

    `is_busy` returns True during downloads. `counted` has the numbers of blocks that were `stored`,
    `present` (stored by another node), `lost` (the file was evicted), `dropped` and `failed`, and
    the bytes of the stored blocks.
    """

    def __init__(
        self,
        tier: ClusterTier,
        store: BlockBucket,
        domain: Domain,
        cache: FileCache,
        is_busy: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._store = store
        self._domain = domain
        self._cache = cache
        self._is_busy = is_busy
        self._busy_at = -math.inf
        self._processors = len(os.sched_getaffinity(0))
        self._queue: OrderedDict[BlockId, _Fill] = OrderedDict()
        self._under_way: dict[BlockId, _Fill] = {}
        self._has_work = trio.Event()
        self._job_slots = trio.Semaphore(JOBS_AT_A_TIME)
        self._large = trio.Semaphore(AT_A_TIME)
        self._paused_until = -math.inf
        self._failures = 0  # failures since the last success
        self.counted: Counter[str] = Counter()

    @property
    def queued(self) -> int:
        """The number of blocks that are still to be stored."""
        return len(self._queue) + len(self._under_way)

    def fetched(self, file: CacheFile, start: int, stop: int) -> None:
        """Queue blocks of `tier.missed` that are whole in `file` after a fetch of [start, stop)."""
        version, missed = file.version, self._tier.missed
        if version is None or not missed:
            return
        for block in block_ids(version, start, stop):
            if block in missed and file.present.covers(block.start, block.stop):
                self._add(file, block, missed.pop(block))
        while len(self._queue) > MOST_QUEUED:
            self._drop(self._queue.popitem(last=False)[1])

    def _add(self, file: CacheFile, block: BlockId, state: StoredState) -> None:
        queued = self._queue.get(block)
        if queued is not None and queued.file is file:
            # Two downloads brought parts of the block, and the first to end found it whole.
            queued.state = max(queued.state, state)
            return
        if queued is not None:  # the queued block's file has been evicted since
            self._drop(self._queue.pop(block))
        self._queue[block] = _Fill(file, block, state)
        self._has_work.set()

    def _drop(self, fill: _Fill) -> None:
        """Give up storing a block."""
        self.counted["dropped"] += 1
        fill.done.set()

    async def run(self) -> None:
        """Store queued blocks, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not self._queue:
                if self._has_work.is_set():
                    self._has_work = trio.Event()
                await self._has_work.wait()
            if trio.current_time() < self._paused_until:
                await trio.sleep_until(self._paused_until)
                continue
            _, fill = self._queue.popitem(last=False)
            begun = trio.current_time()
            await self._bring(fill)
            await self._rest(trio.current_time() - begun, fill.block)

    async def _rest(self, took_s: float, block: BlockId) -> None:
        """Rest after storing a block in `took_s` seconds, as long as downloads are under way."""
        now = trio.current_time()
        until = now + rest_after(took_s, block.stop - block.start, self._processors)
        while now < until:
            if self._is_busy():
                self._busy_at = now
            elif now - self._busy_at >= IDLE_S:
                return
            await trio.sleep(REST_S)
            now = trio.current_time()

    async def finish(self, file: CacheFile, start: int, stop: int) -> int:
        """Store queued blocks of [start, stop) of `file` now; return the count of failed blocks."""
        version, failed = file.version, 0
        if version is None:
            return 0
        await self._tier.tried.wait()
        for block in block_ids(version, start, stop):
            failed += not await self._finish(block)
        return failed

    async def _finish(self, block: BlockId) -> bool:
        """Store a block now if it is queued; return False if it could not be stored."""
        fill = self._under_way.get(block) or self._queue.get(block)
        if fill is None:
            return True
        if block not in self._under_way:
            async with self._job_slots:
                if block in self._queue and block not in self._under_way:
                    # Even while the breaker is open: bad blocks are to be replaced.
                    if not self._tier.is_open or trio.current_time() < self._paused_until:
                        return False
                    return await self._bring(self._queue.pop(block))
            # The filler or another job is storing the block, or the block was dropped.
            fill = self._under_way.get(block, fill)
        await fill.done.wait()
        return fill.is_stored

    async def _bring(self, fill: _Fill) -> bool:
        """Store one block; return True if the cluster cache has the block now."""
        block = fill.block
        if block in self._under_way:  # it was fetched again meanwhile
            self._drop(fill)
            return False
        self._under_way[block] = fill
        try:
            fill.outcome = await self._put(fill)
            if fill.is_stored:
                self._failures = 0
        except Exception as error:  # no exception may escape: S3 has the block anyway
            fill.outcome = "failed"
            self._note_failure(error)
        finally:
            self.counted[fill.outcome] += 1
            del self._under_way[block]
            fill.done.set()
        return fill.is_stored

    async def _put(self, fill: _Fill) -> str:
        block, overwrites = self._domain.named(fill.block), fill.state is StoredState.CORRUPT
        if fill.state is StoredState.DOUBTFUL:
            # The block is looked up again: storing every block that came late would be too much.
            outcome = await self._tier.retry_lookup(block)
            if outcome is LookupOutcome.HIT:
                return "present"
            overwrites = outcome not in (None, LookupOutcome.MISS)
        async with self._large if block.stop - block.start > SMALL else nullcontext():
            data = await self._read(fill)
            if data is None:
                return "lost"
            size, stored = len(data), partial(self._domain.stored, block, data)
            del data
            # In the event loop only small blocks are signed.
            body = stored() if size <= SIGNED_HERE else await trio.to_thread.run_sync(stored)
            del stored
            if not await self._store.put(block.name, body, overwrites=overwrites):
                return "present"
        self.counted["bytes_stored"] += size
        return "stored"

    async def _read(self, fill: _Fill) -> bytearray | None:
        """Return the block's checked bytes; None if the local cache no longer has all of them."""
        file, block = fill.file, fill.block
        if self._cache.find(block.version) is not file or not file.is_kept:
            return None
        self._cache.pin_again(file)
        try:
            if not await self._cache.ensure_open(file):
                return None
            return await self._cache.integrity.read(file, block.start, block.stop)
        finally:
            self._cache.unpin(file)

    def _note_failure(self, error: Exception) -> None:
        now = trio.current_time()
        if now >= self._paused_until:
            why = error.in_full if isinstance(error, StoreError) else repr(error)
            pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
            self._paused_until = now + pause_s
            logger.warning("nothing is stored in the cluster cache for %.0f s: %s", pause_s, why)
