"""Operations on a FUSE connection, which is given by its number or its /dev/fuse descriptor.

`abort` ends a mount whose daemon will never answer: it writes to the connection's
`abort` file in fusectl, so that every waiting program gets ECONNABORTED and can be
killed again. If fusectl is not mounted, as is usual in containers, root opens it as
a detached mount (fsopen, fsmount; Linux 5.2), which no namespace shows.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat

from fusefs.linux import libc
from fusefs.linux.files import closing

_FUSE_DEVICE = os.makedev(10, 229)  # as in Documentation/admin-guide/devices.txt
FUSECTL = "/sys/fs/fuse/connections"
BDI = "/sys/class/bdi"

# The new mount interface has the same numbers on every architecture but alpha.
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6


def is_device(status: os.stat_result) -> bool:
    """True for the status of /dev/fuse, or of a descriptor of it."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == _FUSE_DEVICE


def abort(connection: int) -> None:
    """Make every waiting and every further request fail; the mount stays where it is.

    Raises:
        FileNotFoundError: there is no such connection.
        OSError: this process may not abort it.
    """
    try:
        _write_one(f"{FUSECTL}/{connection}/abort", None)
        return
    except FileNotFoundError:
        context = libc.system_call(_SYS_FSOPEN, b"fusectl", _CLOEXEC)
    with closing(context):
        libc.system_call(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        root = libc.system_call(_SYS_FSMOUNT, context, _CLOEXEC, 0)
    with closing(root):
        _write_one(f"{connection}/abort", root)


def number_of(fuse_fd: int) -> int:
    """Return a descriptor's connection number; 0 before Linux 6.17 (fuse_dev_show_fdinfo)."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fuse_fd}") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "fuse_connection":
                return int(value)
    return 0


def numbers() -> set[int]:
    """Return the numbers of FUSE connections; without fusectl, minors of devices with major 0."""
    try:
        return {int(name) for name in os.listdir(FUSECTL) if name.isdecimal()} or _devices()
    except OSError:
        return _devices()


def _devices() -> set[int]:
    try:
        names = os.listdir(BDI)
    except OSError:
        return set()
    # A connection's number is the minor one of its device, whose major one is 0.
    return {int(name[2:]) for name in names if name.startswith("0:") and name[2:].isdecimal()}


def is_disconnected(fuse_fd: int) -> bool:
    """True if the mount of a /dev/fuse descriptor is gone, or its connection was aborted."""
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def raise_read_ahead(connection: int, kib: int) -> bool:
    """Set the kernel's read-ahead for a connection; False if sysfs can't be written."""
    with contextlib.suppress(OSError), open(f"{BDI}/0:{connection}/read_ahead_kb", "w") as file:
        file.write(str(kib))
        return True
    return False


def _write_one(path: str, directory: int | None) -> None:
    with closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)) as fd:
        os.write(fd, b"1")
