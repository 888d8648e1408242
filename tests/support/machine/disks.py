"""Small disks of a test's own, and what a cache has of a disk."""

import contextlib
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size_mib: int, inodes: int = 0) -> Iterator[Path]:
    """A tmpfs at `path`, with so many inodes if they are given.

    The test is skipped where none can be mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    options = f"size={size_mib}m" + (f",nr_inodes={inodes}" if inodes else "")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", os.fspath(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", os.fspath(path)], check=True)


def taken_by(cache: Path) -> int:
    """The bytes that the files of a cache directory take."""
    taken = 0
    for path in cache.glob("*/objects/*/*"):
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return taken


def recorded_by(cache: Path) -> int:
    """The bytes of which the catalogs of a cache directory know."""
    recorded = 0
    for path in cache.glob("*/catalog.sqlite3"):
        with contextlib.closing(sqlite3.connect(path)) as db:
            recorded += db.execute("SELECT bytes FROM total").fetchone()[0]
    return recorded


def fill(disk: Path) -> Path:
    """Take all the space that is left, and return the file that does."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    return path
