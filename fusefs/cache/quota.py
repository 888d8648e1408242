"""The room that the cache may take.

Room is reserved before a download starts, and the reservation shrinks as
bytes arrive, so that thirty streams at once can't overshoot. Three limits hold
at once: the cache's own size, and floors of free space and of free inodes on
its disk, whatever else fills it.

Files that are open can't be given up, and neither can the blocks of a file
that was unlinked while a program has it mapped: both count. If these alone
exceed the limit, a reservation is refused and the bytes are read without being
kept. The evictor (evictor.py) makes room by removing files that are not in use.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import trio

from fusefs.cache.disk import is_unused
from fusefs.settings.types import format_size

logger = logging.getLogger("fusefs.cache")

# How long the answer of statvfs is used; what is reserved since is subtracted.
STATVFS_EVERY_S = 0.25


class Quota:
    """The room of one cache directory. Belongs to the event loop.

    `limit` is in bytes (None: what the disk allows). `floor` maps the size of
    the disk to the bytes that have to stay free, `inode_floor` the number of
    its inodes to those that have to.
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
        # Bytes and files by the catalog, of all mounts that share the directory.
        self.committed = self.files = 0
        self.uncommitted = 0  # bytes that have arrived since
        self.reserved = 0
        # Sizes by descriptor of unlinked files that the kernel still uses.
        self._unlinked_in_use: dict[int, int] = {}
        self._free = 0
        self._capacity = 0  # of the disk, but for the floor
        self._free_inodes = 0  # above the floor
        self._lacks_inodes = False
        # How many inodes have to become free until they are not short any more.
        self.inode_slack = 0
        self._free_known_until = 0.0
        self._is_missing = False

    @property
    def used(self) -> int:
        """Bytes on the disk, including what is unlinked and still mapped."""
        return self.committed + self.uncommitted + sum(self._unlinked_in_use.values())

    @property
    def limit(self) -> int:
        """The number of bytes the cache may use now: its size limit, or what the disk leaves it."""
        room = max(0, self.used + self._headroom())
        return room if self._limit is None else min(self._limit, room)

    @property
    def allowed(self) -> int:
        """The number of bytes that the cache could use if nothing else filled its disk."""
        self._headroom()
        return self._capacity if self._limit is None else min(self._limit, self._capacity)

    @property
    def limit_why(self) -> str | None:
        """The reason for a limit below the cache's size limit; None if it is not below."""
        if self._limit is None or self.limit >= self._limit:
            return None
        return (
            f"less than --cache-size {format_size(self._limit)}: the rest of the disk is used by"
            " others or stays free (--min-free)"
        )

    def excess(self, wanted: int) -> int:
        """The number of bytes that have to go before `wanted` more fit."""
        excess = self.reserved + wanted - self._headroom()
        if self._limit is not None:
            excess = max(excess, self.used + self.reserved + wanted - self._limit)
        return max(excess, 1) if self._lacks_inodes else excess

    def reserve(self, wanted: int) -> bool:
        """Set bytes aside, and an inode for what may be a new file; False if they do not fit."""
        if self.excess(wanted) > 0:
            return False
        self.reserved += wanted
        self._free_inodes -= 1
        self._lacks_inodes = self._lacks_inodes or self._free_inodes < 1
        return True

    def release(self, size: int) -> None:
        """End a part of a reservation: these bytes have arrived, or will not."""
        self.reserved -= size

    def written(self, size: int) -> None:
        """Count bytes that have been written and are not in the catalog."""
        self.uncommitted += size
        self._free -= size

    def unlinked(self, fd: int, size: int) -> None:
        """A file was removed; `fd` is its descriptor while the kernel uses its blocks, else -1."""
        if fd >= 0:
            self._unlinked_in_use[fd] = size
        self.measure_again()

    async def close_unlinked(self) -> None:
        """Close the removed files that the kernel does not use any more."""
        for fd in [fd for fd in self._unlinked_in_use if is_unused(fd)]:
            del self._unlinked_in_use[fd]
            await trio.to_thread.run_sync(os.close, fd)

    def measure_again(self) -> None:
        """Have the disk's free space read anew instead of computed from what was removed."""
        self._free_known_until = 0.0

    def _headroom(self) -> int:
        """The bytes that may still be taken before the disk's floor is reached."""
        now = time.monotonic()
        if now >= self._free_known_until:
            self._free_known_until = now + STATVFS_EVERY_S
            try:
                status = os.statvfs(self._directory)
            except OSError as error:
                # A disk that is taken away ends no mount: the next write to it fails.
                if not self._is_missing:
                    logger.warning("%s: its free space is not known: %s", self._directory, error)
                self._is_missing = True
                return self._free
            self._is_missing = False
            size = status.f_blocks * status.f_frsize
            self._capacity = max(0, size - self._floor(size))
            self._free = status.f_bavail * status.f_frsize - self._floor(size)
            self._free_inodes = status.f_favail - self._inode_floor(status.f_files)
            slack = self.inode_slack if self._lacks_inodes else 0
            # Some file systems count no inodes, and have as many as there is space for.
            self._lacks_inodes = status.f_files > 0 and self._free_inodes < max(1, slack)
        return self._free
