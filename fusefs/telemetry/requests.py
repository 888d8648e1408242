"""The times of programs' requests, by operation and outcome.

Outcomes: `ok`; `interrupted`: the process was killed or got a signal; `error`: a failure of S3, of
the cache or of the daemon (EIO and similar); `refused`: any other errno, which is a valid answer:
no such name, no permission, no space.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from fusefs.telemetry.histogram import REQUEST_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value

_ERRORS = frozenset((None, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET))


# Of the requests that are answered at once, the first ALL_TIMED are all timed, then one in PERIOD.
# PERIOD is a prime, because programs repeat the same few requests.
ALL_TIMED = 1000
PERIOD = 17
_MOST_OPCODES = 64


class RequestTimes:
    """The times of one mount's requests; `names` has the operations by their opcodes.

    Each request is counted, and each request that had to wait is timed. For requests answered at
    once, in a few microseconds, reading the clock twice would take a twentieth of the time: only
    every `period`-th of them is timed, and stands for `period` requests. Sessions count all of them
    in `counts`, by opcode. Belongs to the event loop.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.period = 1
        self.counts = [0] * _MOST_OPCODES
        self._timed = 0
        self._ok = {opcode: Histogram(REQUEST_BOUNDS) for opcode in self._names}
        # The counts of failures by opcode and outcome, and the times of failures.
        self._failed: Counter[tuple[int, str]] = Counter()
        self._others: dict[tuple[int, str], Histogram] = {}

    def sampled(self, opcode: int, began: float) -> None:
        """Record the time since `began` (monotonic s) for `period` requests already in `counts`."""
        self.timed(((opcode, time.monotonic() - began),), self.period)

    def timed(self, times: Sequence[tuple[int, float]], weight: int) -> None:
        """Record (opcode, seconds) of requests already in `counts`, each for `weight` requests."""
        for opcode, took_s in times:
            self._ok[opcode].weigh(took_s, weight)
        self._timed += len(times)
        if self._timed >= ALL_TIMED:
            self.period = PERIOD

    def refused(self, opcode: int, count: int) -> None:
        """Count `count` more requests that were refused and not timed."""
        self._failed[opcode, "refused"] += count
        if (opcode, "refused") not in self._others:
            self._others[opcode, "refused"] = Histogram(REQUEST_BOUNDS)

    def answered(self, opcode: int, began: float) -> None:
        """Count and time a request that was read at `began` (monotonic s) and is answered now."""
        self.counts[opcode] += 1
        self._ok[opcode].observe(time.monotonic() - began)

    def failed(self, opcode: int, began: float, number: int | None, weight: int = 1) -> None:
        """Count a request that failed with errno `number`, or None for a failure without an errno.

        The time since `began` (monotonic s; 0: not timed) stands for `weight` requests.
        """
        outcome = "refused"
        if number == errno.EINTR:
            outcome = "interrupted"
        elif number in _ERRORS:
            outcome = "error"
        self._failed[opcode, outcome] += 1
        histogram = self._others.get((opcode, outcome))
        if histogram is None:
            histogram = self._others[opcode, outcome] = Histogram(REQUEST_BOUNDS)
        if began:
            histogram.weigh(time.monotonic() - began, weight)

    def samples(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples of `requests_total` and of `request_duration_seconds`."""
        totals, durations = [], []
        counted = [
            ((opcode, "ok"), self.counts[opcode], times) for opcode, times in self._ok.items()
        ]
        counted += [(which, self._failed[which], times) for which, times in self._others.items()]
        for (opcode, outcome), count, times in counted:
            if count:
                name = self._names.get(opcode, str(opcode))
                totals.append(value(count, operation=name, outcome=outcome))
                durations.append(times.sample({"operation": name, "outcome": outcome}))
        return totals, durations
