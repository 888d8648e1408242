"""The catalog: a sqlite3 database that lists the files on the cache disk across restarts.

A row says which file holds which object version, and which ranges of it have arrived. Rows are
written after the bytes, so the ranges of a row are in the file, also after a SIGKILL. Rows carry
the boot id: a reboot loses the page cache, so rows of an earlier boot are removed unless they were
marked as synced, after fdatasync of their files.

Several mounts may share a directory. Each update is conditional on the file's generation and
inode number, new ranges are merged with the ranges in the row, and the sum of all sizes is a row
of its own that changes in the same transaction.

Rows carry checksums. If these or SQLite's own checks show damage, the database is removed
(integrity/damage.py), and the cache starts empty. If a running mount can neither open nor replace
the database, its catalog is in memory.

There may be ten million rows, so they are never all read at once: the newest rows are read when
the catalog is opened, others by name, the oldest page by page. Checksums of bytes are in a table
of their own, by inode number and generation, which a rename does not change, and by part. Two more
tables have the pinned paths and the files that are never evicted because of them (retention.py).

All calls block; a lock admits one thread at a time.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from time import monotonic, sleep, time_ns
from typing import Any, NamedTuple

from fusefs.cache.integrity import checksums
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.integrity.damage import (
    DamagedCatalogError,
    alone_in,
    check_header,
    check_order,
    is_damage,
    readable_errors,
    remove,
)
from fusefs.cache.ranges import RangeMap

logger = logging.getLogger("fusefs.cache")

FORMAT = 6

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY,
    generation TEXT NOT NULL,
    st_ino INTEGER NOT NULL,
    size INTEGER NOT NULL,
    ranges BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    is_synced INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    used_at REAL NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_by_use ON files (used_at);
CREATE INDEX IF NOT EXISTS files_unsynced ON files (name) WHERE NOT is_synced;
CREATE TABLE IF NOT EXISTS sums (
    st_ino INTEGER NOT NULL,
    generation TEXT NOT NULL,
    part INTEGER NOT NULL,
    sums BLOB NOT NULL,
    PRIMARY KEY (st_ino, generation, part)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retained (
    identity TEXT NOT NULL,
    key TEXT NOT NULL,
    name TEXT NOT NULL,
    since REAL NOT NULL,
    PRIMARY KEY (identity, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS retained_names ON retained (name);
CREATE TABLE IF NOT EXISTS pins (
    added INTEGER PRIMARY KEY AUTOINCREMENT,
    identity TEXT NOT NULL,
    key TEXT NOT NULL,
    UNIQUE (identity, key)
);
CREATE TABLE IF NOT EXISTS removals (count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS total (
    bytes INTEGER NOT NULL, files INTEGER NOT NULL, crc INTEGER NOT NULL
);
"""
# The form of the names that FileCache.name_of returns.
_NAME = re.compile("[0-9a-f]{32}")


class Total(NamedTuple):
    """The number of bytes and of files in all rows, including those of other mounts."""

    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Row:
    """The catalog's row of one file; `name` is the hash of its version (`FileCache.name_of`).

    `used_at` is in seconds since the epoch. `sums` are checksums to be added, empty in a row that
    was read; `is_retained` is set only in a row that was read, if the file must not be evicted.
    """

    name: str
    generation: str
    st_ino: int
    size: int
    ranges: bytes
    used_at: float
    is_synced: bool = False
    sums: tuple[Sum, ...] = ()
    is_retained: bool = False


# A range of keys [first, stop). SQLite orders bytes after all text, so b"" as stop is no limit.
KeyRange = tuple[str, str | bytes]
# Returns those of the given keys whose files stay excluded from eviction.
Stay = Callable[[Mapping[str, str]], Collection[str]]

# How long to wait for another mount that locks the database.
BUSY_S = 30.0
# Rows of the table `retained` that one query reads.
RETAINED_PAGE = 5000
# Rows that one query reads.
PAGE = 1000
# The sums of this many bytes of a file are written together: 1 KiB of sums.
SUMS_PART = 64 << 20


class Catalog:
    """One mount's connection to the catalog of a cache directory."""

    def __init__(self, path: Path, boot_id: str, *, in_any_case: bool = False) -> None:
        """Open the database, create it, or replace a damaged one by an empty one.

        With `in_any_case` the catalog is in memory if none of this works.

        Raises:
            OSError, sqlite3.Error: the database can be neither opened nor created.
        """
        self._path = path
        self._boot_id = boot_id
        self._lock = threading.RLock()
        self.is_in_memory = False
        st_ino = _inode(path)
        try:
            try:
                self._open(path)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._open_another(path, st_ino, error)
        except (OSError, sqlite3.Error) as error:
            if not in_any_case:
                raise
            self._open_in_memory(error)

    def _open_in_memory(self, error: Exception) -> None:
        logger.warning(
            "%s can't be written (%s): the next mount fetches new files again", self._path, error
        )
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.isolation_level = None
        self.is_in_memory = True
        self._data_version = self._read_data_version()
        self._prepare()

    def begin_another(self, error: sqlite3.Error, rows: Iterable[Row]) -> bool:
        """Replace the database by one with `rows`; False in memory, or if `error` is no damage.

        If no new database can be created, the catalog is in memory from now on.
        """
        with self._lock:
            if self.is_in_memory or not is_damage(error):
                return False
            # Close the old database first: its last writes would go into the new database's log.
            with suppress(sqlite3.Error):
                self._db.close()
            try:
                self._open_another(self._path, self._st_ino, error)
            except (OSError, sqlite3.Error) as why:
                self._open_in_memory(why)
            self.record(rows)
            return True

    def _open(self, path: Path) -> None:
        check_header(path)
        with readable_errors():
            self._db = _connected(path)
        with ExitStack() as undo:
            undo.callback(self._db.close)
            # Read first: `has_changed` then reports whatever others write from here on.
            self._data_version = self._read_data_version()
            self._prepare()
            self.total()
            self._st_ino = _inode(path)
            undo.pop_all()

    def _open_another(self, path: Path, st_ino: int, why: sqlite3.Error) -> None:
        """Replace the damaged database `st_ino` by an empty one, if no other mount has done so."""
        with alone_in(path.parent):
            if _inode(path) == st_ino:  # else another mount has done it
                remove(path)
                logger.warning("%s is damaged (%s): the cache starts anew", path, why)
            self._open(path)

    def _prepare(self) -> None:
        with self.transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise DamagedCatalogError(f"it has format {version}, this is format {FORMAT}")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            if version == 0:
                self._db.execute("INSERT INTO total VALUES (0, 0, ?)", (_total_checksum(0, 0),))
                # Begin with a number that no earlier database at this path had.
                self._db.execute("INSERT INTO removals VALUES (?)", (time_ns() >> 1,))
                self._db.execute(f"PRAGMA user_version={FORMAT}")
            # Files that were not synced when the machine stopped can't be trusted.
            unsafe = "WHERE NOT is_synced AND boot_id != ?"
            for row in self._rows(unsafe, self._boot_id, of_any_boot=True):
                self._remove(row)

    def newest(self, most: int) -> list[Row]:
        """Read the rows of the `most` files that were used last, least recently used first."""
        return self._rows("ORDER BY used_at DESC, name DESC LIMIT ?", most)[::-1]

    def oldest(self, after: tuple[float, str]) -> list[Row]:
        """Read a page of evictable files' rows that follow `after`, ordered by (last use, name)."""
        rows = self._rows(
            "WHERE (used_at, name) > (?, ?)"
            " AND NOT EXISTS (SELECT 1 FROM retained WHERE retained.name = files.name)"
            " ORDER BY used_at, name LIMIT ?",
            *after,
            PAGE,
        )
        check_order(after, ((row.used_at, row.name) for row in rows))
        return rows

    def page(self, after: str, last: str, larger_than: int) -> list[Row]:
        """Read the rows of names after `after` up to `last`, of files above `larger_than` bytes."""
        return self._rows("WHERE name > ? AND name <= ? AND size > ?", after, last, larger_than)

    def names(self, after: str) -> list[str]:
        """Read a page of the sorted names of all files, beginning after the name `after`."""
        with self._lock, readable_errors():
            found = self._db.execute(
                "SELECT name FROM files WHERE name > ? ORDER BY name LIMIT ?", (after, PAGE)
            )
            names = [name for (name,) in _typed(found, [str])]
        for name in names:
            if not _NAME.fullmatch(name):
                raise DamagedCatalogError(f"{name!r} is no name of a file")
        check_order(after, names)
        return names

    def unsynced(self, after: str, most: int) -> list[Row]:
        """Read the first `most` rows of unsynced files after the name `after`, by name."""
        return self._rows("WHERE NOT is_synced AND name > ? ORDER BY name LIMIT ?", after, most)

    def _rows(self, condition: str, *values: object, of_any_boot: bool = False) -> list[Row]:
        with self._lock, readable_errors():
            found = self._db.execute(f"SELECT {_COLUMNS} FROM files {condition}", values)
            # Checked first: SQLite's conditions treat an `is_synced` of 0.5 like 1, the checksum
            # like 0.
            rows = _typed(found, _TYPES)
        for row in rows:
            # `_prepare` removes such rows, but a damaged index can hide them from it.
            if not (row[5] or of_any_boot) and row[6] != self._boot_id:
                raise DamagedCatalogError("a row of another boot is left")
        return [_row(row) for row in rows]

    def find(self, name: str) -> Row | None:
        """The row with this name, or None."""
        rows = self._rows("WHERE name = ?", name)
        return rows[0] if rows else None

    def sums(self, st_ino: int, generation: str, start: int, stop: int) -> list[Sum]:
        """Read the checksums of a file that cover any of the bytes [start, stop), in order."""
        with self._lock, readable_errors():
            parts = self._db.execute(
                "SELECT sums FROM sums"
                " WHERE st_ino = ? AND generation = ? AND part BETWEEN ? AND ?",
                (_signed(st_ino), generation, start // SUMS_PART, (stop - 1) // SUMS_PART),
            ).fetchall()
        sums = [found for (packed,) in parts for found in checksums.unpack(packed)]
        return [found for found in sums if checksums.is_within(found, start, stop)]

    def record(self, rows: Iterable[Row]) -> tuple[list[bool], Total]:
        """Insert rows, or merge them with known ones; return which were taken, and the new total.

        A row is not taken (False) if another file has its name. The total is of all mounts' rows.
        """
        with self.transaction():
            sums: list[tuple[int, str, int, bytes]] = []
            added = [self._record(row, sums) for row in rows]
            # In one call: half the time of single calls.
            self._db.executemany("INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?)", sums)
            known = [total for total in added if total is not None]
            self._add(sum(total.bytes for total in known), sum(total.files for total in known))
            return [total is not None for total in added], self.total()

    def mark_synced(self, rows: Iterable[Row]) -> int:
        """Mark rows synced, unless or until files get further ranges; return the number marked."""
        with self.transaction():
            updates = []
            for row in rows:
                crc = self._checksum_of(row, row.ranges, is_synced=True)
                file = (row.name, row.generation, _signed(row.st_ino))
                updates.append((self._boot_id, crc, *file, row.ranges))
            return self._db.executemany(
                "UPDATE files SET is_synced = 1, boot_id = ?, crc = ?"
                " WHERE name = ? AND generation = ? AND st_ino = ? AND ranges = ?",
                updates,
            ).rowcount

    def touch(self, times: Iterable[tuple[float, str, str]]) -> None:
        """Set last-use times, given as (seconds since the epoch, name, generation)."""
        with self.transaction():
            self._db.executemany(
                "UPDATE files SET used_at = ? WHERE name = ? AND generation = ?", times
            )

    def remove(self, name: str, generation: str, st_ino: int) -> Total:
        """Remove a row if it still describes this file; return the new total."""
        with self.transaction():
            row = self.find(name)
            if row is not None and (row.generation, row.st_ino) == (generation, st_ino):
                self._remove(row)
            return self.total()

    def rename(self, name: str, generation: str, st_ino: int, new_name: str) -> None:
        """Rename a file's row, or remove it if a row with the new name exists."""
        with self.transaction():
            row = self.find(name)
            if row is None or (row.generation, row.st_ino) != (generation, st_ino):
                return
            renamed = replace(row, name=new_name)
            crc = self._checksum_of(renamed, row.ranges, is_synced=row.is_synced)
            update = self._db.execute(
                "UPDATE OR IGNORE files SET name = ?, boot_id = ?, crc = ? WHERE name = ?",
                (new_name, self._boot_id, crc, name),
            )
            if not update.rowcount:
                self._remove(row)

    def retain(self, identity: str, names: Mapping[str, str], since: float) -> set[str]:
        """Exclude files from eviction; `names` maps keys of the bucket `identity` to file names.

        `since` is the current time, in seconds since the epoch. Returns the names of these keys'
        other files, which were excluded until now and may be evicted again.
        """
        replaced: set[str] = set()
        with self.transaction():
            for key, name in names.items():
                known = self._db.execute(
                    "SELECT name FROM retained WHERE identity = ? AND key = ?", (identity, key)
                )
                replaced.update(other for (other,) in _typed(known, [str]) if other != name)
                self._db.execute(
                    "INSERT OR REPLACE INTO retained VALUES (?, ?, ?, ?)",
                    (identity, key, name, since),
                )
        return replaced

    def release(
        self, identity: str, keys: KeyRange, stay: Stay, before: float = inf
    ) -> tuple[set[str], KeyRange | None]:
        """Let the files of one page of `keys` be evicted; return (file names, range of keys left).

        The range is None if no keys are left. The files of keys that `stay` returns, and files that
        `retain` has excluded at or after `before` (seconds since the epoch), stay excluded.
        """
        with self.transaction():
            found = self._db.execute(
                "SELECT key, name, since FROM retained"
                " WHERE identity = ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
                (identity, *keys, RETAINED_PAGE),
            )
            rows = _typed(found, [str, str, float])
            names = {key: name for key, name, since in rows if since < before}
            for key in stay(names):
                del names[key]
            self._db.executemany(
                "DELETE FROM retained WHERE identity = ? AND key = ?",
                [(identity, key) for key in names],
            )
        is_more = len(rows) == RETAINED_PAGE
        return set(names.values()), (rows[-1][0] + "\0", keys[1]) if is_more else None

    def retained_of(self, names: Iterable[str]) -> set[str]:
        """The given names whose files must not be evicted."""
        with self._lock:
            return {name for name in names if self.is_retained(name)}

    def is_retained(self, name: str) -> bool:
        """True if the file of this name must not be evicted."""
        with self._lock, readable_errors():
            found = self._db.execute("SELECT 1 FROM retained WHERE name = ?", (name,)).fetchone()
        return found is not None

    def total(self) -> Total:
        """Read the total over all mounts' files; raises DamagedCatalogError for a damaged row."""
        with self._lock, readable_errors():
            totals = self._db.execute("SELECT bytes, files, crc FROM total").fetchall()
        if len(totals) != 1 or _total_checksum(*totals[0][:2]) != totals[0][2]:
            raise DamagedCatalogError("it has no sum of all sizes")
        return Total(*totals[0][:2])

    def _add(self, size: int, files: int) -> None:
        total = self.total()
        sums = total.bytes + size, total.files + files
        self._db.execute(
            "UPDATE total SET bytes = ?, files = ?, crc = ?", (*sums, _total_checksum(*sums))
        )

    def has_changed(self) -> bool:
        """True if another mount has written to the database since the last call."""
        before, self._data_version = self._data_version, self._read_data_version()
        return self._data_version != before

    def close(self) -> None:
        self._db.close()

    def _remove(self, row: Row) -> None:
        # A damaged index may have listed the row twice.
        if self._db.execute("DELETE FROM files WHERE name = ?", (row.name,)).rowcount:
            file = (_signed(row.st_ino), row.generation)
            self._db.execute("DELETE FROM sums WHERE st_ino = ? AND generation = ?", file)
            self._add(-RangeMap.unpack(row.ranges).total, -1)

    def _read_data_version(self) -> int:
        with self._lock, readable_errors():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _record(self, row: Row, sums: list[tuple[int, str, int, bytes]]) -> Total | None:
        """Write a row, add its sums to `sums`; return the total's growth, None if not taken."""
        old = self.find(row.name)
        ranges = RangeMap.unpack(row.ranges)
        before = 0
        if old is not None:
            if (old.generation, old.st_ino) != (row.generation, row.st_ino):
                return None
            merged = RangeMap.unpack(old.ranges)
            before = merged.total
            for start, stop in ranges:
                merged.add(start, stop)
            ranges = merged
        is_synced = old is not None and old.is_synced and ranges.total == before
        packed = ranges.pack()
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.name,
                row.generation,
                _signed(row.st_ino),
                row.size,
                packed,
                ranges.total,
                is_synced,
                self._boot_id,
                row.used_at,
                self._checksum_of(row, packed, is_synced=is_synced),
            ),
        )
        if row.sums:
            sums += self._sums_of(row, is_new=old is None)
        return Total(ranges.total - before, int(old is None))

    def _sums_of(self, row: Row, *, is_new: bool) -> Iterator[tuple[int, str, int, bytes]]:
        if is_new and len(row.sums) == 1:  # a small file
            part = row.sums[0].start // SUMS_PART
            yield _signed(row.st_ino), row.generation, part, checksums.pack(row.sums)
            return
        parts: dict[int, list[Sum]] = {}
        for found in row.sums:
            parts.setdefault(found.start // SUMS_PART, []).append(found)
        for part, sums in parts.items():
            place = (_signed(row.st_ino), row.generation, part)
            if not is_new:
                known = self._db.execute(
                    "SELECT sums FROM sums WHERE st_ino = ? AND generation = ? AND part = ?", place
                ).fetchone()
                sums += checksums.unpack(known[0]) if known is not None else []
            yield *place, checksums.pack(checksums.merged(sums))

    def _checksum_of(self, row: Row, ranges: bytes, *, is_synced: bool) -> int:
        """Compute the checksum of a row with the current boot id."""
        return _checksum(
            row.name, row.generation, row.st_ino, row.size, ranges, is_synced, self._boot_id
        )

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lock the database and yield it for queries."""
        with self._lock, readable_errors():
            yield self._db

    @contextmanager
    def transaction(self, *, is_durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Lock the database and yield it for a transaction; if `is_durable`, its commit syncs."""
        with self._lock, readable_errors():
            if is_durable:
                self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                # After a failure, unless SQLite has ended the transaction itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if is_durable:
                    self._db.execute("PRAGMA synchronous=NORMAL")


def is_text(path: str) -> bool:
    """True if a path is valid UTF-8, as all keys are; the arguments of a command may not be."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def key_ranges(path: str) -> list[KeyRange]:
    """The ranges of the keys at a path and below it; all keys for "", none for invalid UTF-8."""
    if not is_text(path):
        return []
    # "0" is the character after "/".
    return [(path, path + "\0"), (path + "/", path + "0")] if path else [("", b"")]


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    with ExitStack() as undo:
        undo.callback(db.close)
        db.isolation_level = None
        _switch_to_wal(db)
        # Losing the last commits is harmless: a row is marked as synced only after its data.
        db.execute("PRAGMA synchronous=NORMAL")
        undo.pop_all()
    return db


def _switch_to_wal(db: sqlite3.Connection) -> None:
    """Turn on the write-ahead log; retry while other connections do so: SQLite does not wait."""
    deadline = monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or monotonic() > deadline:
                raise
        sleep(0.01)


# The columns in the order of `_TYPES`; crc is the `_checksum` of the columns before `used_at`.
_COLUMNS = (
    "name, generation, st_ino, size, ranges, is_synced, boot_id, used_at, bytes, crc,"
    " EXISTS (SELECT 1 FROM retained WHERE retained.name = files.name)"
)
_TYPES = [str, str, int, int, bytes, int, str, float, int, int, int]


def _typed(found: sqlite3.Cursor, types: list[type]) -> list[tuple[Any, ...]]:
    """Fetch all rows; raises DamagedCatalogError if any value is of another type."""
    rows: list[tuple[Any, ...]] = found.fetchall()
    if any([*map(type, row)] != types for row in rows):
        raise DamagedCatalogError("a row has values of wrong types")
    return rows


def _row(values: tuple[Any, ...]) -> Row:
    """Make a `Row` from the columns of a row; raises DamagedCatalogError if a value is wrong."""
    name, generation, st_ino, size, ranges, is_synced, _, used_at, total, crc, is_retained = values
    if _checksum(*values[:7]) != crc:
        raise DamagedCatalogError(f"the row of {name!r} does not match its checksum")
    if not isfinite(used_at) or len(ranges) % 16 or RangeMap.unpack(ranges).total != total:
        raise DamagedCatalogError(f"the row of {name!r} is damaged")
    place = name, generation, st_ino % (1 << 64)
    return Row(*place, size, ranges, used_at, bool(is_synced), is_retained=bool(is_retained))


def _checksum(
    name: str, generation: str, st_ino: int, size: int, ranges: bytes, is_synced: bool, boot_id: str
) -> int:
    fields = f"{name}\0{generation}\0{_signed(st_ino)}\0{size}\0{int(is_synced)}\0{boot_id}\0"
    return zlib.crc32(ranges, zlib.crc32(fields.encode()))


def _inode(path: Path) -> int:
    """The inode number of a file, or 0 if there is no file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _total_checksum(size: object, files: object) -> int:
    return zlib.crc32(f"{size}\0{files}".encode())


def _signed(st_ino: int) -> int:
    """Convert a 64-bit inode number to the signed integer that SQLite can store."""
    return st_ino - (1 << 64) if st_ino >= 1 << 63 else st_ino
