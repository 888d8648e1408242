"""The troubles of a cache: for the log when it begins, for `fusefs status` while it is recent.

A disk that was full for a minute, or a data set that once did not fit, is no news for the rest
of a mount's months; and what fails later for another reason is news again.
"""

from __future__ import annotations

import logging
import math
import time

logger = logging.getLogger("fusefs.cache")

# What was last noted longer ago is over; if it comes again it is logged again.
RECENT_S = 3600.0
# Of more reasons than this the oldest are forgotten.
MOST = 4


class Trouble:
    """The troubles of one cache, as sentences. Belongs to the event loop."""

    def __init__(self) -> None:
        # When each was noted last, in seconds of the monotonic clock; the latest at the end.
        self._noted: dict[str, float] = {}

    @property
    def recent(self) -> str | None:
        """The recent troubles, the latest last; None if there are none."""
        now = time.monotonic()
        return "; ".join(what for what, at in self._noted.items() if now - at < RECENT_S) or None

    def note(self, what: str) -> None:
        """Note a trouble, and log it if it is not known from recently."""
        now = time.monotonic()
        if now - self._noted.pop(what, -math.inf) >= RECENT_S:
            logger.warning("%s", what)
        self._noted[what] = now
        if len(self._noted) > MOST:
            del self._noted[next(iter(self._noted))]
