"""Processes: starting them as a user, signals and waits by pidfd, and rules for their ends.

The keeper imports this module, so it imports nothing large.
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
# When memory is short, the kernel kills a daemon before the process that starts the next one.
_OOM_SCORE_ADJUSTMENT = 500
CGROUP_FILE = "/proc/self/cgroup"
CGROUPS = "/sys/fs/cgroup"


class Credentials:
    """The user and groups of a daemon, which keeps all rights if `uid` is this process's own."""

    __slots__ = ("gid", "groups", "uid")

    def __init__(self, uid: int, gid: int, groups: Sequence[int]) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = list(groups)


def spawn(
    command: Sequence[str],
    *,
    stdin: int,
    kept: Sequence[int],
    environment: dict[str, str],
    credentials: Credentials,
) -> int:
    """Start a program in a new session; its descriptors are 0, 1, 2 and those in `kept`.

    Returns the pid when the program has been executed.

    Raises:
        OSError: the program could not be executed.
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
    """Begin a session as the user of `credentials`, without capabilities; reset signal handlers.

    A process that runs as this user already keeps its capabilities.
    """
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if credentials.uid == os.geteuid():
        return
    os.setgroups(credentials.groups)
    os.setresgid(credentials.gid, credentials.gid, credentials.gid)
    os.setresuid(credentials.uid, credentials.uid, credentials.uid)
    # With the securebit no_setuid_fixup, setresuid leaves the capabilities.
    capabilities.give_up_all()


def become_in_place(credentials: Credentials) -> None:
    """Call `become`, then restore Python's signal handlers, as the child goes on in Python."""
    become(credentials)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does when it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def yield_memory() -> None:
    """Let the OOM killer prefer this process, unless it would end the whole control group."""
    if _ends_with_group():
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE_ADJUSTMENT))


def _ends_with_group() -> bool:
    """True if the OOM killer ends whole control groups here (memory.oom.group, set by kubelet)."""
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
    """Ask the kernel to kill this process when its parent, of the same user, ends."""
    set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)


def close_all_but(*kept: int) -> None:
    """Close all descriptors except 0, 1, 2 and those in `kept`."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of listdir is closed already
                os.close(fd)


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """True if the process, with all its threads, has ended or ends within `timeout_s`."""
    poll = select.poll()  # select takes no descriptors from 1024 on
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, timeout_s)))


def send_signal(pidfd: int, number: int) -> None:
    """Signal a process; no error if it has ended or this process may not signal it."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, number)


def pid_behind(pidfd: int) -> int:
    """Return the pid of a pidfd's process; 0 if it is in another PID namespace, or gone."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return max(0, int(fields["Pid"]))
