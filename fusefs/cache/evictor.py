"""Makes room in the cache: removes files that are not in use, in the order of eviction."""

from __future__ import annotations

import math

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.file_cache import FileCache
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.stalls import WaitCause, stage

# Evict this share of the cache more than needed, so that not every download has to evict.
SLACK = 0.01
TEND_EVERY_S = 2.0
# The least time between two readings of the oldest files from the catalog: if all files are in
# use, each reservation would read them. With many files this takes seconds, so the next reading
# comes after at least twenty times the duration of the last one.
LEARN_EVERY_S = 2.0
LEARN_SHARE = 20
# A file that could not be removed is tried again after this time: other mounts may use thousands
# of files, and each reservation would try all of them.
TRY_AGAIN_AFTER_S = 10.0
# After this many refused removals an eviction gives up: the disk probably refuses all others,
# and programs wait meanwhile.
MOST_REFUSED = 16


class Evictor:
    """Evicts the files of one cache, within its quota. Belongs to the event loop."""

    def __init__(self, cache: FileCache) -> None:
        self.cache = cache
        self._quota = cache.quota
        self._evicting = trio.Lock()
        self._learn_at = -math.inf
        # Files that could not be removed; outside the eviction order until `_try_again_at`.
        self._staying: list[CacheFile] = []
        self._try_again_at = 0.0

    async def reserve(self, wanted: int, *, keep_used_since: float = math.inf) -> bool:
        """Reserve `wanted` bytes, evicting files if needed; False if they do not fit.

        Files used at or after `keep_used_since` (seconds since the epoch) are not evicted; with
        -inf only files of less value than a file fetched ahead are evicted.
        """
        if self._quota.reserve(wanted):
            return True
        with stage(WaitCause.CACHE_FULL):
            async with self._evicting:
                if keep_used_since == -math.inf:
                    await self._evict_until(wanted, is_ahead=True)
                else:
                    await self._evict(wanted, keep_used_since)
                if self._quota.reserve(wanted):
                    return True
        if keep_used_since == math.inf:
            self.cache.trouble.note(
                f"the cache {self.cache.directory} is too small for the open files: the"
                " rest is read from S3 each time"
            )
        return False

    async def run(self) -> None:
        """Keep the cache within its limits, until cancelled."""
        while True:
            await ACTIVITY.pause(TEND_EVERY_S)
            await self.tend()

    async def tend(self) -> None:
        """Close unlinked files no longer mapped, drop obsolete versions, enforce the limits."""
        await self._quota.close_unlinked()
        for version, file in await self.cache.take_obsolete():
            if not await self.drop(file) and file.present.total:
                self.cache.obsolete(version)  # try again until its last user has gone
        if self._quota.excess(0) > 0:
            async with self._evicting:
                await self._evict(0)

    async def drop(self, file: CacheFile) -> bool:
        """Remove a file; False if it is excluded from eviction, in use by any mount, or empty."""
        async with self._evicting:
            if file.pins or not file.present.total:
                return False
            await self.cache.evict(file, for_room=False)
            self.cache.put_back(file)
            return not file.present.total

    async def _evict(self, wanted: int, keep_used_since: float = math.inf) -> None:
        if self._quota.excess(wanted) <= 0:
            return
        self._quota.inode_slack = int(SLACK * len(self.cache))
        await self._evict_until(wanted, used_before=keep_used_since)
        if keep_used_since == math.inf:
            await self._evict_until(wanted + int(SLACK * self._quota.used), is_ahead=True)

    async def _evict_until(
        self, wanted: int, *, is_ahead: bool = False, used_before: float = math.inf
    ) -> None:
        """Evict files until `wanted` bytes fit, none is left to evict or the disk refuses many."""
        if self._staying and self._try_again_at <= trio.current_time():
            staying, self._staying = self._staying, []
            for known in staying:
                self.cache.put_back(known)
        most_refused = self.cache.refused + MOST_REFUSED
        while self._quota.excess(wanted) > 0 and self.cache.refused < most_refused:
            if self.cache.residency.lacks_oldest:
                await self._load_oldest()
            file = self.cache.next_victim(is_ahead=is_ahead, used_before=used_before)
            if file is None:
                # Files in the catalog that are not in memory may be evicted as well.
                if is_ahead or not await self._load_oldest():
                    break
                continue
            await self.cache.evict(file)
            if file.present.total:
                if not self._staying:
                    self._try_again_at = trio.current_time() + TRY_AGAIN_AFTER_S
                self._staying.append(file)
        self._quota.measure_again()

    async def _load_oldest(self) -> bool:
        """Load the catalog's next page of oldest files; False at its end and for a while after."""
        began = trio.current_time()
        if began < self._learn_at:
            return False
        if await self.cache.residency.load_oldest():
            return True
        now = trio.current_time()
        self._learn_at = now + max(LEARN_EVERY_S, LEARN_SHARE * (now - began))
        return False
