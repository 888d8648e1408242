"""Which cached files are never evicted: those at or below the paths of `fusefs pin`.

A pin names a key of a bucket, or the prefix before a slash, and so every version
of the objects there. The pins of all mounts that share a directory are in one database,
`pins.sqlite3`, which nothing else is in, and which so outlives the catalog. What is
pinned is on the disk when the call returns, at a cost that does not grow with the
number of pins. In memory each mount has 8 bytes of each pin of its bucket, and reads
only what was added since; after an unpin by another mount it reads all of them again.

Cached files are retained one by one: the catalog has a row with the key and the
name of each (`Catalog.retain`), because a mount's evictor knows of the other mounts'
files only the names. A file gets its row when a version of a pinned key is used or
fetched. The row of a newer version replaces it, so one version of each object is retained.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from fusefs.cache.integrity.damage import is_damage

logger = logging.getLogger("fusefs.cache")

RECORD = "pins.sqlite3"
# Pins that are read or removed at once: 1 MB.
PAGE = 10_000
# How long another mount may be in the way.
BUSY_S = 30.0
FORMAT = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (number INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS pins (
    added INTEGER PRIMARY KEY AUTOINCREMENT,
    bucket INTEGER NOT NULL,
    key TEXT NOT NULL,
    UNIQUE (bucket, key)
);
CREATE TABLE IF NOT EXISTS removals (count INTEGER NOT NULL);
INSERT INTO removals SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM removals);
"""
# Whether a pin is one of those that are to be removed.
Wanted = Callable[[str], bool]
# The first key, and the first behind the last: for SQLite bytes are greater than any text.
KeyRange = tuple[str, str | bytes]
_END = b""


class HashSet:
    """Strings that are known by their hashes. Changed by a thread at a time, read at any time."""

    def __init__(self, pages: Iterable[list[str]] = ()) -> None:
        values: list[int] = []
        for page in pages:
            values += sorted(map(hash, page))
        self._sorted = array("q", sorted(values))
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._added) - len(self._removed)

    def __contains__(self, key: object) -> bool:
        value = hash(key)
        if value in self._added:
            return True
        if value in self._removed:
            return False
        known = self._sorted
        at = bisect_left(known, value)
        return at < len(known) and known[at] == value

    def add(self, keys: Iterable[str]) -> None:
        """Add strings that are not in it."""
        self._added.update(map(hash, keys))
        self._tidy()

    def remove(self, keys: Iterable[str]) -> None:
        """Remove strings that are in it."""
        for value in map(hash, keys):
            if value in self._added:
                self._added.remove(value)
            else:
                self._removed.add(value)
        self._tidy()

    def _tidy(self) -> None:
        added, removed = self._added, self._removed
        if len(added) + len(removed) > max(PAGE, len(self._sorted) // 8):
            stay = [value for value in self._sorted if value not in removed]
            tidied = array("q", sorted(stay + sorted(added)))
            # With nothing between: the event loop looks at them while a thread is here.
            self._sorted, self._removed, self._added = tidied, set(), set()


def above(key: str) -> Iterator[str]:
    """The pins that a key may be retained for: itself, the prefixes it is below, and ""."""
    yield key
    at = key.rfind("/")
    while at >= 0:
        yield key[:at]
        at = key.rfind("/", 0, at)
    if key:
        yield ""


def covers(pins: Container[str], key: str) -> bool:
    """Whether a key is one of the pins, or below one; "" pins everything."""
    return any(pin in pins for pin in above(key))


def is_text(path: str) -> bool:
    """Whether a path can be part of a key: one of a command line may have any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def key_ranges(path: str) -> list[KeyRange]:
    """The keys at a path and below it; "" is above all."""
    if not is_text(path):
        return []
    # "0" is the character after "/".
    return [(path, path + "\0"), (path + "/", path + "0")] if path else [("", _END)]


class Retention:
    """The pins of one bucket in one cache directory: keys and prefixes without their last slash.

    `covers` and `pins_above` do not block, `refresh_now` and `covered` do.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        """Read the record."""
        self._directory = directory
        self._identity = identity
        self._threads = trio.CapacityLimiter(4)
        # Of what follows `_lock` is held, but for reading `_pins`.
        self._lock = threading.RLock()
        self._pins = HashSet()
        self._db: sqlite3.Connection | None = None
        self._st_ino = 0
        # What is known of the record: its version, the latest pin and how many removals.
        self._version = self._added = self._removals = -1
        self._counted = ("", -1, -1), 0
        self._trouble = ""
        self.refresh_now()

    def covers(self, key: str) -> bool:
        """Whether the files of a key are retained."""
        return len(self._pins) > 0 and covers(self._pins, key)

    def pins_above(self, key: str) -> list[str]:
        """The pins that a key is retained for."""
        return sorted(pin for pin in above(key) if pin in self._pins)

    def covered(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose files are retained, by what is on record now."""
        self.refresh_now()
        return {key for key in keys if self.covers(key)}

    async def refresh(self) -> bool:
        """See whether another mount has changed the pins, and return whether one has."""
        return await trio.to_thread.run_sync(self.refresh_now, limiter=self._threads)

    async def count(self, path: str) -> int:
        """How many pins are at or below a path ("": all); 0 if they can't be read."""
        if not path or not self._pins:
            return len(self._pins)
        return await trio.to_thread.run_sync(self._count, path, limiter=self._threads)

    async def add(self, pins: Iterable[str]) -> None:
        """Put pins on record; they are on the disk when this returns.

        Raises:
            OSError: the record can't be written.
        """
        await trio.to_thread.run_sync(self._add, list(pins), limiter=self._threads)

    async def remove(self, path: str, is_wanted: Wanted) -> int:
        """Take those pins at or below a path off the record that are wanted; return how many.

        Not cancelled. A process that is killed has removed some of them, or all.

        Raises:
            OSError: the record can't be written.
        """
        count = 0
        for keys in key_ranges(path):
            left: KeyRange | None = keys
            while left is not None:
                part, left = await trio.to_thread.run_sync(
                    self._remove, left, is_wanted, limiter=self._threads
                )
                count += part
        return count

    def refresh_now(self) -> bool:
        """As `refresh`. What is known stays if the record can't be read."""
        try:
            with self._lock:
                has_changed = self._refresh()
        except (OSError, sqlite3.Error) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("the pins can't be read: %s", error)
            return False
        self._trouble = ""
        return has_changed

    def _refresh(self) -> bool:
        db = self._open()
        if db is None:
            had_pins, self._pins = len(self._pins) > 0, HashSet()
            return had_pins
        version = db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return False
        self._read(db)
        self._version = version
        return True

    def _count(self, path: str) -> int:
        try:
            with self._lock:
                db = self._open()
                known = (path, self._added, self._removals)
                if db is not None and self._counted[0] != known:
                    bucket = self._bucket(db)
                    counts = [
                        db.execute(
                            "SELECT count(*) FROM pins WHERE bucket = ? AND key >= ? AND key < ?",
                            (bucket, *keys),
                        ).fetchone()[0]
                        for keys in key_ranges(path)
                    ]
                    self._counted = known, sum(counts)
                return self._counted[1] if db is not None else 0
        except (OSError, sqlite3.Error) as error:
            logger.warning("the pins can't be counted: %s", error)
            return 0

    def _add(self, pins: list[str]) -> None:
        with self._changing() as db:
            _insert(db, self._identity, pins)
            self._read(db)

    def _remove(self, pins: KeyRange, is_wanted: Wanted) -> tuple[int, KeyRange | None]:
        """Remove a page of pins; return how many, and what pins are left to be looked at."""
        with self._lock:
            with self._changing() as db:
                bucket = self._bucket(db)
                found = db.execute(
                    "SELECT key FROM pins WHERE bucket = ? AND key >= ? AND key < ?"
                    " ORDER BY key LIMIT ?",
                    (bucket, *pins, PAGE),
                )
                keys = [str(key) for (key,) in found]
                gone = [key for key in keys if is_wanted(key)]
                db.executemany(
                    "DELETE FROM pins WHERE bucket = ? AND key = ?", [(bucket, key) for key in gone]
                )
                db.execute("UPDATE removals SET count = count + ?", (len(gone),))
            self._pins.remove(gone)
            self._removals += len(gone)
        return len(gone), (keys[-1] + "\0", pins[1]) if len(keys) == PAGE else None

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; all of the record is known at its start.

        Raises:
            OSError: the record can't be written.
        """
        with self._lock:
            try:
                db = self._open(is_needed=True)
                assert db is not None
                db.execute("BEGIN IMMEDIATE")
                try:
                    self._read(db)
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    self._version = self._removals = -1  # all is read again
                    raise
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
            except sqlite3.Error as error:
                path = self._directory / RECORD
                why = (
                    "is damaged: remove it, and pin again" if is_damage(error) else "is not written"
                )
                raise OSError(f"{path} {why} ({error})") from error

    def _read(self, db: sqlite3.Connection) -> None:
        """Know all pins: those that were added, or all if some were removed."""
        counts = db.execute("SELECT count FROM removals").fetchall()
        if len(counts) != 1 or not isinstance(counts[0][0], int):
            # One changed bit makes it look empty, of which SQLite knows nothing.
            raise sqlite3.DatabaseError("it has no count of removals")
        removals = counts[0][0]
        if removals != self._removals:
            self._added = 0
            self._pins = HashSet(self._new(db))
            self._removals = removals
        else:
            for page in self._new(db):
                self._pins.add(page)

    def _new(self, db: sqlite3.Connection) -> Iterator[list[str]]:
        """The pins that are not known yet, page by page."""
        bucket = self._bucket(db)
        while rows := db.execute(
            # With "+" SQLite goes by the order in which they were added.
            "SELECT added, key FROM pins WHERE +bucket = ? AND added > ? ORDER BY added LIMIT ?",
            (bucket, self._added, PAGE),
        ).fetchall():
            self._added = rows[-1][0]
            yield [str(key) for _, key in rows]

    def _bucket(self, db: sqlite3.Connection) -> int | None:
        found = db.execute("SELECT number FROM buckets WHERE identity = ?", (self._identity,))
        row = found.fetchone()
        return None if row is None else int(row[0])

    def _open(self, *, is_needed: bool = False) -> sqlite3.Connection | None:
        """The record, created if it `is_needed`; None if there is none.

        Raises:
            OSError, sqlite3.Error: it can't be opened.
        """
        path = self._directory / RECORD
        st_ino = path.stat().st_ino if path.exists() else 0
        if self._db is not None and st_ino != self._st_ino:
            self.close()
        if self._db is None and (st_ino or is_needed):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = _connected(path)
            self._st_ino = path.stat().st_ino
        return self._db

    def close(self) -> None:
        """The record is opened again when it is used. Blocks."""
        with self._lock:
            if self._db is not None:
                self._db.close()
            self._db = None
            self._version = self._removals = -1


def _connected(path: Path) -> sqlite3.Connection:
    # Without a write-ahead log: if it is damaged, there is one file to remove.
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous=EXTRA")
        if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _insert(db: sqlite3.Connection, identity: str, pins: Iterable[str]) -> None:
    db.execute("INSERT OR IGNORE INTO buckets (identity) VALUES (?)", (identity,))
    db.executemany(
        "INSERT OR IGNORE INTO pins (bucket, key) SELECT number, ? FROM buckets WHERE identity = ?",
        ((pin, identity) for pin in pins),
    )
