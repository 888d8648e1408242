"""Names a process in the list of processes by role and mount: `fusefs daemon s3://b/ /data`.

The title takes the place of the command line in this process's memory (proc_pid_cmdline(5)), and
can't be longer. The keeper imports this, so it is small.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def set_title(role: str, source: str, mountpoint: str, *, spared: int = 0) -> None:
    """Give this process a title, but for the last `spared` bytes, where the kernel allows it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/comm", "w") as comm:
            comm.write(f"fusefs.{role}")
        with open("/proc/self/stat", "rb") as stat:
            # arg_start and arg_end are the fields 48 and 49; the first here is the third.
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46]) - spared
        # Behind it stays the interpreter's path, by which a package knows its processes.
        program = b"\0" + os.fsencode(sys.orig_argv[0]) + b"\0"
        title = os.fsencode(f"fusefs {role} {source} {mountpoint}")
        title = title[: end - start - len(program)] + program
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(title.ljust(end - start, b"\0"))
