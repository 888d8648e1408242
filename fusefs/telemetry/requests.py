"""How long the requests of programs took, by operation and outcome.

Outcomes: `ok`; `interrupted`, its process was killed or got a signal; `error`, something went
wrong at S3, in the cache or here (EIO and its like); `refused`, any other error, which is an
answer as well: no such name, no right, no room.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping

from fusefs.telemetry.histogram import REQUEST_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value

_ERRORS = frozenset((None, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET))


class RequestTimes:
    """The times of one mount's requests; `names` has the operations by their opcodes.

    Belongs to the event loop.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._ok = {opcode: Histogram(REQUEST_BOUNDS) for opcode in self._names}
        self._others: dict[tuple[int, str], Histogram] = {}

    def answered(self, opcode: int, began: float) -> None:
        """A request that was read at `began`, in monotonic seconds, is answered now."""
        self._ok[opcode].observe(time.monotonic() - began)

    def failed(self, opcode: int, began: float, number: int | None) -> None:
        """As `answered`, with an errno."""
        outcome = "refused"
        if number == errno.EINTR:
            outcome = "interrupted"
        elif number in _ERRORS:
            outcome = "error"
        histogram = self._others.get((opcode, outcome))
        if histogram is None:
            histogram = self._others[opcode, outcome] = Histogram(REQUEST_BOUNDS)
        histogram.observe(time.monotonic() - began)

    def samples(self) -> tuple[list[Sample], list[Sample]]:
        """The samples of `requests_total` and of `request_duration_seconds`."""
        times = [((opcode, "ok"), histogram) for opcode, histogram in self._ok.items()]
        totals, durations = [], []
        for (opcode, outcome), histogram in [*times, *self._others.items()]:
            if histogram.count:
                name = self._names.get(opcode, str(opcode))
                totals.append(value(histogram.count, operation=name, outcome=outcome))
                durations.append(histogram.sample({"operation": name, "outcome": outcome}))
        return totals, durations
