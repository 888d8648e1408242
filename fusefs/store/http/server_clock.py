"""The store's time, which requests are signed with where this machine's clock is wrong.

S3 refuses a signature that is more than 15 minutes off. Its answers have a date: where a
refusal shows another time than this machine has, the difference is kept, and the request is
signed anew, as SDKs do. botocore does not, so its clients are told by events, and its clock is
replaced by one that has the difference of the client which signs in the same thread.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

logger = logging.getLogger("fusefs.store")

# Less than S3 allows, more than an answer's date can be off by its way.
LEAST_SKEW_S = 300.0
SKEWED = "RequestTimeTooSkewed"


class ServerClock:
    """One store's time, for any number of threads."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        """The store's time in seconds since the epoch."""
        return time.time() + self.offset_s

    def corrects(
        self, status: int, code: str, headers: Mapping[str, str], signed_offset_s: float
    ) -> bool:
        """Take over the date of a refusal; False if the time is not why it was one.

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

    def install(self, client: Any) -> None:
        """Have a boto3 S3 client sign with this clock, and again after it was corrected."""
        _replace_clock()
        client.meta.events.register("before-sign.s3", self._sign)
        client.meta.events.register("before-send.s3", self._signed)
        client.meta.events.register("needs-retry.s3", self._retry)

    def _sign(self, **_: Any) -> None:
        _signing.offset_s = _signing.last_s = self.offset_s

    def _signed(self, **_: Any) -> None:
        _signing.offset_s = 0.0  # other clients may sign in this thread

    def _retry(self, response: Any, **_: Any) -> float | None:
        """Seconds to wait before the request is sent again; None if it is not."""
        if response is None or response[0] is None:
            return None
        answer, parsed = response
        code = str(parsed.get("Error", {}).get("Code") or "")
        is_corrected = self.corrects(answer.status_code, code, answer.headers, _signing.last_s)
        return 0.0 if is_corrected else None


class _Signing(threading.local):
    """Offsets: of a thread's present signature, and of the last by one of these clients."""

    offset_s = 0.0
    last_s = 0.0


_signing = _Signing()


@cache
def _replace_clock() -> None:
    from botocore import auth

    original = getattr(auth, "get_current_datetime")  # noqa: B009

    def corrected(*args: Any, **named: Any) -> datetime.datetime:
        now: datetime.datetime = original(*args, **named)
        return now + datetime.timedelta(seconds=_signing.offset_s)

    setattr(auth, "get_current_datetime", corrected)  # noqa: B010
