"""What the keeper asks of Linux beyond Python's `os`.

Credentials are those of the calling thread; keeper and broker have one each.
Capability sets are changed by capset(2), where only the effective set moves:
what a process may do is lowered for as long as it deals with a daemon, and
raised again when it becomes the keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
from collections.abc import Callable, Sequence

from fusefs.linux import libc

FILESYSTEM_TYPE = "fuse.fusefs"
FUSE_DEVICE = os.makedev(10, 229)
FUSECTL = "/sys/fs/fuse/connections"
_BDI = "/sys/class/bdi"

CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
# Where memory is short, a daemon goes before who starts the next one.
_OOM_SCORE_ADJUSTMENT = 500

# The new mount interface has the same numbers on every architecture but alpha.
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6

_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    """struct __user_cap_data_struct: the low 32 capabilities, then the high."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


# --- credentials --------------------------------------------------------------


def lower_privileges(uid: int, gid: int) -> None:
    """Act on files as `uid` and `gid`, with CAP_SYS_ADMIN as the only effective capability."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    _set_effective(lambda permitted: permitted & (1 << CAP_SYS_ADMIN))


def raise_privileges() -> None:
    """Undo `lower_privileges`."""
    _libc.setfsuid(os.geteuid())
    _libc.setfsgid(os.getegid())
    _set_effective(lambda permitted: permitted)


def _set_effective(choose: Callable[[int], int]) -> None:
    header = _Header(_CAPABILITY_VERSION_3, 0)
    sets = (_Capabilities * 2)()
    _check(_libc.capget(ctypes.byref(header), sets))
    permitted = sets[0].permitted | sets[1].permitted << 32
    effective = choose(permitted)
    sets[0].effective = effective & 0xFFFFFFFF
    sets[1].effective = effective >> 32
    _check(_libc.capset(ctypes.byref(header), sets))


# --- mounts -------------------------------------------------------------------


def connection_at(mountpoint: str) -> int | None:
    """The number of the FUSE connection that is mounted on top at `mountpoint`.

    Nothing but mountinfo is asked, so a wedged mount does not matter.
    """
    found = None
    for device, filesystem, path in _mounts():
        if path == _escape(mountpoint):
            is_fuse = filesystem == "fuse" or filesystem.startswith("fuse.")
            found = int(device.partition(":")[2]) if is_fuse else None
    return found


def is_mounted(connection: int) -> bool:
    """Whether the FUSE connection has a mount in this namespace."""
    return any(
        device == f"0:{connection}" and filesystem.startswith("fuse")
        for device, filesystem, _ in _mounts()
    )


def _mounts() -> list[tuple[str, str, str]]:
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
        lines = [line.partition(" - ") for line in file]
    return [
        (before.split(" ")[2], after.split(" ")[0], before.split(" ")[4])
        for before, _, after in lines
    ]


def _escape(path: str) -> str:
    for character in "\\ \t\n#":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path


def raise_read_ahead(connection: int, kib: int) -> None:
    """Let the kernel read ahead further, where sysfs can be written."""
    with contextlib.suppress(OSError), open(f"{_BDI}/0:{connection}/read_ahead_kb", "w") as file:
        file.write(str(kib))


def unmount(mountpoint: str) -> None:
    """Take the mount away, or out of sight if it is in use. May wait for requests under way.

    Raises:
        OSError: it is not there, or not ours to end.
    """
    try:
        libc.umount(mountpoint, libc.UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EPERM):
            raise
        detach(mountpoint)


def detach(mountpoint: str) -> None:
    """Take the mount out of sight, by fusermount3 where this process may not.

    Raises:
        OSError: it is not there, or not ours to end.
    """
    try:
        libc.umount(mountpoint, libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
    except PermissionError:
        command = ["fusermount3", "-u", "-z", "-q", "--", mountpoint]
        os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)


def is_disconnected(fuse_fd: int) -> bool:
    """Whether the mount behind the descriptor is gone, or its connection aborted."""
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def abort_connection(connection: int) -> None:
    """Let everybody who waits for the daemon fail; the mount stays where it is.

    fusectl does it, opened as a detached mount where nobody has mounted it.

    Raises:
        OSError: there is no such connection, or it is not ours to abort.
    """
    try:
        _write_one(f"{FUSECTL}/{connection}/abort", None)
        return
    except FileNotFoundError:
        context = _syscall(_SYS_FSOPEN, b"fusectl", _CLOEXEC)
    try:
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        root = _syscall(_SYS_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    try:
        _write_one(f"{connection}/abort", root)
    finally:
        os.close(root)


def _write_one(path: str, directory: int | None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


# --- processes ----------------------------------------------------------------


class Credentials:
    """Whom a daemon runs as. Nothing is dropped for a uid that is our own."""

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
    yields_memory: bool = False,
) -> int:
    """Start a program in a session of its own, with `kept` as its only further descriptors.

    One that yields memory is ended first where that is short. Returns its pid,
    once it has been executed.

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
            if yields_memory:
                _volunteer()
            _become(credentials)
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


def _become(credentials: Credentials) -> None:
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if credentials.uid == os.geteuid():
        return
    os.setgroups(credentials.groups)
    os.setresgid(credentials.gid, credentials.gid, credentials.gid)
    os.setresuid(credentials.uid, credentials.uid, credentials.uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _volunteer() -> None:
    """Be what the kernel ends first when memory is short, where that can be said."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE_ADJUSTMENT))


def copy_memory_order(pid: int) -> None:
    """Undo `yields_memory`: where memory is short, the process goes no sooner than this one."""
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj") as file:
            own = file.read()
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(own)


def die_with_parent() -> None:
    """Have this process killed when the one that has forked it ends, which has its user."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(is_on: bool) -> None:
    """Have descendants whose parents end become children of this process, or no more."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(is_on))


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, *(ctypes.c_ulong(n) for n in (value, 0, 0, 0))))


def close_all_but(*kept: int) -> None:
    """Close all descriptors but the three standard ones and these."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(fd)


def has_ended(pidfd: int) -> bool:
    """Whether the process is gone, all of its threads included."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(pidfd: int, number: int) -> None:
    """Signal a process that may have ended already, or is out of this one's reach."""
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, number)


def pid_behind(pidfd: int) -> int:
    """The number that a process has here; 0 if it is in another PID namespace, or gone."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        told = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return max(0, int(told["Pid"]))


def _syscall(number: int, *arguments: bytes | int | None) -> int:
    # Without a prototype ctypes passes an int as 32 bits, so each is widened.
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(number), *widened)))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
