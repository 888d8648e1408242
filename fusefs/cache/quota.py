"""How much room the cache may take, and what goes when it is full.

Room is reserved before a download starts, and the reservation shrinks as
bytes arrive, so that thirty streams at once can't overshoot. When there is
none, files that nobody uses are evicted, least recently used first. Files
that are open can't be given up, and neither can the blocks of a file that was
unlinked while a program has it mapped: both count. If these alone exceed the
limit, a reservation is refused and the bytes are read without being kept.

Three limits hold at once: the cache's own size, and floors of free space and of
free inodes on its disk, whoever fills it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import is_unused
from fusefs.settings.types import format_size

if TYPE_CHECKING:
    from fusefs.cache.file_cache import FileCache

logger = logging.getLogger("fusefs.cache")

# How long the answer of statvfs is used; what is reserved since is subtracted.
STATVFS_EVERY_S = 0.25
# Evict some more than is asked for, so that not every download has to.
SLACK = 0.01


class Space:
    """The room of one cache directory. Belongs to the event loop.

    `limit` is in bytes (None: what the disk allows); `floor` tells how many
    bytes of a disk of a given size have to stay free, `inode_floor` how many
    of its inodes.
    """

    def __init__(
        self,
        directory: Path,
        limit: int | None,
        floor: Callable[[int], int],
        inode_floor: Callable[[int], int] = lambda _count: 0,
    ) -> None:
        self._directory = directory
        self._limit = limit
        self._floor = floor
        self._inode_floor = inode_floor
        self._cache: FileCache | None = None
        self.committed = 0  # what the catalog counts, for all mounts that share the directory
        self.uncommitted = 0  # what has arrived since
        self.reserved = 0
        # Unlinked files that the kernel still uses: their descriptors and sizes.
        self._ghosts: dict[int, int] = {}
        self._free = 0
        self._free_inodes = 0  # above the floor
        self._lacks_inodes = False
        self._free_known_until = 0.0
        self._is_missing = False
        self._evicting = trio.Lock()

    def attach(self, cache: FileCache) -> None:
        self._cache = cache

    @property
    def used(self) -> int:
        """Bytes on the disk, including what is unlinked and still mapped."""
        return self.committed + self.uncommitted + sum(self._ghosts.values())

    @property
    def limit(self) -> int:
        """What the cache may use now: its size limit, or what the disk leaves it."""
        room = max(0, self.used + self._headroom())
        return room if self._limit is None else min(self._limit, room)

    @property
    def limit_why(self) -> str | None:
        """Why the limit is less than the cache's size limit; None if it is not."""
        if self._limit is None or self.limit >= self._limit:
            return None
        return (
            f"less than --cache-size {format_size(self._limit)}: the rest of the disk is used by"
            " others or stays free (--min-free)"
        )

    def excess(self, wanted: int) -> int:
        """How many bytes have to go before `wanted` more fit."""
        excess = self.reserved + wanted - self._headroom()
        if self._limit is not None:
            excess = max(excess, self.used + self.reserved + wanted - self._limit)
        return max(excess, 1) if self._lacks_inodes else excess

    async def reserve(self, wanted: int, *, spares: float = math.inf) -> bool:
        """Set room aside, evicting if need be; False if there is none to be had.

        What was used since `spares`, in seconds since the epoch, is not evicted.
        """
        if self.excess(wanted) <= 0:
            self._took_room(wanted)
            return True
        async with self._evicting:
            await self._evict(wanted, spares)
            if self.excess(wanted) > 0:
                if self._cache is not None and spares == math.inf:
                    self._cache.warn_full()
                return False
            self._took_room(wanted)
            return True

    def _took_room(self, wanted: int) -> None:
        self.reserved += wanted
        self._free_inodes -= 1  # it may be for a new file
        self._lacks_inodes = self._lacks_inodes or self._free_inodes < 1

    def took(self, size: int) -> None:
        """Note that bytes have been written that the catalog does not know."""
        self.uncommitted += size
        self._free -= size

    def settle(self, wanted: int) -> None:
        """Give back a part of a reservation: it arrived, or will not."""
        self.reserved -= wanted

    async def tend(self) -> None:
        """Close what the kernel has let go of, and keep the limits against everybody else."""
        for fd in [fd for fd in self._ghosts if is_unused(fd)]:
            del self._ghosts[fd]
            await trio.to_thread.run_sync(os.close, fd)
        if self.excess(0) > 0:
            async with self._evicting:
                await self._evict(0)

    async def _evict(self, wanted: int, spares: float = math.inf) -> None:
        assert self._cache is not None
        if self.excess(wanted) <= 0:
            return
        slack = wanted + int(SLACK * self.used)
        await self._evict_until(slack, spares)
        if self.excess(wanted) > 0:
            # What other mounts keep here may go as well.
            await self._cache.learn()
            await self._evict_until(slack, spares)

    async def _evict_until(self, wanted: int, spares: float) -> None:
        """Evict, oldest first, until `wanted` bytes fit or nothing is left to go."""
        assert self._cache is not None
        for file in self._cache.victims():
            if self.excess(wanted) <= 0:
                return
            # It may have been opened, or gone, while another was evicted.
            if not file.pins and file.present.total and file.used_at < spares:
                await self._evict_one(file)
        self._free_known_until = 0.0

    async def _evict_one(self, file: CacheFile) -> None:
        assert self._cache is not None
        size = file.present.total
        fd = await self._cache.evict(file)
        if fd >= 0:
            self._ghosts[fd] = size
        # Ask the disk instead of believing that the blocks are free.
        self._free_known_until = 0.0

    def _headroom(self) -> int:
        """The bytes that may still be taken before the disk's floor is reached."""
        now = time.monotonic()
        if now >= self._free_known_until:
            self._free_known_until = now + STATVFS_EVERY_S
            try:
                status = os.statvfs(self._directory)
            except OSError as error:
                # A disk that is taken away ends no mount; what is written finds out.
                if not self._is_missing:
                    logger.warning("%s: its free space is not known: %s", self._directory, error)
                self._is_missing = True
                return self._free
            self._is_missing = False
            size = status.f_blocks * status.f_frsize
            self._free = status.f_bavail * status.f_frsize - self._floor(size)
            self._free_inodes = status.f_favail - self._inode_floor(status.f_files)
            few = int(SLACK * len(self._cache)) if self._cache and self._lacks_inodes else 0
            # Some file systems count none, and have as many as there is space for.
            self._lacks_inodes = status.f_files > 0 and self._free_inodes < max(1, few)
        return self._free
