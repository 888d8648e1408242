"""The rules for requests to the cluster cache, and for the wait for their answers.

It may cost a reader next to nothing, whatever becomes of it: a request has a deadline
for its first byte, after which S3 is requested as well; after some failures no request
goes there any more, but a probe now and then that delays no reader; and while nothing is
found in it, only some lookups are made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import trio

# The deadline is so many times the mean of the latest first bytes, within these bounds.
MEANS = 3.0
LEAST_S = 0.05
MOST_S = 0.5
# The weight of the latest first byte in the mean.
NEWEST = 1 / 16

# So many failures without a success between them, and no request is sent for OPEN_S.
FAILURES = 3
OPEN_S = 30.0
# What an answer of a server that is useless (an error, wrong bytes) counts, of a failure: it
# costs no wait, and where one of three volumes is lost two thirds of the blocks are still good.
USELESS = 0.25

# After so many lookups in a row that found nothing, one of SAMPLE is made, and after
# SAMPLE_EVERY_S the next in any case. One of eight took 8 % of a daemon's time for small files.
MISSES = 16
SAMPLE = 64
SAMPLE_EVERY_S = 0.25

Clock = Callable[[], float]


class Deadline:
    """The wait for a first byte before S3 is requested as well; in seconds."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds for which a reader waits for a first byte before S3 is requested as well."""
        if self._mean_s is None:
            return MOST_S
        return min(MOST_S, max(LEAST_S, MEANS * self._mean_s))

    def note_first_byte(self, took_s: float) -> None:
        """An answer has begun after so long."""
        mean_s = took_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + (took_s - mean_s) * NEWEST

    def note_late(self, waited_s: float) -> None:
        """An answer had not begun after so long, when S3's had.

        It counts as twice the mean at most: while all are slow the deadline grows, and one
        server of three that hangs doesn't make every third read wait for longer.
        """
        if self._mean_s is not None:
            self.note_first_byte(min(waited_s, 2 * self._mean_s))


class BreakerState(enum.StrEnum):
    """Of a `Breaker`: in use, not in use, or probed at this moment."""

    CLOSED = "closed"
    OPEN = "open"
    PROBED = "probed"


class Breaker:
    """The breaker that stops requests. Belongs to the event loop; times are those of `clock`."""

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self._clock = clock
        self._failures = 0.0
        self._probe_at = 0.0
        self.state = BreakerState.CLOSED
        # How often it has opened.
        self.opened = 0

    @property
    def is_closed(self) -> bool:
        """True if requests are sent as they come."""
        return self.state is BreakerState.CLOSED

    def take_probe(self) -> bool:
        """True if a request for which no reader waits is to be sent; the caller notes its end."""
        if self.state is not BreakerState.OPEN or self._clock() < self._probe_at:
            return False
        self.state = BreakerState.PROBED
        return True

    def note_success(self) -> None:
        """There was an answer of use: also that there is no such block."""
        self._failures = 0.0
        self.state = BreakerState.CLOSED

    def note_failure(self, weight: float = 1.0) -> None:
        """There was none, or one that counts for less than that."""
        self._failures += weight
        if self.state is BreakerState.PROBED or self._failures >= FAILURES:
            self.opened += self.state is BreakerState.CLOSED
            self.state = BreakerState.OPEN
            self._failures = 0.0
            self._probe_at = self._clock() + OPEN_S


class Sampling:
    """The choice of lookups to make. Belongs to the event loop; times are those of `clock`."""

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self._clock = clock
        self._misses = 0
        self._skipped = 0
        self._looked = 0.0

    def wants_lookup(self) -> bool:
        """True if the next block is to be looked up."""
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
