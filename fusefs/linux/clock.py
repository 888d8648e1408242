"""Steady time since the epoch, and the id of the current boot.

The machine's clock may be set back: shortly after a boot, or when a virtual machine is moved.
Times that were noted before would then seem to be later than those noted afterwards.
"""

from __future__ import annotations

import time

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_epoch: float | None = None


def steady_time() -> float:
    """Return seconds since the epoch: the clock at this process's first call, plus time since."""
    global _epoch
    if _epoch is None:
        _epoch = time.time() - time.monotonic()
    return _epoch + time.monotonic()


def boot_id() -> str:
    """Return the id that Linux gives to this boot of the machine (random(4)). Blocks shortly."""
    with open(_BOOT_ID) as file:
        return file.read().strip()
