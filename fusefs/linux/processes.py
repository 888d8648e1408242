"""Processes: starting them with a user, signals and waits by pidfd, and what ends with what.

Nothing large is imported, for the keeper uses this too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence

from fusefs.linux import capabilities
from fusefs.linux.libc import set_process_option

_PR_SET_PDEATHSIG = 1
# Where memory is short, a daemon goes before the process that starts the next one.
_OOM_SCORE_ADJUSTMENT = 500
CGROUP_FILE = "/proc/self/cgroup"
CGROUPS = "/sys/fs/cgroup"


class Credentials:
    """The user and groups that a daemon runs as. Nothing is dropped for a uid that is our own."""

    __slots__ = ("gid", "groups", "uid")

    def __init__(self, uid: int, gid: int, groups: Sequence[int]) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = list(groups)


def spawn(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    kept: Sequence[int],
    environment: dict[str, str],
    credentials: Credentials,
) -> int:
    """Start a program in a session of its own, with `kept` as its only further descriptors.

    Returns its pid, once it has been executed.

    Raises:
        OSError: it could not be.
    """
    receiver, sender = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(receiver)
        os.close(sender)
        raise
    if pid == 0:
        try:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            for fd in kept:
                os.set_inheritable(fd, True)
            become(credentials)
            close_all_but(sender, *kept)
            os.execvpe(command[0], list(command), environment)
        except OSError as error:
            os.write(sender, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(sender)
    with open(receiver, "rb") as answer:
        number = answer.read()
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)), command[0])
    return pid


def become(credentials: Credentials) -> None:
    """Be a daemon's process, in a session of its own: with this user, and no rights but his."""
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if credentials.uid == os.geteuid():
        return
    os.setgroups(credentials.groups)
    os.setresgid(credentials.gid, credentials.gid, credentials.gid)
    os.setresuid(credentials.uid, credentials.uid, credentials.uid)
    # With the securebit no_setuid_fixup the change of the user takes none away.
    capabilities.give_up_all()


def become_in_place(credentials: Credentials) -> None:
    """As `become`, in a process that goes on as a daemon without executing a program."""
    become(credentials)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as where Python starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def yield_memory() -> None:
    """Be what the kernel ends first when memory is short, unless a whole group would end."""
    if _ends_with_group():
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE_ADJUSTMENT))


def _ends_with_group() -> bool:
    """True if the kernel ends a whole control group of this process (kubelet, systemd)."""
    with contextlib.suppress(OSError):
        with open(CGROUP_FILE) as file:
            [path] = [line[3:].strip("\n/") for line in file if line.startswith("0::")] or [""]
        names = path.split("/")
        for count in range(len(names), -1, -1):
            group = os.path.join(CGROUPS, *names[:count], "memory.oom.group")
            with contextlib.suppress(FileNotFoundError), open(group) as file:
                if file.read().strip() == "1":
                    return True
    return False


def die_with_parent() -> None:
    """Have this process killed when the one that has forked it ends, which has its user."""
    set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)


def close_all_but(*kept: int) -> None:
    """Close all descriptors but the three standard ones and these."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(fd)


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """True if the process is gone, all of its threads included, after a wait if need be."""
    poll = select.poll()  # select takes no descriptors from 1024 on
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, timeout_s)))


def send_signal(pidfd: int, number: int) -> None:
    """Signal a process that may have ended already, or is out of this one's reach."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, number)


def pid_behind(pidfd: int) -> int:
    """The number that a process has here; 0 if it is in another PID namespace, or gone."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return max(0, int(fields["Pid"]))
