"""Changes to the capability sets of the calling thread.

Each thread has its own sets; a new thread inherits those of the thread that starts it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from fusefs.linux import libc

CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_NO_NEW_PRIVS = 38


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    """One struct __user_cap_data_struct: capabilities 0 to 31, or as the second of two 32 to 63."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def give_up_all() -> None:
    """Give up all capabilities for good, also ambient ones and those of executed files."""
    libc.set_process_option(_PR_SET_NO_NEW_PRIVS, 1)
    _set(lambda _permitted: 0, is_for_good=True)


def lower_privileges(uid: int, gid: int) -> None:
    """Act on files as `uid` and `gid`, with CAP_SYS_ADMIN as the only effective capability.

    The permitted set stays as it is, so that `raise_privileges` can undo this.
    """
    libc.c_library.setfsgid(gid)
    libc.c_library.setfsuid(uid)
    _set(lambda permitted: permitted & (1 << CAP_SYS_ADMIN), is_for_good=False)


def raise_privileges() -> None:
    libc.c_library.setfsuid(os.geteuid())
    libc.c_library.setfsgid(os.getegid())
    _set(lambda permitted: permitted, is_for_good=False)


def _set(choose: Callable[[int], int], *, is_for_good: bool) -> None:
    """Set the effective set to `choose(permitted)`; if `is_for_good`, the permitted set too."""
    header = _Header(_CAPABILITY_VERSION_3, 0)
    sets = (_Capabilities * 2)()
    libc.check(libc.c_library.capget(ctypes.byref(header), sets), "capget")
    chosen = choose(sets[0].permitted | sets[1].permitted << 32)
    for half, bits in zip(sets, (chosen & 0xFFFFFFFF, chosen >> 32), strict=True):
        half.effective = bits
        if is_for_good:
            half.permitted = bits
            half.inheritable = 0
    libc.check(libc.c_library.capset(ctypes.byref(header), sets), "capset")
