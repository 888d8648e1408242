"""What /proc shows of this process: its command line, its environment and its name.

prctl(2) with PR_SET_MM_MAP, which the kernel has for restored processes (CONFIG_CHECKPOINT_RESTORE)
and which takes no privilege.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

from fusefs.linux.libc import set_process_option

_PR_SET_NAME = 15
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF  # the program's file stays
# Fields of /proc/PID/stat as proc(5) numbers them, and here as they are behind the name.
_START_CODE, _END_CODE, _START_STACK = 26 - 3, 27 - 3, 28 - 3
_START_DATA, _END_DATA, _START_BRK = 45 - 3, 46 - 3, 47 - 3

# What the kernel shows has to stay in memory.
_shown: list[mmap.mmap] = []


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_as(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show these, and the program's name, as if this process had executed it so.

    Raises:
        OSError: the kernel does not have it, or a filter of system calls forbids it.
    """
    command = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    variables = b"".join(
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environment.items()
    )
    # Private: the kernel shows anonymous memory alone.
    memory = mmap.mmap(
        -1, len(command) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    memory.write(command + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(command), begin + len(command) + len(variables)
    with open("/proc/self/stat", "rb") as file:
        fields = [0, *map(int, file.read().rpartition(b")")[2].split()[1:])]
    bounds = [
        fields[number] for number in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK)
    ]
    program_break = ctypes.CDLL(None).sbrk
    program_break.restype = ctypes.c_void_p
    given = _MemoryMap(
        *bounds,
        program_break(0),
        fields[_START_STACK],
        begin,
        middle,
        middle,
        end,
        0,
        0,
        _NO_FILE,
    )
    set_process_option(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(given), ctypes.sizeof(given))
    _shown.append(memory)
    name = ctypes.create_string_buffer(os.fsencode(os.path.basename(arguments[0]))[:15])
    set_process_option(_PR_SET_NAME, ctypes.addressof(name))
