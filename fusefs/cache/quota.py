"""The disk space that the cache may use.

Space is reserved before a download starts, and the reservation shrinks as bytes
arrive, so that many parallel downloads can't exceed the limits. There are three:
the cache's own size, and the space and the number of inodes that must stay free
on its disk, whatever else fills it.

Open files can't be evicted, and an unlinked file that a program has mapped still
occupies its blocks: both count. If they alone exceed the limit, a reservation is
refused and the bytes are read past the cache. The evictor (evictor.py) makes room
by removing files that are not in use.
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

# How long an answer of statvfs is used; later reservations are subtracted from it.
STATVFS_EVERY_S = 0.25


class Quota:
    """The space limits and use of one cache directory. Belongs to the event loop.

    `limit` is in bytes (None: what the disk allows). `floor` maps the size of
    the disk to the number of bytes that must stay free, `inode_floor` maps the
    disk's number of inodes to the number of inodes that must stay free.
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
        # Bytes and files in the catalog, of all mounts that share the directory.
        self.committed = self.files = 0
        self.uncommitted = 0  # bytes that have arrived and are not in the catalog yet
        self.reserved = 0
        # The sizes of unlinked files that the kernel still uses, by descriptor.
        self._unlinked_in_use: dict[int, int] = {}
        self._free = 0  # bytes above the floor
        self._capacity = 0  # the size of the disk without the floor
        self._free_inodes = 0  # inodes above the floor
        self._lacks_inodes = False
        # A shortage of inodes ends when this many are free above the floor.
        self.inode_slack = 0
        self._free_known_until = 0.0
        self._is_missing = False

    @property
    def used(self) -> int:
        """The number of bytes on the disk, including files that are unlinked and still mapped."""
        return self.committed + self.uncommitted + sum(self._unlinked_in_use.values())

    @property
    def limit(self) -> int:
        """The number of bytes the cache may use now, given its size limit and the disk's space."""
        room = max(0, self.used + self._headroom())
        return room if self._limit is None else min(self._limit, room)

    @property
    def allowed(self) -> int:
        """The number of bytes that the cache could use if its disk had no other files."""
        self._headroom()
        return self._capacity if self._limit is None else min(self._limit, self._capacity)

    @property
    def limit_why(self) -> str | None:
        """The reason why `limit` is below the cache's size limit; None if it is not."""
        if self._limit is None or self.limit >= self._limit:
            return None
        return (
            f"less than --cache-size {format_size(self._limit)}: the rest of the disk is used by"
            " others or stays free (--min-free)"
        )

    def excess(self, wanted: int) -> int:
        """The number of bytes to evict before `wanted` more fit; 0 or less if they fit."""
        excess = self.reserved + wanted - self._headroom()
        if self._limit is not None:
            excess = max(excess, self.used + self.reserved + wanted - self._limit)
        return max(excess, 1) if self._lacks_inodes else excess

    def reserve(self, wanted: int) -> bool:
        """Reserve `wanted` bytes, and an inode as the file may be new; False if they do not fit."""
        if self.excess(wanted) > 0:
            return False
        self.reserved += wanted
        self._free_inodes -= 1
        self._lacks_inodes = self._lacks_inodes or self._free_inodes < 1
        return True

    def release(self, size: int) -> None:
        """Reduce the reserved bytes by `size`, which have arrived or will not arrive."""
        self.reserved -= size

    def written(self, size: int) -> None:
        """Count bytes that were written and are not in the catalog yet."""
        self.uncommitted += size
        self._free -= size

    def unlinked(self, fd: int, size: int) -> None:
        """Note that a file was unlinked; `fd` is its descriptor if a program maps it, else -1."""
        if fd >= 0:
            self._unlinked_in_use[fd] = size
        self.measure_again()

    async def close_unlinked(self) -> None:
        """Close the unlinked files that no program maps any more, so that the disk frees them."""
        for fd in [fd for fd in self._unlinked_in_use if is_unused(fd)]:
            del self._unlinked_in_use[fd]
            await trio.to_thread.run_sync(os.close, fd)

    def measure_again(self) -> None:
        """Make the next check read the disk's free space with statvfs."""
        self._free_known_until = 0.0

    def _headroom(self) -> int:
        """The number of bytes that may be written before the disk's floor is reached."""
        now = time.monotonic()
        if now >= self._free_known_until:
            self._free_known_until = now + STATVFS_EVERY_S
            try:
                status = os.statvfs(self._directory)
            except OSError as error:
                # A removed disk does not end the mount: the next write to it fails.
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
            # Some file systems report no number of inodes, and have no limit of their own.
            self._lacks_inodes = status.f_files > 0 and self._free_inodes < max(1, slack)
        return self._free
