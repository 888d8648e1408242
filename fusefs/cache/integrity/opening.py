"""Opens or creates the file of a version; a small file is compared with its checksums.

The file may be the one that this mount knows, or a file in the catalog that another
mount of the directory has created. All of this blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fusefs.cache.cached_file import CHECKED_AT_OPEN, CacheFile, OpenFile
from fusefs.cache.catalog import Catalog
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.checksums import reader
from fusefs.cache.integrity.verify import examine, sums_in
from fusefs.cache.ranges import RangeMap


def open_or_create(disk: Disk, catalog: Catalog, file: CacheFile) -> OpenFile:
    """Open the file of a version, made by this or another mount, or create it.

    Raises:
        OSError: the disk fails, or is full.
        sqlite3.Error: the catalog can't be read.
    """
    for generation, st_ino, ranges, used_at in _candidates(catalog, file):
        fd = disk.open(file.name, generation, st_ino, file.size)
        if fd >= 0:
            found = OpenFile(fd, generation, st_ino, ranges, used_at=used_at)
            return _examined(catalog, file, found)
        # With a row but no file, the version could never be cached again.
        catalog.remove(file.name, generation, st_ino)
        # If the directory was copied or restored from a backup, a file with another inode number
        # is there; without a row, the quota would not count it.
        disk.remove_orphan(file.name, generation, -math.inf, lambda: False)
    return disk.create(file.name, file.size)


def _candidates(
    catalog: Catalog, file: CacheFile
) -> Iterator[tuple[str, int, bytes | None, float]]:
    """Yield (generation, st_ino, packed ranges, last use) of each file on disk that may be opened.

    First `file` itself, if it has a generation, with None for its ranges; then the catalog's file.
    """
    if file.generation:
        yield file.generation, file.st_ino, None, file.used_at
    row = catalog.find(file.name)
    if row is not None and row.generation != file.generation:
        yield row.generation, row.st_ino, row.ranges, row.used_at


def _examined(catalog: Catalog, file: CacheFile, found: OpenFile) -> OpenFile:
    """Compare a small file with its sums, unless done before; add `fault` and `sums` to `found`."""
    if file.size > CHECKED_AT_OPEN or (found.ranges is None and file.is_checked):
        return found
    present = file.present if found.ranges is None else RangeMap.unpack(found.ranges)
    pending = file.sums or [] if found.ranges is None else []
    sums = sums_in(catalog, found.st_ino, found.generation, pending, 0, file.size)
    fault, new = examine(reader(found.fd), sums, present)
    return found._replace(fault=fault, sums=new)
