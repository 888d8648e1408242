"""fallocate(2) with its modes and sync_file_range(2), which Python's os lacks."""

from __future__ import annotations

import ctypes
import os

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10
# The others move what is behind, which would be another object altogether.
MODES = KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE

# SYNC_FILE_RANGE_WRITE
_WRITE = 0x02

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


def begin_writing(fd: int, start: int, stop: int) -> None:
    """Have the disk begin to write a range of a file, without waiting for its end. Blocks.

    It waits where the disk has all it can take. No promise and no error: fsync tells both.
    """
    offset, size = ctypes.c_int64(start), ctypes.c_int64(stop - start)
    _libc.sync_file_range(fd, offset, size, ctypes.c_uint(_WRITE))
