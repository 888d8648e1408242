"""Whether the local disk takes small writes at once.

A write into the page cache takes microseconds, less than to hand it to a
thread, until the disk is behind and the kernel holds writers back. A writer
that the kernel put to sleep for long is taken for that; a writer that lost the
processor to other threads is not.

A thread also sleeps while it waits for the interpreter's lock, which looks the same.
So a write in a thread has to be slower by far to count: otherwise threads that are many
would keep all writes in threads, each of which costs twice as much there.
"""

from __future__ import annotations

import time
from resource import RUSAGE_THREAD, getrusage

SLOW_S = 0.02
SLOW_IN_THREAD_S = 0.25
# For how long writes go to threads after a slow one, and at most if the next in the event loop
# is slow as well: each of those holds up the event loop.
FIRST_IN_THREADS_S = 0.1
LONGEST_IN_THREADS_S = 3.2
# After so long without a slow write the disk has caught up.
FORGET_S = 5.0


class DiskLatency:
    """Watches disk accesses, from any thread, and says whether the event loop may make them."""

    def __init__(self) -> None:
        self._slow_until = 0.0
        self._in_threads_s = FIRST_IN_THREADS_S

    @property
    def is_quick(self) -> bool:
        """Whether no access of late was slow, so that the event loop may make small ones."""
        return time.monotonic() >= self._slow_until

    def begin(self) -> tuple[int, float]:
        """Begin to measure an access of this thread; the result is for `end`."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw, time.monotonic()

    def end(self, began: tuple[int, float], *, is_in_loop: bool) -> None:
        """Note how long the access has taken."""
        sleeps, at = began
        now = time.monotonic()
        limit_s = SLOW_S if is_in_loop else SLOW_IN_THREAD_S
        if now - at > limit_s and getrusage(RUSAGE_THREAD).ru_nvcsw > sleeps:
            if now - self._slow_until > FORGET_S:
                self._in_threads_s = FIRST_IN_THREADS_S
            elif is_in_loop:
                self._in_threads_s = min(LONGEST_IN_THREADS_S, 2 * self._in_threads_s)
            self._slow_until = max(self._slow_until, now + self._in_threads_s)
