"""Time since the epoch that goes on evenly while a process lives; which boot this is.

A machine's clock is set back when it has been wrong: shortly after a boot, or when a virtual
machine goes on elsewhere. What was noted before would then seem to be later than what follows.
"""

from __future__ import annotations

import time

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_epoch: float | None = None


def steady_time() -> float:
    """Seconds since the epoch, by what the clock showed at the first call of this process."""
    global _epoch
    if _epoch is None:
        _epoch = time.time() - time.monotonic()
    return _epoch + time.monotonic()


def boot_id() -> str:
    """The id that Linux gives to this boot of the machine (random(4)). Blocks shortly."""
    with open(_BOOT_ID) as file:
        return file.read().strip()
