"""The system calls that Python does not offer, through the C library."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

logger = logging.getLogger("fusefs.session")

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_PR_SET_DUMPABLE = 4
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_FALLOC_FL_COLLAPSE_RANGE = 8


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2).

    Raises:
        OSError: with the kernel's errno.
    """
    _check(
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            kind.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        ),
        target,
    )


def umount(target: str, flags: int) -> None:
    """umount2(2).

    Raises:
        OSError: with the kernel's errno.
    """
    _check(_libc.umount2(os.fsencode(target), flags), target)


def lock_memory(memory: mmap.mmap) -> None:
    """Make private memory resident, and keep it so where the limits allow it."""
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 0
    start = ctypes.c_char.from_buffer(memory)
    if _libc.mlock(ctypes.byref(start), ctypes.c_size_t(len(memory))) < 0:
        logger.debug("can't lock memory: %s", os.strerror(ctypes.get_errno()))


def collapse(fd: int, size: int) -> None:
    """Take the first `size` bytes, a multiple of the block size, out of a file.

    Raises:
        OSError: EOPNOTSUPP or EINVAL where the file system can't do that.
    """
    _fallocate(fd, _FALLOC_FL_COLLAPSE_RANGE, 0, size)


def punch(fd: int, start: int, size: int) -> None:
    """Give the blocks of a part of a file back, which reads as zeros then.

    Raises:
        OSError: EOPNOTSUPP where the file system can't do that.
    """
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, size)


def _fallocate(fd: int, mode: int, start: int, size: int) -> None:
    result = _libc.fallocate64(fd, mode, ctypes.c_longlong(start), ctypes.c_longlong(size))
    _check(result, "fallocate")


def forbid_inspection() -> None:
    """Have no process without privilege read or trace this one, and no core be dumped of it.

    Its files in /proc belong to root from here on.
    """
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0), "PR_SET_DUMPABLE")


def _check(result: int, target: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
