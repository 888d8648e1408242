"""Damaged databases of the cache: how they are recognised, and their removal.

A disk that flips bits, or a program that writes into the cache directory, can
leave anything in a database. SQLite reports most of it (SQLITE_CORRUPT,
SQLITE_NOTADB), and rows carry checksums for the rest. A damaged database is removed: what
it knew is fetched again.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What belongs to a database. Its file goes last: a write-ahead log that a kill
# leaves without it would be read into the next database of that name.
_PARTS = ("-wal", "-shm", "")

# Errors that the content does not cause (https://sqlite.org/rescode.html): the
# disk is full or fails, or another process is in the way.
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
# A file that is shorter than its header says, or that its file system finds damaged.
_DAMAGED_FILE = (sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS)


class DamagedCatalogError(sqlite3.DatabaseError):
    """The content of the database is not what was written there."""


def is_damage(error: sqlite3.Error) -> bool:
    """True if an error is about the content of the database, and not about disk or processes."""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a wrong call: of a closed database, for example
    # Python's own errors, about text that is no UTF-8 for example, carry no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code in _DAMAGED_FILE or code & 0xFF not in _OUTER_CAUSES


def check_header(path: Path) -> None:
    """Find damage that SQLite takes for a newer format, which it says is read-only.

    Bytes 18 and 19 are 1, or 2 with a write-ahead log
    (https://sqlite.org/fileformat.html#the_database_header).

    Raises:
        DamagedCatalogError: it is that.
    """
    try:
        with path.open("rb") as file:
            versions = file.read(20)[18:]
    except FileNotFoundError:
        return
    if any(version not in (1, 2) for version in versions):
        raise DamagedCatalogError("its header has an unknown format")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Raise damaged text that Python can't decode as an error of the database."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"text that is no UTF-8: {error}") from error


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keep out other processes that would remove a database here. Blocks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a database and what belongs to it, even if in use; raises OSError. Blocks."""
    for part in _PARTS:
        Path(f"{path}{part}").unlink(missing_ok=True)
