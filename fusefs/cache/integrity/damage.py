"""Detection and removal of damaged databases of the cache.

A disk that flips bits, or a program that writes into the cache directory, can
damage a database. SQLite reports most damage (SQLITE_CORRUPT, SQLITE_NOTADB), and
rows carry checksums for the rest. A damaged database is removed, and the cached
files are fetched again.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from fusefs.linux.files import closing

# Suffixes of a database's files. The database itself is removed last: a write-ahead
# log left alone by a kill would be read into the next database of that name.
_PARTS = ("-wal", "-shm", "")

# Errors not caused by the content (https://sqlite.org/rescode.html): the disk is
# full or fails, or another process holds a lock.
_OUTER_CAUSES = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_MISUSE,
}
# The file is shorter than its header says, or its file system reports it as damaged.
_DAMAGED_FILE = (sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)


class DamagedCatalogError(sqlite3.DatabaseError):
    """The database's content differs from what was written."""


def is_damage(error: sqlite3.Error) -> bool:
    """True if an error is caused by the database's content, not by the disk or a process."""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a wrong call, for example on a closed database
    # Errors of Python itself, for example about invalid UTF-8, have no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code in _DAMAGED_FILE or code & 0xFF not in _OUTER_CAUSES


def check_header(path: Path) -> None:
    """Check a database's header for damage that SQLite would take for a newer, read-only format.

    Bytes 18 and 19 must be 1, or 2 with a write-ahead log
    (https://sqlite.org/fileformat.html#the_database_header).

    Raises:
        DamagedCatalogError: the bytes have other values.
    """
    try:
        with path.open("rb") as file:
            versions = file.read(20)[18:]
    except FileNotFoundError:
        return
    if any(version not in (1, 2) for version in versions):
        raise DamagedCatalogError("its header has an unknown format")


def check_order(after: Any, keys: Iterable[Any]) -> None:
    """Raise DamagedCatalogError unless a page's keys ascend from `after`, so that paging ends."""
    if any(key <= before for before, key in pairwise([after, *keys])):
        raise DamagedCatalogError("its rows are out of order")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn a UnicodeDecodeError of the block, caused by damaged text, into a DatabaseError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"text that is no UTF-8: {error}") from error


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock a directory, so that no other process removes a database there. Blocks."""
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def remove(path: Path) -> None:
    """Remove a database with its log files, even if in use; raises OSError. Blocks."""
    for part in _PARTS:
        Path(f"{path}{part}").unlink(missing_ok=True)
