"""Inspection of the processes that make requests: the fate of each, and the files that it has open.

A request has the pid of its process in the mount's PID namespace, or 0 if it has no pid there. One
look costs two reads below /proc. The keeper looks in place of the daemon where /proc shows a user
only its own processes; so this module imports little.

The fields are described in proc_pid_status(5) and proc_pid_stat(5). When a signal ends a process,
complete_signal() in kernel/signal.c marks all its threads with SIGKILL and leaves the signal itself
pending; do_exit() in kernel/exit.c sets PF_EXITING and the exit code before it closes files.
"""

from __future__ import annotations

import os
import signal

# The process cannot be inspected.
UNKNOWN = 0
# The process runs, and no signal is about to end it.
LIVES = 1
# A fatal signal is pending; the process has not begun to exit.
IS_KILLED = 2
# The process is exiting, and closes its files, because of a signal.
WAS_KILLED = 3
# The process is exiting, and closes its files, apparently by itself.
EXITS = 4
FATES = frozenset((UNKNOWN, LIVES, IS_KILLED, WAS_KILLED, EXITS))
# The process or a child of it has another descriptor with which it may write to the file.
HOLDS = 5
HOLDS_NOT = 6
# The number of descriptors that are inspected, at most.
_MOST_DESCRIPTORS = 4096

_PF_EXITING = 0x4  # include/linux/sched.h
_SIGKILL = 1 << (signal.SIGKILL - 1)
# Signals that end a program without a handler, and are still pending when it exits. Signals
# that dump a core are not pending then: only the exit code shows them.
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
    """Return the inode number of this process's PID namespace; 0 if /proc shows another one."""
    try:
        is_shown = os.readlink("/proc/self") == str(os.getpid())
        return os.stat("/proc/self/ns/pid").st_ino if is_shown else 0
    except OSError:
        return 0


def fate(pid: int) -> int:
    """Return one of `FATES`: the process of thread `pid` (of this namespace) lives or is ending."""
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
    # The exit code also reads 0 if this process may not see it.
    is_by_signal = code & 0x7F or pending & (_SIGKILL | _FATAL & ~spared)
    return WAS_KILLED if is_by_signal else EXITS


def holding(pid: int, ino: int) -> int:
    """Return HOLDS if the process of `pid`, or its child, has file `ino` open for writing.

    Otherwise returns HOLDS_NOT or UNKNOWN. A file of another file system may have the same st_ino.
    Descriptors that are being closed, or whose process exits, do not count.
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
        return False  # the descriptor was closed meanwhile
    is_it = int(fields.get("ino:", -1)) == ino
    return is_it and int(fields["flags:"], 8) & os.O_ACCMODE != os.O_RDONLY


def _signals(path: str) -> dict[str, int]:
    with open(path, errors="replace") as file:  # names of programs are bytes, and cut to 15
        pairs = (line.split(":", 1) for line in file if line.startswith(("Sig", "Shd")))
        return {name: int(mask, 16) for name, mask in pairs if name != "SigQ"}
