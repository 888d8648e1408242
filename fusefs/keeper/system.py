"""The keeper's requests of Linux for itself: its privileges, and the end of its mount.

Credentials are those of the calling thread; keeper and broker have one each.
Only the effective set of capabilities moves: what a process may do is lowered
for as long as it deals with a daemon, and raised again when it becomes the keeper.
"""

from __future__ import annotations

import ctypes
import errno
import os

from fusefs.linux import capabilities, libc

_libc = ctypes.CDLL(None, use_errno=True)


def lower_privileges(uid: int, gid: int) -> None:
    """Act on files as `uid` and `gid`, with CAP_SYS_ADMIN as the only effective capability."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    capabilities.set_effective(lambda permitted: permitted & (1 << capabilities.CAP_SYS_ADMIN))


def raise_privileges() -> None:
    """Undo `lower_privileges`."""
    _libc.setfsuid(os.geteuid())
    _libc.setfsgid(os.getegid())
    capabilities.set_effective(lambda permitted: permitted)


# --- the mount's end ----------------------------------------------------------


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
