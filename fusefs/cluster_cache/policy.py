"""The rules for requests to the cluster cache, and for waiting for its answers.

The cluster cache must cost a reader next to nothing, even if it fails. A request has a deadline for
its first byte, after which S3 is requested as well. After some failures no requests are sent,
except an occasional probe that delays no reader. While lookups find nothing, only a sample of them
is made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import trio

# The deadline is MEANS times the mean of the latest first-byte times, within bounds in seconds.
MEANS = 3.0
LEAST_S = 0.05
MOST_S = 0.5
# Weight of the latest first-byte time in the mean.
NEWEST = 1 / 16

# After FAILURES failures without a success between them, no request is sent for OPEN_S.
FAILURES = 3
OPEN_S = 30.0
# Weight, as a failure, of a useless answer (an error, wrong bytes): it costs no wait, and if one of
# three volumes is lost, two thirds of the blocks are still good.
USELESS = 0.25

# After MISSES lookups in a row that found nothing, one of SAMPLE is made, and at least one every
# SAMPLE_EVERY_S. One of eight took 8 % of a daemon's time for small files.
MISSES = 16
SAMPLE = 64
SAMPLE_EVERY_S = 0.25

Clock = Callable[[], float]


class Deadline:
    """An adaptive time limit for a first byte, after which S3 is requested as well."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that a reader waits for a first byte before S3 is requested as well."""
        return MOST_S if self._mean_s is None else min(MOST_S, max(LEAST_S, MEANS * self._mean_s))

    def note_first_byte(self, took_s: float) -> None:
        """Include an answer's time to the first byte in the mean."""
        mean_s = took_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + (took_s - mean_s) * NEWEST

    def note_late(self, waited_s: float) -> None:
        """Include `waited_s` in the mean: the cache server had sent nothing by then, but S3 had.

        The wait counts as at most twice the mean. So the deadline grows if all answers are slow,
        but one hanging server of three does not make every third read wait longer.
        """
        if self._mean_s is not None:
            self.note_first_byte(min(waited_s, 2 * self._mean_s))


class BreakerState(enum.StrEnum):
    """State of a `Breaker`: requests are sent, are not sent, or a probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBED = "probed"


class Breaker:
    """Stops requests after failures. Belongs to the event loop; times are those of `clock`."""

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self._clock = clock
        self._failures = 0.0
        self._probe_at = 0.0
        self.state = BreakerState.CLOSED
        # Number of times that the breaker has opened.
        self.opened = 0

    @property
    def is_closed(self) -> bool:
        """True if requests are sent: no series of failures has stopped them."""
        return self.state is BreakerState.CLOSED

    def take_probe(self) -> bool:
        """Return True to one caller per pause, which then sends a probe and notes the result."""
        if self.state is not BreakerState.OPEN or self._clock() < self._probe_at:
            return False
        self.state = BreakerState.PROBED
        return True

    def note_success(self) -> None:
        """Close the breaker after a useful answer, which may be that there is no such block."""
        self._failures = 0.0
        self.state = BreakerState.CLOSED

    def note_failure(self, weight: float = 1.0) -> None:
        """Add a failure's weight; a sum of FAILURES, or a failed probe, opens the breaker."""
        self._failures += weight
        if self.state is BreakerState.PROBED or self._failures >= FAILURES:
            self.opened += self.state is BreakerState.CLOSED
            self.state = BreakerState.OPEN
            self._failures = 0.0
            self._probe_at = self._clock() + OPEN_S


class Sampling:
    """Selects the lookups to make: all, or only a sample while they find nothing.

    Belongs to the event loop; times are those of `clock`.
    """

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self._clock = clock
        self._misses = 0
        self._skipped = 0
        self._looked = 0.0

    def wants_lookup(self) -> bool:
        """Return True if the next block is to be looked up; count it as looked up or skipped."""
        now = self._clock()
        if self._misses >= MISSES:
            self._skipped += 1
            if self._skipped < SAMPLE and now - self._looked < SAMPLE_EVERY_S:
                return False
        self._skipped = 0
        self._looked = now
        return True

    def note_hit(self) -> None:
        self._misses = 0

    def note_miss(self) -> None:
        self._misses += 1
