"""Whether the local disk takes small files at once.

What goes into the page cache takes microseconds, less than to hand it to a
thread, until the disk is behind and the kernel holds writers back. One that
was made to sleep for long tells; one that lost the processor to others does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See how long the disk takes for what is done within."""
        slept, began = getrusage(RUSAGE_THREAD).ru_nvcsw, time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            if now - began > SLOW_S and getrusage(RUSAGE_THREAD).ru_nvcsw > slept:
                self._slow_until = now + IN_THREADS_S
