"""How long a request is tried again, and how it pauses in between."""

from __future__ import annotations

import math
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
        self._began = time.monotonic()
        self._end = self._began + self._time_s
        self._attempts = 0

    def is_left(self, longest_s: float = math.inf) -> bool:
        """Whether to go on; `longest_s` is how long what failed is worth trying again.

        However long the first attempt took, there is a second.
        """
        end = self._end if self._attempts == 0 else min(self._end, self._began + longest_s)
        return time.monotonic() < end

    def pause_s(self) -> float:
        # Full jitter: clients that failed together do not come back together.
        self._attempts += 1
        longest = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**self._attempts)
        return min(random.uniform(0, longest), max(0.0, self._end - time.monotonic()))
