"""Cache files that are taken out of the cache to be written to, and come back as another version.

The kernel reads such a file for programs, which go on with it: they see what is written. The
catalog forgets it first, so whatever this process dies of, no other one takes what it has by
then for the version that it was.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.cache.disk import Disk
from fusefs.cache.eviction_order import EvictionOrder


class Handover:
    """Takes files out of one cache. Belongs to the event loop."""

    def __init__(
        self,
        disk: Disk,
        files: dict[str, CacheFile],
        catalog_writer: CatalogWriter,
        order: EvictionOrder,
        ensure_open: Callable[[CacheFile], Awaitable[bool]],
    ) -> None:
        self._disk = disk
        self._files = files
        self._catalog_writer = catalog_writer
        self._order = order
        self._ensure_open = ensure_open

    def lock_as(self, mount: str) -> None:
        """Tell this mount's use of files from other mounts' by this name."""
        self._disk.lock_as(mount)

    async def prepare(self, file: CacheFile) -> bool:
        """Have the catalog forget a pinned file; False if it is not whole, or not this mount's.

        Those that open it meanwhile share what becomes of it. `take_out` or `cancel` follows.
        """
        if not await self._ensure_open(file) or not self._is_own(file):
            return False
        generation, st_ino, recorded = file.generation, file.st_ino, file.recorded
        self._catalog_writer.forget(file)
        file.recorded = file.present.total
        await self._catalog_writer.remove(file.name, generation, st_ino, recorded)
        if file.generation == generation and self._is_own(file):
            return True
        self.cancel(file)
        return False

    def cancel(self, file: CacheFile) -> None:
        """Let the catalog know a file again."""
        if file.generation and self._files.get(file.name) is file:
            self._catalog_writer.record_again(file)

    def take_out(self, file: CacheFile, path: str) -> None:
        """Move a file to `path` to be changed; raises OSError, EBUSY if another mount uses it."""
        name, generation = file.name, file.generation
        self._disk.take_out(name, generation, path)
        if self._disk.is_shared(file.fd):
            self._disk.bring_back(name, generation, path)
            raise OSError(errno.EBUSY, "another mount uses the cached copy")
        del self._files[name]
        self._order.forget(file)
        self._catalog_writer.forget(file)
        file.become("", file.st_ino, b"")
        file.is_kept = file.is_ours = file.is_retained = False

    def succeed(self, new: CacheFile, taken: CacheFile) -> None:
        """Let a file that was taken out be that of the version for which `new` was pinned."""
        taken.name, taken.size, taken.version = new.name, new.size, new.version
        taken.is_kept = taken.is_ours = True
        taken.is_passed_over = False
        taken.is_retained = new.is_retained
        self._files[taken.name] = taken
        self._catalog_writer.used(taken)

    def _is_own(self, file: CacheFile) -> bool:
        is_whole = file.is_complete and file.is_kept and file.is_ours and file.fd >= 0
        is_listed = self._files.get(file.name) is file
        return is_whole and is_listed and not self._disk.is_shared(file.fd)
