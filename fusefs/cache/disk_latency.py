"""Whether the local disk takes small writes at once.

A write into the page cache takes microseconds, less than to hand it to a
thread, until the disk is behind and the kernel holds writers back. A writer
that the kernel put to sleep for long is taken for that; a writer that lost the
processor to other threads is not.
"""

from __future__ import annotations

import time
from resource import RUSAGE_THREAD, getrusage

SLOW_S = 0.02
# For how long writes go to threads after a slow one.
IN_THREADS_S = 1.0


class DiskLatency:
    """Watches disk accesses, from any thread, and says whether the event loop may make them."""

    def __init__(self) -> None:
        self._slow_until = 0.0

    @property
    def is_quick(self) -> bool:
        """Whether no access of late was slow, so that the event loop may make small ones."""
        return time.monotonic() >= self._slow_until

    def begin(self) -> tuple[int, float]:
        """Begin to measure an access of this thread; the result is for `end`."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw, time.monotonic()

    def end(self, began: tuple[int, float]) -> None:
        """Note how long the access has taken."""
        sleeps, at = began
        now = time.monotonic()
        if now - at > SLOW_S and getrusage(RUSAGE_THREAD).ru_nvcsw > sleeps:
            self._slow_until = now + IN_THREADS_S
