"""The problems of a cache: logged when they begin, shown by `fusefs status` while recent.

A disk that was full for a minute, or a data set that once did not fit, is not worth mentioning
for the rest of a mount's months, but a later problem with another reason is.
"""

from __future__ import annotations

import logging
import math
import time

logger = logging.getLogger("fusefs.cache")

# A problem that was last noted longer ago is over; it is logged again if it returns.
RECENT_S = 3600.0
# If there are more problems than this, the oldest is forgotten.
MOST = 4


class Trouble:
    """The recent problems of one cache, as sentences. Belongs to the event loop."""

    def __init__(self) -> None:
        # The time of the last note of each problem, in monotonic seconds; the latest at the end.
        self._noted: dict[str, float] = {}

    @property
    def recent(self) -> str | None:
        """The recent problems joined by "; ", the latest last; None if there are none."""
        now = time.monotonic()
        return "; ".join(what for what, at in self._noted.items() if now - at < RECENT_S) or None

    def note(self, what: str) -> None:
        """Note a problem, and log it unless it was noted recently."""
        now = time.monotonic()
        if now - self._noted.pop(what, -math.inf) >= RECENT_S:
            logger.warning("%s", what)
        self._noted[what] = now
        if len(self._noted) > MOST:
            del self._noted[next(iter(self._noted))]
