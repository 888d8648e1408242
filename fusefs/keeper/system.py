"""What the keeper asks of Linux for itself: its privileges, and the end of its mount.

Credentials are those of the calling thread; keeper and broker have one each.
Capability sets are changed by capset(2), where only the effective set moves:
what a process may do is lowered for as long as it deals with a daemon, and
raised again when it becomes the keeper.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

from fusefs.linux import libc, processes

CAP_SETGID = 6
CAP_SETUID = 7
CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522

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


def keep_only(*capabilities: int) -> None:
    """Give up all other capabilities for good, also those that a program could bring."""
    wanted = sum(1 << capability for capability in capabilities)
    processes.forbid_new_privileges()
    _set_capabilities(lambda permitted: permitted & wanted, is_for_good=True)


def _set_effective(choose: Callable[[int], int]) -> None:
    _set_capabilities(choose, is_for_good=False)


def _set_capabilities(choose: Callable[[int], int], *, is_for_good: bool) -> None:
    """Choose the effective set from the permitted; for good, that and no more is permitted."""
    header = _Header(_CAPABILITY_VERSION_3, 0)
    sets = (_Capabilities * 2)()
    libc.check(_libc.capget(ctypes.byref(header), sets), "capget")
    chosen = choose(sets[0].permitted | sets[1].permitted << 32)
    for half, bits in zip(sets, (chosen & 0xFFFFFFFF, chosen >> 32), strict=True):
        half.effective = bits
        if is_for_good:
            half.permitted = bits
            half.inheritable = 0
    libc.check(_libc.capset(ctypes.byref(header), sets), "capset")


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
