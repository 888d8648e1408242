"""What is on the cache disk, kept across restarts: one sqlite3 table.

A row says which file holds which object version and which ranges of it have
arrived. Rows are written after the bytes: a range in a row is in the file,
also after a SIGKILL, because the page cache outlives the process. It does
not outlive the machine, so a row carries the boot id, and after another boot
only those rows count whose file was fdatasync'ed before the row was marked so.

Several mounts may share a directory. Every update is therefore conditional on
the file's generation and inode number (another mount may have evicted and
fetched it again), ranges are merged with what the row holds, and the sum of
all sizes is a row of its own that changes in the same transaction.

All calls block, and run in one thread at a time (see files.py).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from fusefs.cache.ranges import RangeMap

logger = logging.getLogger("fusefs.cache")

FORMAT = 1

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
    used_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
"""


class DamagedCatalogError(Exception):
    """The database can't be used; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """One file: `name` is the hash of what it holds, `used_at` in seconds since the epoch."""

    name: str
    generation: str
    st_ino: int
    size: int
    ranges: bytes
    used_at: float
    is_synced: bool = False


# How long another mount may be in the way.
BUSY_S = 30.0


class Catalog:
    """The table of one cache directory, as one mount uses it."""

    def __init__(self, path: Path, boot_id: str, *, in_any_case: bool = False) -> None:
        """Open or create the database; `in_any_case` also if the disk is full, in memory then.

        Raises:
            DamagedCatalogError: it is not a database, or of another format.
            sqlite3.OperationalError: it can't be opened for another reason.
        """
        self._boot_id = boot_id
        try:
            self._db = _connected(path)
            self._prepare(path)
        except sqlite3.OperationalError:
            # Locked, or the disk is full: nothing is wrong with the database.
            if not in_any_case:
                raise
            logger.warning("%s can't be written: what arrives is forgotten at the end", path)
            self._db = sqlite3.connect(":memory:", check_same_thread=False)
            self._db.isolation_level = None
            self._prepare(path)
            self._copy(path)
        except sqlite3.DatabaseError as error:
            raise DamagedCatalogError(f"{path}: {error}") from error
        self._data_version = self._read_data_version()

    def _prepare(self, path: Path) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, FORMAT):
            raise DamagedCatalogError(f"{path} has format {version}, this is format {FORMAT}")
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
            # A row that was cut somewhere tells nothing.
            self._db.execute("DELETE FROM files WHERE length(ranges) % 16")
            # What was not on the disk when the machine stopped is not to be trusted.
            self._db.execute(
                "DELETE FROM files WHERE boot_id != ? AND NOT is_synced", (self._boot_id,)
            )
            self._db.execute("UPDATE total SET bytes = (SELECT coalesce(sum(bytes), 0) FROM files)")

    def _copy(self, path: Path) -> None:
        """Know what the database tells without its log; a row whose file is gone does no harm."""
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as there:
                rows = there.execute(
                    f"SELECT {_COLUMNS} FROM files WHERE is_synced OR boot_id = ?", (self._boot_id,)
                ).fetchall()
        except sqlite3.Error as error:
            logger.info("%s can't be read: %s", path, error)
            return
        self.record(_row(values) for values in rows)

    def rows(self) -> list[Row]:
        """All files, least recently used first."""
        return [
            _row(values)
            for values in self._db.execute(f"SELECT {_COLUMNS} FROM files ORDER BY used_at")
        ]

    def find(self, name: str) -> Row | None:
        values = self._db.execute(
            f"SELECT {_COLUMNS} FROM files WHERE name = ?", (name,)
        ).fetchone()
        return _row(values) if values is not None else None

    def record(self, rows: Iterable[Row]) -> tuple[list[bool], int]:
        """Insert or extend rows; tell for each whether it is the row's file, and the total bytes.

        A row of another generation is left alone, and the answer for it is False.
        """
        with self._transaction():
            accepted = [self._record(row) for row in rows]
            return accepted, self.total_bytes()

    def mark_synced(self, rows: Iterable[Row]) -> None:
        """These files with these ranges are safely on the disk; more ranges make them unsafe."""
        with self._transaction():
            self._db.executemany(
                "UPDATE files SET is_synced = 1"
                " WHERE name = ? AND generation = ? AND st_ino = ? AND ranges = ?",
                [(row.name, row.generation, row.st_ino, row.ranges) for row in rows],
            )

    def touch(self, times: Iterable[tuple[float, str, str]]) -> None:
        """Set when files were last used: (seconds since the epoch, name, generation) of each."""
        with self._transaction():
            self._db.executemany(
                "UPDATE files SET used_at = ? WHERE name = ? AND generation = ?", times
            )

    def remove(self, name: str, generation: str, st_ino: int) -> int:
        """Remove a row if it is still of this file; return the total bytes."""
        with self._transaction():
            self._remove(name, generation, st_ino)
            return self.total_bytes()

    def rename(self, name: str, generation: str, st_ino: int, new_name: str) -> None:
        """Give a file's row another name; it goes if there is a row of that name."""
        file = (name, generation, st_ino)
        with self._transaction():
            self._db.execute(
                "UPDATE OR IGNORE files SET name = ?"
                " WHERE name = ? AND generation = ? AND st_ino = ?",
                (new_name, *file),
            )
            self._remove(*file)

    def total_bytes(self) -> int:
        """The bytes that all rows of all mounts stand for."""
        return int(self._db.execute("SELECT bytes FROM total").fetchone()[0])

    def has_changed(self) -> bool:
        """Whether another mount has written since this was last asked."""
        before, self._data_version = self._data_version, self._read_data_version()
        return self._data_version != before

    def close(self) -> None:
        self._db.close()

    def _remove(self, name: str, generation: str, st_ino: int) -> None:
        found = self._db.execute(
            "SELECT bytes FROM files WHERE name = ? AND generation = ? AND st_ino = ?",
            (name, generation, st_ino),
        ).fetchone()
        if found is not None:
            self._db.execute("DELETE FROM files WHERE name = ?", (name,))
            self._db.execute("UPDATE total SET bytes = bytes - ?", found)

    def _read_data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _record(self, row: Row) -> bool:
        old = self.find(row.name)
        ranges = RangeMap.unpack(row.ranges)
        before = 0
        if old is not None:
            if (old.generation, old.st_ino) != (row.generation, row.st_ino):
                return False
            merged = RangeMap.unpack(old.ranges)
            before = merged.total
            for start, stop in ranges:
                merged.add(start, stop)
            ranges = merged
        is_synced = old is not None and old.is_synced and ranges.total == before
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.name,
                row.generation,
                row.st_ino,
                row.size,
                ranges.pack(),
                ranges.total,
                is_synced,
                self._boot_id,
                row.used_at,
            ),
        )
        self._db.execute("UPDATE total SET bytes = bytes + ?", (ranges.total - before,))
        return True

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    db.isolation_level = None
    _switch_to_wal(db)
    # A lost commit only forgets; a synced row is committed after its data.
    db.execute("PRAGMA synchronous=NORMAL")
    return db


def _switch_to_wal(db: sqlite3.Connection) -> None:
    """Turn on the write-ahead log; while others do, SQLite does not wait by itself."""
    deadline = monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or monotonic() > deadline:
                raise
        sleep(0.01)


_COLUMNS = "name, generation, st_ino, size, ranges, used_at, is_synced"


def _row(values: tuple[str, str, int, int, bytes, float, int]) -> Row:
    name, generation, st_ino, size, ranges, used_at, is_synced = values
    return Row(name, generation, st_ino, size, ranges, used_at, bool(is_synced))
