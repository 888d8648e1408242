"""Process titles for `ps`, with role and mount: `fusefs daemon s3://b/ /data`.

The title overwrites the command line in this process's memory (proc_pid_cmdline(5)), and can't be
longer than that. The keeper imports this module, so it is small.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def set_title(role: str, source: str, mountpoint: str, *, spared: int = 0) -> None:
    """Set the process title, if the kernel allows; keep the command line's last `spared` bytes."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/comm", "w") as comm:
            comm.write(f"fusefs.{role}")
        with open("/proc/self/stat", "rb") as stat:
            # arg_start and arg_end are fields 48 and 49; the list begins with field 3.
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46]) - spared
        # The interpreter's path follows the title: packages identify their processes by it.
        program = b"\0" + os.fsencode(sys.orig_argv[0]) + b"\0"
        title = os.fsencode(f"fusefs {role} {source} {mountpoint}")
        title = title[: end - start - len(program)] + program
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(title.ljust(end - start, b"\0"))
