"""Takes files out of the cache for writing; after its upload a file returns as a new version.

Programs for which the kernel reads such a file (passthrough) see the writes. The catalog row of
the file is removed first, so that if this process dies, no other process takes the changed bytes
for the old version.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.cache.disk import Disk
from fusefs.cache.eviction_order import EvictionOrder


class Handover:
    """Takes files out of a cache for writing, and back as new versions. For the event loop."""

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

    async def prepare(self, file: CacheFile) -> bool:
        """Remove a pinned file's catalog row; False if not complete or another mount uses the file.

        `take_out` or `cancel` must follow. Programs that open the file in between see the writes.
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
        """Undo `prepare`: write the file's catalog row again."""
        if file.generation and self._files.get(file.name) is file:
            self._catalog_writer.record_again(file)

    def take_out(self, file: CacheFile, path: str) -> None:
        """Move a file out of the cache to `path`; raises OSError (EBUSY: another mount uses it)."""
        place = self._disk.path(file.name, file.generation)
        os.rename(place, path)
        if self._disk.is_shared(file.fd):
            os.rename(path, place)
            raise OSError(errno.EBUSY, "another mount uses the cached copy")
        del self._files[file.name]
        self._order.forget(file)
        self._catalog_writer.forget(file)
        file.become("", file.st_ino, b"")
        file.is_kept = file.is_ours = file.is_retained = False

    def succeed(self, new: CacheFile, taken: CacheFile) -> None:
        """Put `taken`, a file that was taken out, into the cache as the copy of `new`'s version."""
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
