"""The cached files that are never evicted: those at or below the paths of `fusefs pin`.

A pin names a key of a bucket, or the prefix before a slash, and so every version of the objects
there. It is in the directory's catalog, for all mounts, when the call returns. In memory each mount
has a hash of each pin of its bucket, and reads only what was added since; after an unpin by another
mount it reads all of them again.

Cached files are retained one by one, since a mount's evictor knows of other mounts' files only the
names: the catalog has a row with key and name of each (`Catalog.retain`), from when a version of a
pinned key is used or fetched. The row of a newer version replaces it.
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

Result = TypeVar("Result")

# Files of which it is seen with one call whether other mounts retain them.
LOOKED_UP = 2000
# Pins that are read or removed at once: 1 MB.
PAGE = 10_000
# Whether a pin is one of those that are to be removed.
Wanted = Callable[[str], bool]


def above(key: str) -> Iterator[str]:
    """The pins that a key may be retained for: itself, the prefixes it is below, and ""."""
    yield key
    at = key.rfind("/")
    while at >= 0:
        yield key[:at]
        at = key.rfind("/", 0, at)
    if key:
        yield ""


def covers(pins: Container[int], key: str) -> bool:
    """True if a key has one of the pins, which are hashes, or is below one; "" pins everything."""
    return any(hash(pin) in pins for pin in above(key))


class Retention:
    """The pins of one bucket in one cache directory, and the files that are not evicted for them.

    Pins are keys and prefixes without their last slash. `files` are those in memory, by name.
    `leave_order` takes a file out of the order of eviction, and `put_back` gives it a place there
    if it may have one. `covers` and `pins_above` do not block, `refresh_now` and `covered` do.
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
        # Changed in the catalog's thread, or before there is one.
        self._pins: set[int] = set()  # their hashes: they are many, and long
        # The latest pin of this bucket that is known, and of the record the latest of all
        # buckets and how many were removed: with these two it has changed.
        self._added = 0
        self._record = -1, -1
        self._counted: tuple[object, int] = None, 0

    def __len__(self) -> int:
        """The number of pins of the bucket."""
        return len(self._pins)

    def covers(self, key: str) -> bool:
        """True if the files of a key are retained."""
        return bool(self._pins) and covers(self._pins, key)

    def pins_above(self, key: str) -> list[str]:
        """The pins that a key is retained for."""
        return sorted(pin for pin in above(key) if hash(pin) in self._pins)

    def covered(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose files are retained, by what is on record now."""
        self.refresh_now()
        return {key for key in keys if self.covers(key)}

    async def refresh(self) -> bool:
        """See whether another mount has changed the pins, and return whether one has."""
        return bool(await self._in_catalog(self.refresh_now))

    async def count(self, path: str) -> int:
        """The number of pins at or below a path ("": all); 0 if they can't be read."""
        if not path or not self._pins:
            return len(self._pins)
        return await self._in_catalog(lambda: self._count(path)) or 0

    async def add(self, pins: Iterable[str]) -> None:
        """Put pins on record, and on the disk when this returns; raises OSError if that fails."""
        new = list(pins)
        await self._change(lambda: self._add(new))

    def refresh_now(self) -> bool:
        """As `refresh`; raises sqlite3.Error where the catalog can't be read. Blocks."""
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
        known = path, self._record
        if self._counted[0] != known:
            with self._catalog.reading() as db:
                counts = [
                    db.execute(
                        "SELECT count(*) FROM pins WHERE identity = ? AND key >= ? AND key < ?",
                        (self._identity, *keys),
                    ).fetchone()[0]
                    for keys in key_ranges(path)
                ]
            self._counted = known, sum(counts)
        return self._counted[1]

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
        """Remove a page of pins; return how many, and what pins are left to be looked at."""
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
        """Know all pins: those that were added, or all if some were removed; tell if any were."""
        record = _record(db)
        if record == self._record:
            return False
        if record[1] != self._record[1]:
            self._added, pins = 0, set[int]()
        else:
            pins = self._pins
        for page in self._new(db):
            pins.update(map(hash, page))
        self._pins = pins  # all at once: the event loop looks at them while a thread is here
        self._record = record
        return True

    def _new(self, db: sqlite3.Connection) -> Iterator[list[str]]:
        """The pins that are not known yet, page by page."""
        while rows := db.execute(
            # With "+" SQLite goes by the order in which they were added.
            "SELECT added, key FROM pins WHERE +identity = ? AND added > ? ORDER BY added LIMIT ?",
            (self._identity, self._added, PAGE),
        ).fetchall():
            self._added = rows[-1][0]
            yield [str(key) for _, key in rows]

    # The files

    async def remove_pins(self, path: str, is_wanted: Wanted = lambda _: True) -> int:
        """Remove the wanted pins at and below a path, whose files may be evicted; return how many.

        Not cancelled. A process that is killed has removed some of them, or all.

        Raises:
            OSError: the disk does not take it; the next call goes on, also without pins.
        """
        with trio.CancelScope(shield=True):  # else files without a pin would stay retained
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
        """Let files below a pin be evicted that were last retained `before` (epoch seconds)."""
        await self._writer.release(key, lambda _keys: (), before)

    async def release_file(self, file: CacheFile) -> None:
        """Let a retained file be evicted, until its version is used again."""
        if file.version is not None:
            await self._writer.record()
            key = file.version.key
            await self._writer.release(key, lambda keys: {other for other in keys if other != key})
        self.note(file, is_retained=False)

    def retain_again(self, file: CacheFile) -> None:
        """Note that the version of a pinned file is the bucket's present one."""
        if file.version is not None and self.covers(file.version.key):
            self.retain(file, file.version.key)

    def retain(self, file: CacheFile, key: str) -> None:
        """Keep a file of this key of the bucket from being evicted."""
        self.note(file, is_retained=True)
        self._writer.retain(key, file.name)

    def released(self, names: set[str]) -> None:
        """Note that the files of these names may be evicted again."""
        for file in filter(None, map(self._files.get, names)):
            self.note(file, is_retained=False)

    async def learn(self) -> None:
        """See which files other mounts retain."""
        await self.refresh()
        await self._writer.record()
        files = list(self._files.values())
        for at in range(0, len(files), LOOKED_UP):
            part = files[at : at + LOOKED_UP]
            retained = {file for file in part if file.is_retained}
            pending = self._writer.retaining
            look_up = partial(self._catalog.retained_of, [file.name for file in part])
            names = await self._writer.in_catalog(look_up)
            # A catalog in memory has no rows from before.
            if names is None or self._catalog.is_in_memory:
                return
            for file in part:
                if file.name in names:
                    self.note(file, is_retained=True)
                elif file in retained and file.name not in pending:
                    self.note(file, is_retained=False)

    def note(self, file: CacheFile, *, is_retained: bool) -> None:
        """Note that a file in memory is retained, or no more."""
        if file.is_retained == is_retained:
            return
        file.is_retained = is_retained
        if is_retained:
            self._leave_order(file)
        else:
            self._put_back(file)


def _record(db: sqlite3.Connection) -> tuple[int, int]:
    """The number of the latest pin of any bucket, and the count of removals."""
    found = db.execute("SELECT coalesce(max(added), 0), (SELECT count FROM removals) FROM pins")
    added, removals = found.fetchone()
    if not isinstance(removals, int):
        # One changed bit makes it look empty, of which SQLite knows nothing.
        raise sqlite3.DatabaseError("it has no count of removals")
    return added, removals
