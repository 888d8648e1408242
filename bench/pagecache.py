"""The page cache: drops it, and fills it with chosen files."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 1024 * 1024


def settle() -> None:
    """Sync everything that was written to the disk, so that no later writer waits for it."""
    os.sync()


def drop() -> None:
    """Sync, and drop the page cache, the inodes and the directory entries."""
    settle()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def load(directory: Path) -> None:
    """Read every file below a directory once; sparse files cost their holes, too."""
    buffer = bytearray(MIB)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
