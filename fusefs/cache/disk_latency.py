"""Whether the local disk takes small files at once.

What goes into the page cache takes microseconds, less than to hand it to a
thread, until the disk is behind and the kernel holds writers back. One that
was made to sleep for long tells; one that lost the processor to others does not.
"""

from __future__ import annotations

import time
from resource import RUSAGE_THREAD, getrusage

SLOW_S = 0.02
# For how long threads wait for the disk after that.
IN_THREADS_S = 1.0


class Pace:
    """What the event loop may do by itself; threads can tell as well."""

    def __init__(self) -> None:
        self._slow_until = 0.0

    @property
    def is_quick(self) -> bool:
        return time.monotonic() >= self._slow_until

    def begin(self) -> tuple[int, float]:
        """Before something is done on the disk; for `end`."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw, time.monotonic()

    def end(self, began: tuple[int, float]) -> None:
        """See how long the disk has taken."""
        slept, at = began
        now = time.monotonic()
        if now - at > SLOW_S and getrusage(RUSAGE_THREAD).ru_nvcsw > slept:
            self._slow_until = now + IN_THREADS_S
