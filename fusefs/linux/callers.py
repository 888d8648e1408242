"""Looks at the processes that make requests: is one going on, or does it end, and how?

Also: will a process that has closed a descriptor close another one of the same file?

The kernel names a request's process by its number in the PID namespace of the mount, and by 0 where
it has none there. A look costs two reads below /proc. The daemon takes it, or the keeper for it, as
/proc may show a user its own processes alone; so little is imported.

proc_pid_status(5) and proc_pid_stat(5) have the fields. complete_signal() in kernel/signal.c marks
every thread of a process that a signal ends with SIGKILL, and leaves the signal itself pending;
do_exit() in kernel/exit.c sets PF_EXITING and the exit code before it closes files.
"""

from __future__ import annotations

import os
import signal

# It cannot be seen.
UNKNOWN = 0
# Nothing ends it, or it ends by itself and has not begun to.
LIVES = 1
# A signal ends it, and it has not begun to.
IS_KILLED = 2
# It closes its files because a signal ends it.
WAS_KILLED = 3
# It closes its files because it has ended, by itself as far as can be seen.
EXITS = 4
FATES = frozenset((UNKNOWN, LIVES, IS_KILLED, WAS_KILLED, EXITS))
# It, or a child of it, may write to a file through another descriptor; or neither may.
HOLDS = 5
HOLDS_NOT = 6
# So many descriptors are looked at.
_MOST_DESCRIPTORS = 4096

_PF_EXITING = 0x4  # include/linux/sched.h
_SIGKILL = 1 << (signal.SIGKILL - 1)
# What ends a program that has no handler for it, and is still pending when it does. Those
# that dump a core are not: there only the exit code tells.
_FATAL = sum(
    1 << (number - 1)
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGPIPE,
        signal.SIGALRM,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGVTALRM,
        signal.SIGPROF,
        signal.SIGIO,
        signal.SIGPWR,
    )
)


def namespace() -> int:
    """The number of the PID namespace of this process; 0 if /proc does not show that one."""
    try:
        is_shown = os.readlink("/proc/self") == str(os.getpid())
        return os.stat("/proc/self/ns/pid").st_ino if is_shown else 0
    except OSError:
        return 0


def fate(pid: int) -> int:
    """The fate of a thread's process, by its number in this PID namespace."""
    if not pid:
        return UNKNOWN
    try:
        masks = _signals(f"/proc/{pid}/status")
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        flags, code = int(fields[6]), int(fields[-1])
    except (OSError, ValueError, IndexError):
        return UNKNOWN
    pending = masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)
    if not flags & _PF_EXITING:
        return IS_KILLED if pending & _SIGKILL else LIVES
    spared = masks.get("SigBlk", 0) | masks.get("SigIgn", 0) | masks.get("SigCgt", 0)
    # The code is 0 as well where this process may not see it.
    is_by_signal = code & 0x7F or pending & (_SIGKILL | _FATAL & ~spared)
    return WAS_KILLED if is_by_signal else EXITS


def holding(pid: int, ino: int) -> int:
    """True if a thread's process or a child of it has a file open for writing, by its st_ino.

    The number may be that of a file of another file system as well. A descriptor that is
    just being closed does not count, nor do any of a process that exits.
    """
    if not pid:
        return UNKNOWN
    try:
        family = [pid]
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                family += map(int, file.read().split())
        is_held = any(_has_open(process, ino) for process in family)
    except OSError:
        return UNKNOWN
    return HOLDS if is_held else HOLDS_NOT


def _has_open(pid: int, ino: int) -> bool:
    try:
        numbers = os.listdir(f"/proc/{pid}/fdinfo")
    except (FileNotFoundError, ProcessLookupError):
        return False  # a child that has ended
    return any(
        _is_writing(f"/proc/{pid}/fdinfo/{number}", ino) for number in numbers[:_MOST_DESCRIPTORS]
    )


def _is_writing(path: str, ino: int) -> bool:
    try:
        with open(path) as file:
            fields = dict(line.split(None, 1) for line in file if line.startswith(("flags", "ino")))
    except (FileNotFoundError, ProcessLookupError):
        return False  # it was closed meanwhile
    is_it = int(fields.get("ino:", -1)) == ino
    return is_it and int(fields["flags:"], 8) & os.O_ACCMODE != os.O_RDONLY


def _signals(path: str) -> dict[str, int]:
    with open(path, errors="replace") as file:  # names of programs are bytes, and cut to 15
        pairs = (line.split(":", 1) for line in file if line.startswith(("Sig", "Shd")))
        return {name: int(mask, 16) for name, mask in pairs if name != "SigQ"}
