"""Damage to what is on a cache disk."""

import os
from pathlib import Path


def cached(cache: Path) -> list[Path]:
    """The files of a cache directory that hold objects, or parts of them."""
    return sorted(cache.glob("*/objects/*/*"))


def flip(path: Path, offset: int = 0) -> None:
    """Change one bit of the byte at `offset`, as a disk does that errs."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0x10]), offset)
    finally:
        os.close(fd)
