"""The number of downloads that readers wait for, now and of late.

A daemon that is busy sees few of its readers wait at any one moment: the requests
of the others have not come to it yet. The most of the last moments tells how many
there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# For how long at least a number of readers is remembered, and at most twice as long.
PERIOD_S = 0.25


class Demand:
    """Counts the downloads that readers wait for. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._since = clock()
        # The most of this period, and of the one before.
        self._most = self._most_before = 0

    def change(self, by: int) -> None:
        """Note that readers wait for more downloads, or for fewer."""
        self.count += by
        self._begin_period()
        self._most = max(self._most, self.count)

    @property
    def peak(self) -> int:
        """The most that readers waited for at a time in the last moments."""
        self._begin_period()
        return max(self._most, self._most_before)

    def _begin_period(self) -> None:
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= PERIOD_S:
            self._most_before = self._most if passed_s < 2 * PERIOD_S else self.count
            self._most = self.count
            self._since = now
