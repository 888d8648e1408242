"""The store's time, with which requests are signed if this machine's clock is wrong.

S3 refuses a signature that is more than 15 minutes off; the refusal's date header gives S3's time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

logger = logging.getLogger("fusefs.store")

# Less than S3 allows; more than an answer's date can be off because of its travel time.
LEAST_SKEW_S = 300.0
SKEWED = "RequestTimeTooSkewed"


class ServerClock:
    """The clock of one store: this machine's clock, corrected by `offset_s` seconds."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        """Return the store's time in seconds since the epoch."""
        return time.time() + self.offset_s

    def corrects(
        self, status: int, code: str, headers: Mapping[str, str], signed_offset_s: float
    ) -> bool:
        """True if a wrong clock caused S3's refusal, whose date then corrects this clock.

        `signed_offset_s` is the `offset_s` with which the request was signed.
        """
        if status != 403 and code != SKEWED:
            return False
        try:
            told = parsedate_to_datetime(headers.get("date") or "").timestamp()
            time.gmtime(told)
        except (ArithmeticError, OSError, TypeError, ValueError):
            return False
        offset_s = told - time.time()
        if abs(offset_s - signed_offset_s) < LEAST_SKEW_S:
            return False
        if abs(offset_s - self.offset_s) >= LEAST_SKEW_S:
            self.offset_s = offset_s
            logger.warning(
                "this machine's clock is %.0f s %s the store's: requests are signed with the"
                " store's time",
                abs(offset_s),
                "behind" if offset_s > 0 else "ahead of",
            )
        return True
