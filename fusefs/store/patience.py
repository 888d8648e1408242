"""How long a request is tried again, and how it pauses in between."""

from __future__ import annotations

import random
import time

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0


class Patience:
    """How long to go on trying, and how long to pause before the next attempt."""

    def __init__(self, time_s: float) -> None:
        self._time_s = time_s
        self.renew()

    def renew(self) -> None:
        """Something has been achieved."""
        self._end = time.monotonic() + self._time_s
        self._attempts = 0

    def is_left(self) -> bool:
        return time.monotonic() < self._end

    def pause_s(self) -> float:
        # Full jitter: clients that failed together do not come back together.
        self._attempts += 1
        longest = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**self._attempts)
        return min(random.uniform(0, longest), max(0.0, self._end - time.monotonic()))
