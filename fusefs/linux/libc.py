"""The system calls that Python does not offer, through the C library."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # the keeper imports this module, which therefore imports little
if TYPE_CHECKING:
    import mmap

c_library = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_PR_SET_DUMPABLE = 4
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
# Modes of fallocate(2).
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10
# Programs may not use this mode: it moves the data behind the range, so all of the object changes.
COLLAPSE_RANGE = 0x08
ALLOCATION_MODES = KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Call mount(2); raises OSError with the kernel's errno."""
    check(
        c_library.mount(
            source.encode(),
            os.fsencode(target),
            kind.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        ),
        target,
    )


def umount(target: str, flags: int) -> None:
    """Call umount2(2); raises OSError with the kernel's errno."""
    check(c_library.umount2(os.fsencode(target), flags), target)


def lock_memory(memory: mmap.mmap) -> None:
    """Lock a fresh private mapping in memory (mlock); raises OSError if the limits forbid that."""
    for at in range(0, len(memory), _PAGE_SIZE):
        memory[at] = 0
    start = ctypes.c_char.from_buffer(memory)
    check(c_library.mlock(ctypes.byref(start), ctypes.c_size_t(len(memory))), "mlock")


def allocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2): allocate, zero, punch out or collapse a part of a file. Blocks.

    Raises:
        OSError: EOPNOTSUPP or EINVAL, the file system can't; ENOSPC, the disk is full.
    """
    arguments = (ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length))
    check(c_library.fallocate64(fd, *arguments), "fallocate")


def forbid_inspection() -> None:
    """Make this process undumpable, so that its user can't trace it, and root owns /proc/PID."""
    set_process_option(_PR_SET_DUMPABLE, 0)


def set_process_option(option: int, *values: int) -> None:
    """Call prctl(2) with up to four values, and 0 for the rest; raises OSError with its errno."""
    four = (*values, 0, 0, 0, 0)[:4]
    check(c_library.prctl(option, *(ctypes.c_ulong(value) for value in four)), "prctl")


def system_call(number: int, *arguments: object) -> int:
    """Call a system call that the C library may lack; return its result, or raise OSError."""
    # Without a prototype ctypes passes an int as 32 bits, so each is widened.
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(c_library.syscall(ctypes.c_long(number), *widened))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def check(result: int, target: str) -> None:
    """Raise OSError, with errno and file name `target`, if the `result` of a C call is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
