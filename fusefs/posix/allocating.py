"""fallocate(2) with its modes, of which Python's os has the first alone."""

from __future__ import annotations

import ctypes
import os

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10
# The others move what is behind, which would be another object altogether.
MODES = KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE

_libc = ctypes.CDLL(None, use_errno=True)


def allocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Give a part of a file disk space or zeros. Blocks.

    Raises:
        OSError: EOPNOTSUPP, the file system can't; ENOSPC, the disk is full.
    """
    arguments = (ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length))
    if _libc.fallocate64(fd, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
