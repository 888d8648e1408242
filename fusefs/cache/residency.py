"""The files of a cache that are in memory, because they are or were lately in use.

The catalog may have ten million files. An open of a file that is not in memory reads its row
(integrity/opening.py), jobs load files by name or page by page, and the evictor loads the oldest
files. If there are too many files in memory, the least recently used are unloaded.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

from fusefs.cache.cached_file import CacheFile, Rank
from fusefs.cache.catalog import Catalog, Row
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.cache.eviction_order import EvictionOrder
from fusefs.cache.quota import Quota

# Filter bits per name; each name sets three: 0.5% of unknown names are taken for known ones.
_BITS = 16
_LEAST = 1 << 16


class Residency:
    """Loads files of a cache, and unloads unused ones above `most`. Belongs to the event loop."""

    def __init__(
        self,
        files: dict[str, CacheFile],
        catalog: Catalog,
        writer: CatalogWriter,
        order: EvictionOrder,
        quota: Quota,
        most: int,
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._writer = writer
        self._order = order
        self._quota = quota
        self._most = most
        # True if the catalog has files that are not in memory. `_others` is a filter of their
        # names, and None until the names have been read.
        self._has_others = quota.files > len(files)
        self._others = None if self._has_others else NameFilter(most)
        # The (last use, name) up to which the catalog was read for the evictor, and the files
        # that were loaded and neither used nor evicted since.
        self._read_to = (-math.inf, "")
        self._from_catalog: set[CacheFile] = set()

    def lacks(self, name: str) -> bool:
        """True if the catalog, like the files in memory, certainly has no file called `name`."""
        if self._writer.has_neighbours:
            return False
        return not self._has_others or (self._others is not None and name not in self._others)

    def leave(self, file: CacheFile) -> None:
        """Forget that `load_oldest` loaded a file, which is in use, evicted or unloaded now."""
        self._from_catalog.discard(file)

    async def load(self, names: Iterable[str]) -> None:
        """Load the files of these names from the catalog if not in memory; skip unknown names."""
        unknown = [name for name in names if name not in self._files and not self.lacks(name)]
        if unknown:
            find = self._catalog.find
            await self._load(lambda: [row for name in unknown if (row := find(name))])

    async def pages(self, larger_than: int) -> AsyncIterator[list[CacheFile]]:
        """Load all files larger than `larger_than` bytes; yield them page by page."""
        await self._writer.record()
        after = ""
        # The names first, as a query for large files alone would hold the catalog's lock for long.
        while names := await self._writer.in_catalog(self._catalog.names, after):
            page = partial(self._catalog.page, after, names[-1], larger_than)
            yield (await self._load(page))[0]
            after = names[-1]

    async def load_oldest(self) -> bool:
        """Load a page of the next least recently used files; False at the end of the catalog."""
        await self._writer.record()
        if not (self._has_others or self._writer.has_neighbours):
            return False
        files, rows = await self._load(partial(self._catalog.oldest, self._read_to))
        self._read_to = (rows[-1].used_at, rows[-1].name) if rows else (-math.inf, "")
        self._from_catalog.update(file for file in files if not file.pins)
        return bool(rows)

    @property
    def lacks_oldest(self) -> bool:
        """True if files in the catalog may be older than all evictable files in memory."""
        return self._has_others and self._order.first(Rank.KEPT) not in self._from_catalog

    async def _load(self, read: Callable[[], list[Row]]) -> tuple[list[CacheFile], list[Row]]:
        """Call `read` in the catalog's thread; load the files of its rows; return (files, rows)."""
        await self._writer.record()  # else it might return rows of files dropped meanwhile
        rows = await self._writer.in_catalog(read) or []
        new = {row.name: CacheFile.from_row(row) for row in rows if row.name not in self._files}
        self._files |= new
        self._order.restore(file for file in new.values() if not file.is_retained)
        return [self._files[row.name] for row in rows], rows

    async def unload(self, let_go: Callable[[CacheFile], object]) -> None:
        """Unload the least recently used files above `most`; `let_go` ends their passthrough."""
        excess = len(self._files) - self._most
        if excess <= 0:
            return
        await self._writer.touch()
        idle = self._order.least_recent(excess)
        if len(idle) < excess:
            idle += [file for file in self._files.values() if file.is_retained and not file.pins]
        for file in idle[:excess]:
            if self._writer.is_idle(file) and not file.is_opening:
                let_go(file)
                self._order.unload(file)
                self.leave(file)
                del self._files[file.name]
                self._has_others = True
                if self._others is not None:
                    self._others.add(file.name)
        if self._others is not None and self._others.is_full:
            self._others = None
            await self.learn_names()

    async def learn_names(self) -> None:
        """Read the names of all files in the catalog into a `NameFilter`, unless there is one."""
        if self._others is not None:
            return
        await self._writer.record()
        others, after = NameFilter(2 * self._quota.files), ""
        while names := await self._writer.in_catalog(self._catalog.names, after):
            for name in names:
                others.add(name)
            after = names[-1]
        if names is not None:  # else the catalog can't be read
            self._others = others


class NameFilter:
    """A Bloom filter of at most `capacity` file names, which are 32 hexadecimal digits each.

    The filter saves a query of the catalog per new file, a third of the time of creating a file.
    """

    def __init__(self, capacity: int) -> None:
        self._mask = (1 << (_BITS * max(capacity, _LEAST) - 1).bit_length()) - 1
        self._bits = bytearray((self._mask + 1) // 8)
        self._left = (self._mask + 1) // _BITS

    @property
    def is_full(self) -> bool:
        """True if the filter has too many names, so that too many unknown names pass as known."""
        return self._left < 0

    def add(self, name: str) -> None:
        """Add a name. Names can't be removed."""
        self._left -= 1
        for at in self._positions(name):
            self._bits[at >> 3] |= 1 << (at & 7)

    def __contains__(self, name: str) -> bool:
        return all(self._bits[at >> 3] >> (at & 7) & 1 for at in self._positions(name))

    def _positions(self, name: str) -> tuple[int, int, int]:
        value = int(name, 16)
        return value & self._mask, value >> 40 & self._mask, value >> 80 & self._mask
