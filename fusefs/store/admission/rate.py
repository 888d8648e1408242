"""The rate limit for a store that has refused requests as too many (503 SlowDown).

A budget of connections does not bound the rate: four connections to a server that answers in a
millisecond are 4,000 requests a second. So the limit begins, after the first refusals, at the
number of requests that were *not* refused in the last second. Requests are sent evenly spaced.

The limit adapts (AIMD, as in TCP): it rises by 1% in the first second, by 2% in the next, then 4%,
up to 20%. With the next refusal it falls to 95%, or lower: to the rate accepted since the last
refusal while requests used up the limit. A server with a fixed allowance then refuses a few
requests every few seconds, and nearly all of its allowance is used; a limit that is too low doubles
within ten seconds. After a minute without refusals there is no limit.
"""

from __future__ import annotations

import logging

import trio

logger = logging.getLogger("fusefs.store")

# Refusals so soon after a reduction are for requests that were sent before it.
SETTLE_S = 1.0
# An older count says nothing about what the store accepts now. While there is a limit, only the
# time counts in which requests used it up; less than LEAST_IN_USE_S says nothing.
FRESH_S = 2.0
FRESH_IN_USE_S = 10.0
LEAST_IN_USE_S = 0.5
DECREASE = 0.95
FIRST_INCREASE = 0.01
LAST_INCREASE = 0.2
FORGET_S = 60.0
LOG_EVERY_S = 60.0
LEAST = 1.0
# Turns that a busy machine missed are made up for, at most those of the last LATE_S seconds; stores
# allow larger bursts.
LATE_S = 0.1


class Rate:
    """The rate limit of one store. Belongs to the event loop.

    `limit` is in requests a second; None means no limit.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._accepted = 0
        # Time of the last reduction, and the number of requests accepted by then.
        self._since = -FORGET_S
        self._accepted_then = 0
        self._unused_s = 0.0  # time in which less was sent than the limit allows
        self._grown = 0.0  # when the limit was last raised
        self.due = 0.0  # when the next request may be sent, while there is a limit; trio's seconds
        self._logged = -LOG_EVERY_S
        self._unlogged = 0  # refusals since the last line of the log

    def is_due(self) -> bool:
        """True if a request may be sent now."""
        if self.limit is None:
            return True
        now = trio.current_time()
        if now - self._since >= FORGET_S:
            self.limit = None
            return True
        return now >= self.due

    def note_sent(self) -> None:
        """Count a request that is sent: while there is a limit, the next one is due later."""
        if self.limit is not None:
            now = trio.current_time()
            self._grow(now)
            self._pass_unused(now)
            self.due += 1 / self.limit

    def note_success(self) -> None:
        """Count a request that was not refused."""
        self._accepted += 1

    def note_refused(self, what: str) -> None:
        """Lower the limit after a refusal; `what` describes request and refusal for the log."""
        self._unlogged += 1
        now = trio.current_time()
        self._reduce(now)
        if now - self._logged < LOG_EVERY_S:
            return
        count, self._unlogged = self._unlogged, 0
        self._logged = now
        refused = f"{count} requests refused since the last such line" if count > 1 else "refused"
        bound = f"; at most {self.limit:.0f} a second are sent" if self.limit is not None else ""
        logger.warning("%s: %s%s", what, refused, bound)

    def _reduce(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed < SETTLE_S:
            return
        taken = self._accepted - self._accepted_then
        if self.limit is not None:
            self._grow(now)
            self._pass_unused(now)
            in_use_s = elapsed - self._unused_s
            limit = self.limit * DECREASE
            if in_use_s >= LEAST_IN_USE_S and elapsed <= FRESH_IN_USE_S:
                limit = min(limit, taken / in_use_s)
            self.limit = max(LEAST, limit)
        elif elapsed <= FRESH_S:
            self.limit = max(LEAST, taken / elapsed * DECREASE)
            self.due = now
        self._since = self._grown = now
        self._accepted_then = self._accepted
        self._unused_s = 0.0

    def _pass_unused(self, now: float) -> None:
        """Drop turns due more than LATE_S before `now`, and count their time as unused."""
        unused_s = max(0.0, now - LATE_S - self.due)
        self._unused_s += unused_s
        self.due += unused_s

    def _grow(self, now: float) -> None:
        """Raise the limit according to the time since its last reduction."""
        assert self.limit is not None
        share = min(LAST_INCREASE, FIRST_INCREASE * 2.0 ** int(now - self._since))
        # Count at most a second: a rate that was not used has not been tested.
        self.limit *= 1 + share * min(1.0, now - self._grown)
        self._grown = now
