"""Makes room in the cache: removes files that are not in use, least recently used first."""

from __future__ import annotations

import math

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.file_cache import FileCache

# Evict this share of the cache more than needed, so that not every download has to evict.
SLACK = 0.01
TEND_EVERY_S = 2.0


class Evictor:
    """Evicts the files of one cache, within its quota. Belongs to the event loop."""

    def __init__(self, cache: FileCache) -> None:
        self._cache = cache
        self._quota = cache.quota
        self._evicting = trio.Lock()

    async def reserve(self, wanted: int, *, keep_used_since: float = math.inf) -> bool:
        """Set `wanted` bytes aside, evicting if need be; False if there is no room for them.

        What was used since `keep_used_since`, in seconds since the epoch, is not evicted.
        """
        if self._quota.reserve(wanted):
            return True
        async with self._evicting:
            await self._evict(wanted, keep_used_since)
            if self._quota.reserve(wanted):
                return True
            if keep_used_since == math.inf:
                self._cache.warn_full()
            return False

    async def run(self) -> None:
        """Keep the cache within its limits, until cancelled."""
        while True:
            await trio.sleep(TEND_EVERY_S)
            await self.tend()

    async def tend(self) -> None:
        """Close what the kernel has let go of, and evict what exceeds the limits by now."""
        await self._quota.close_unlinked()
        if self._quota.excess(0) > 0:
            async with self._evicting:
                await self._evict(0)

    async def drop(self, file: CacheFile) -> bool:
        """Remove a file; False if it is retained or in use, be it by another mount."""
        async with self._evicting:
            size = file.present.total
            if file.pins or not size:
                return False
            self._quota.unlinked(await self._cache.evict(file), size)
            return not file.present.total

    async def _evict(self, wanted: int, keep_used_since: float = math.inf) -> None:
        if self._quota.excess(wanted) <= 0:
            return
        wanted_with_slack = wanted + int(SLACK * self._quota.used)
        await self._evict_until(wanted_with_slack, keep_used_since)
        if self._quota.excess(wanted) > 0:
            # What other mounts keep here may go as well.
            await self._cache.learn()
            await self._evict_until(wanted_with_slack, keep_used_since)

    async def _evict_until(self, wanted: int, keep_used_since: float) -> None:
        """Evict, oldest first, until `wanted` bytes fit or no file is left that may go."""
        self._quota.inode_slack = int(SLACK * len(self._cache))
        for file in self._cache.victims():
            if self._quota.excess(wanted) <= 0:
                return
            # It may have been opened, or removed, while another was evicted.
            if not file.pins and file.present.total and file.used_at < keep_used_since:
                size = file.present.total
                self._quota.unlinked(await self._cache.evict(file), size)
        self._quota.measure_again()
