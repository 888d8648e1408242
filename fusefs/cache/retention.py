"""The cached files that are never evicted: the files at or below the paths of `fusefs pin`.

A pin names a key of a bucket, or a prefix without its last slash, and covers every version of the
objects there. Pins are in the cache directory's catalog, for all mounts. In memory each mount has a
hash of each pin of its bucket. To follow other mounts, it reads the pins added since its last look,
or all pins if any was removed.

A mount's evictor knows only the names of other mounts' files, not their keys. So the catalog has a
row with key and name of each *retained* file, one never to be evicted (`Catalog.retain`), written
when a version of a pinned key is used or fetched. The row of a newer version replaces that row.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog import Catalog, KeyRange, key_ranges
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.cache.integrity.damage import check_order

Result = TypeVar("Result")

# Files that one call checks for exclusion from eviction.
LOOKED_UP = 2000
# Pins that are read or removed at once: 1 MB.
PAGE = 10_000
# True if a pin should be removed.
Wanted = Callable[[str], bool]


def above(key: str) -> Iterator[str]:
    """Yield the pins that would cover a key: the key itself, each prefix above it, and ""."""
    yield key
    at = key.rfind("/")
    while at >= 0:
        yield key[:at]
        at = key.rfind("/", 0, at)
    if key:
        yield ""


def covers(pins: Container[int], key: str) -> bool:
    """True if a key is at or below one of the pins, given as hashes; the pin "" covers all keys."""
    return any(hash(pin) in pins for pin in above(key))


class Retention:
    """The pins of one bucket in one cache directory, and the files that they save from eviction.

    Pins are keys and prefixes without their last slash. `files` are the files in memory, by name.
    `leave_order` removes a file from the eviction order, `put_back` returns it if it may be
    evicted. `covers` and `pins_above` do not block, `refresh_now` and `covered` do.
    """

    def __init__(
        self,
        identity: str,
        files: Mapping[str, CacheFile],
        catalog: Catalog,
        writer: CatalogWriter,
        leave_order: Callable[[CacheFile], None],
        put_back: Callable[[CacheFile], None],
    ) -> None:
        self._identity = identity
        self._files = files
        self._catalog = catalog
        self._writer = writer
        self._in_catalog = writer.in_catalog
        self._leave_order = leave_order
        self._put_back = put_back
        # Changed only in the catalog's thread, or before that thread exists.
        self._pins: set[int] = set()  # hashes, as pins are many and long
        # `_added` is the number of this bucket's latest known pin. `_record` is the number of the
        # latest pin of any bucket, and the count of removals: each change of pins changes it.
        self._added = 0
        self._record = -1, -1

    def __len__(self) -> int:
        """The number of pins of the bucket."""
        return len(self._pins)

    def covers(self, key: str) -> bool:
        """True if a pin covers a key, so that the cached files of the key are not evicted."""
        return bool(self._pins) and covers(self._pins, key)

    def pins_above(self, key: str) -> list[str]:
        """The sorted pins that cover a key."""
        return sorted(pin for pin in above(key) if hash(pin) in self._pins)

    def covered(self, keys: Iterable[str]) -> set[str]:
        """Read the pins from the catalog, and return the given keys that a pin covers. Blocks."""
        self.refresh_now()
        return {key for key in keys if self.covers(key)}

    async def refresh(self) -> bool:
        """Read other mounts' changes of pins from the catalog; return True if there were any."""
        return bool(await self._in_catalog(self.refresh_now))

    async def count(self, path: str) -> int:
        """Count the pins at or below a path ("": all); 0 if they can't be read."""
        if not path or not self._pins:
            return len(self._pins)
        return await self._in_catalog(lambda: self._count(path)) or 0

    async def add(self, pins: Iterable[str]) -> None:
        """Write pins to the catalog, synced to the disk on return; raises OSError on failure."""
        new = list(pins)
        await self._change(lambda: self._add(new))

    def refresh_now(self) -> bool:
        """Do the work of `refresh` in this thread; raises sqlite3.Error if that fails. Blocks."""
        with self._catalog.reading() as db:
            return self._read(db)

    async def _change(self, change: Callable[[], Result]) -> Result:
        if self._catalog.is_in_memory:
            raise OSError(errno.EROFS, "the disk of the cache takes no catalog")
        found = await self._in_catalog(change)
        if found is None:
            raise OSError(errno.EIO, "the catalog of the cache can't be written")
        return found

    def _count(self, path: str) -> int:
        query = "SELECT count(*) FROM pins WHERE identity = ? AND key >= ? AND key < ?"
        with self._catalog.reading() as db:
            rows = [db.execute(query, (self._identity, *keys)) for keys in key_ranges(path)]
            return sum(int(row.fetchone()[0]) for row in rows)

    def _add(self, pins: list[str]) -> bool:
        with self._catalog.transaction(is_durable=True) as db:
            db.executemany(
                "INSERT OR IGNORE INTO pins (identity, key) VALUES (?, ?)",
                ((self._identity, pin) for pin in pins),
            )
        with self._catalog.reading() as db:
            self._read(db)
        return True

    def _remove(self, pins: KeyRange, is_wanted: Wanted) -> tuple[int, KeyRange | None]:
        """Remove wanted pins of a range's first page; return (count, rest of the range or None)."""
        with self._catalog.transaction(is_durable=True) as db:
            self._read(db)
            found = db.execute(
                "SELECT key FROM pins WHERE identity = ? AND key >= ? AND key < ?"
                " ORDER BY key LIMIT ?",
                (self._identity, *pins, PAGE),
            )
            keys = [str(key) for (key,) in found]
            gone = [key for key in keys if is_wanted(key)]
            db.executemany(
                "DELETE FROM pins WHERE identity = ? AND key = ?",
                [(self._identity, key) for key in gone],
            )
            db.execute("UPDATE removals SET count = count + ?", (len(gone),))
            record = _record(db)
        self._pins.difference_update(map(hash, gone))
        self._record = record
        return len(gone), (keys[-1] + "\0", pins[1]) if len(keys) == PAGE else None

    def _read(self, db: sqlite3.Connection) -> bool:
        """Read the pins added since the last call, or all if any were removed; True if changed."""
        record = _record(db)
        if record == self._record:
            return False
        if record[1] != self._record[1]:
            self._added, pins = 0, set[int]()
        else:
            pins = self._pins
        for page in self._new(db):
            pins.update(map(hash, page))
        self._pins = pins  # replaced at once, as the event loop reads it during this thread's work
        self._record = record
        return True

    def _new(self, db: sqlite3.Connection) -> Iterator[list[str]]:
        """Yield the pins that are not known yet, page by page."""
        while rows := db.execute(
            # The "+" makes SQLite search by `added`, not by the index of (identity, key).
            "SELECT added, key FROM pins WHERE +identity = ? AND added > ? ORDER BY added LIMIT ?",
            (self._identity, self._added, PAGE),
        ).fetchall():
            check_order(self._added, (added for added, _ in rows))
            self._added = rows[-1][0]
            yield [str(key) for _, key in rows]

    # The files

    async def remove_pins(self, path: str, is_wanted: Wanted = lambda _: True) -> int:
        """Remove the pins at and below a path that `is_wanted` selects, and return their count.

        Their files may then be evicted. Can't be cancelled. A killed process may have removed
        some of the pins.

        Raises:
            OSError: the catalog can't be written; another call finishes the rest.
        """
        with trio.CancelScope(shield=True):  # else files without a pin might never be evicted
            count = 0
            for keys in key_ranges(path):
                left: KeyRange | None = keys
                while left is not None:
                    part, left = await self._change(partial(self._remove, left, is_wanted))
                    count += part
            await self._writer.record()
            if not await self._writer.release(path, self.covered):
                raise OSError(errno.EIO, "the catalog of the cache can't be written")
        return count

    async def release_unused(self, key: str, before: float) -> None:
        """Release files at and below a key unless given to `retain` since `before` (epoch s)."""
        await self._writer.release(key, lambda _keys: (), before)

    async def release_file(self, file: CacheFile) -> None:
        """Let a retained file be evicted, until its version is used again."""
        if file.version is not None:
            await self._writer.record()
            # The key's row may be a newer version's by now, which another mount may have written.
            await self._writer.release(
                file.version.key, lambda names: {key for key in names if names[key] != file.name}
            )
        self.note(file, is_retained=False)

    def retain_again(self, file: CacheFile) -> None:
        """Exclude a file from eviction if a pin covers the key of its version."""
        if file.version is not None and self.covers(file.version.key):
            self.retain(file, file.version.key)

    def retain(self, file: CacheFile, key: str) -> None:
        """Exclude a file, a version of the object `key`, from eviction."""
        self.note(file, is_retained=True)
        self._writer.retain(key, file.name)

    def released(self, names: set[str]) -> None:
        """Let the files with these names, if in memory, be evicted again."""
        for file in filter(None, map(self._files.get, names)):
            self.note(file, is_retained=False)

    async def learn(self) -> None:
        """Set `is_retained` of all files in memory from the catalog, which any mount may change."""
        await self.refresh()
        await self._writer.record()
        files = list(self._files.values())
        for at in range(0, len(files), LOOKED_UP):
            part = files[at : at + LOOKED_UP]
            retained = {file for file in part if file.is_retained}
            pending = self._writer.retaining
            look_up = partial(self._catalog.retained_of, [file.name for file in part])
            names = await self._writer.in_catalog(look_up)
            # A catalog in memory lacks all earlier rows.
            if names is None or self._catalog.is_in_memory:
                return
            for file in part:
                if file.name in names:
                    self.note(file, is_retained=True)
                elif file in retained and file.name not in pending:
                    self.note(file, is_retained=False)

    def note(self, file: CacheFile, *, is_retained: bool) -> None:
        """Set a file's `is_retained`, and take it out of the eviction order or put it back."""
        if file.is_retained == is_retained:
            return
        file.is_retained = is_retained
        if is_retained:
            self._leave_order(file)
        else:
            self._put_back(file)


def _record(db: sqlite3.Connection) -> tuple[int, int]:
    """Read (number of the latest pin of any bucket, count of removals), which show any change."""
    found = db.execute("SELECT coalesce(max(added), 0), (SELECT count FROM removals) FROM pins")
    added, removals = found.fetchone()
    if not isinstance(removals, int):
        # One changed bit can make the table look empty, which SQLite does not detect.
        raise sqlite3.DatabaseError("it has no count of removals")
    return added, removals
