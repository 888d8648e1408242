"""The times of programs' requests, by operation and outcome.

Outcomes: `ok`; `interrupted`, its process was killed or got a signal; `error`, something went
wrong at S3, in the cache or here (EIO and its like); `refused`, any other error, which is an
answer as well: no such name, no right, no room.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from fusefs.telemetry.histogram import REQUEST_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value

_ERRORS = frozenset((None, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET))


# Of requests that are answered at once so many are timed; then one of PERIOD is. A prime, for
# programs make the same few requests over and over.
ALL_TIMED = 1000
PERIOD = 17
_MOST_OPCODES = 64


class RequestTimes:
    """The times of one mount's requests; `names` has the operations by their opcodes.

    Each request is counted, and each that had to wait is timed. Of those that are answered
    at once, in a few microseconds, two looks at the clock would be a twentieth: of these every
    `period`-th is timed, and stands for as many. Their sessions count the others in `counts`,
    by opcode. Belongs to the event loop.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.period = 1
        self.counts = [0] * _MOST_OPCODES
        self._timed = 0
        self._ok = {opcode: Histogram(REQUEST_BOUNDS) for opcode in self._names}
        # How many failed, by opcode and outcome, and their times.
        self._failed: Counter[tuple[int, str]] = Counter()
        self._others: dict[tuple[int, str], Histogram] = {}

    def sampled(self, opcode: int, began: float) -> None:
        """A request that is in `counts` was read at `began`, in monotonic s, and answered now."""
        self.timed(((opcode, time.monotonic() - began),), self.period)

    def timed(self, times: Sequence[tuple[int, float]], weight: int) -> None:
        """Some of those, each of which stands for so many: opcodes, and how long they took."""
        for opcode, took_s in times:
            self._ok[opcode].weigh(took_s, weight)
        self._timed += len(times)
        if self._timed >= ALL_TIMED:
            self.period = PERIOD

    def refused(self, opcode: int, count: int) -> None:
        """So many requests more were refused, untimed."""
        self._failed[opcode, "refused"] += count
        if (opcode, "refused") not in self._others:
            self._others[opcode, "refused"] = Histogram(REQUEST_BOUNDS)

    def answered(self, opcode: int, began: float) -> None:
        """A request that was read at `began`, in monotonic seconds, is answered now."""
        self.counts[opcode] += 1
        self._ok[opcode].observe(time.monotonic() - began)

    def failed(self, opcode: int, began: float, number: int | None, weight: int = 1) -> None:
        """As `answered`, with an errno; 0 for `began` if it was not timed."""
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
        """The samples of `requests_total` and of `request_duration_seconds`."""
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
