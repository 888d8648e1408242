"""Locks of files, as every layer may use them."""

from __future__ import annotations

import fcntl


def try_lock(fd: int) -> bool:
    """Lock an open file or directory against other processes; False if one has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
