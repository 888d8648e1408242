"""The number of downloads that readers wait for, now and recently.

A busy daemon sees only some of its readers wait at any moment, because it has not
received the other readers' requests yet. The recent peak shows the real number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A peak is remembered at least this long, and at most twice as long.
PERIOD_S = 0.25


class Demand:
    """Counts the downloads that readers wait for. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._since = clock()
        # The highest `count` of this period, and of the period before.
        self._most = self._most_before = 0

    def change(self, by: int) -> None:
        """Add `by`, which may be negative, to the number of downloads that readers wait for."""
        self.count += by
        self._begin_period()
        self._most = max(self._most, self.count)

    @property
    def peak(self) -> int:
        """The highest recent number of downloads that readers waited for at a time."""
        self._begin_period()
        return max(self._most, self._most_before)

    def _begin_period(self) -> None:
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= PERIOD_S:
            self._most_before = self._most if passed_s < 2 * PERIOD_S else self.count
            self._most = self.count
            self._since = now
