"""The times of requests to S3, and the waits of programs for these requests.

A `RequestClock` measures one attempt of a request, from its start to its end.
"""

from __future__ import annotations

import time

from fusefs.telemetry.histogram import S3_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value
from fusefs.telemetry.stalls import WaitCause, current

# The causes of waits until an answer begins, by operation; S3_FIRST_BYTE for other operations.
_CAUSES = {
    "HEAD": WaitCause.METADATA,
    "LIST": WaitCause.METADATA,
    "LIST PARTS": WaitCause.METADATA,
    "LIST UPLOADS": WaitCause.METADATA,
    "CLUSTER GET": WaitCause.CLUSTER_CACHE,
    # Most of the time of these operations is for sending their bodies.
    "PUT": WaitCause.S3_TRANSFER,
    "PUT PART": WaitCause.S3_TRANSFER,
    "CLUSTER PUT": WaitCause.S3_TRANSFER,
}


class S3Requests:
    """The times of one store's requests, whose metrics begin with `prefix`. For the event loop."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # Times to the first byte and to the end, by operation and code.
        self._times: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}

    def observe(self, operation: str, code: str, first_byte_s: float, whole_s: float) -> None:
        """Count a request that has ended; both times are in seconds since the request was sent."""
        times = self._times.get((operation, code))
        if times is None:
            times = self._times[operation, code] = Histogram(S3_BOUNDS), Histogram(S3_BOUNDS)
        times[0].observe(first_byte_s)
        times[1].observe(whole_s)

    def samples(self) -> dict[str, list[Sample]]:
        """Return the samples of the requests' number and their two durations, by metric."""
        totals, first_bytes, wholes = [], [], []
        for (operation, code), (first_byte, whole) in self._times.items():
            name = operation.removeprefix("CLUSTER ").lower().replace(" ", "_")
            labels = {"operation": name, "code": code}
            totals.append(value(whole.count, **labels))
            first_bytes.append(first_byte.sample(labels))
            wholes.append(whole.sample(labels))
        return {
            f"{self._prefix}_requests_total": totals,
            f"{self._prefix}_first_byte_seconds": first_bytes,
            f"{self._prefix}_request_duration_seconds": wholes,
        }


# The requests of this process, which serves one mount, to its bucket and to its cluster cache.
S3_REQUESTS = S3Requests("s3")
CLUSTER_REQUESTS = S3Requests("cluster_cache")


def cause_of(operation: str) -> int:
    """Return the `WaitCause` of programs that wait until a request's answer begins."""
    return _CAUSES.get(operation, WaitCause.S3_FIRST_BYTE)


class RequestClock:
    """The clock of one attempt. Call `first_byte` when the answer begins, then `end` once."""

    __slots__ = ("_began", "_cause", "_first_byte_s", "_operation", "_requests", "_work")

    def __init__(self, operation: str, requests: S3Requests) -> None:
        """Start the clock; until `end`, the attempt delays the current task's work (stalls.py)."""
        self._operation = operation
        self._requests = requests
        self._work = current()
        self._cause = cause_of(operation)
        self._first_byte_s = -1.0
        self._began = time.monotonic()
        self._work.enter(self._cause, self._began)

    def first_byte(self, at: float | None = None) -> None:
        """Note that the answer begins, now or at `at` (monotonic s); only the first call counts."""
        if self._first_byte_s >= 0:
            return
        if at is None:
            at = time.monotonic()
        self._first_byte_s = at - self._began
        if self._cause == WaitCause.S3_FIRST_BYTE:
            self._cause = WaitCause.S3_TRANSFER
            self._work.move(WaitCause.S3_FIRST_BYTE, WaitCause.S3_TRANSFER, at)

    def end(self, code: str) -> None:
        """Count the attempt as ended; `code`: `200`, an error's status, `none` or `cancelled`."""
        now = time.monotonic()
        self._work.leave(self._cause, now)
        whole_s = now - self._began
        first_byte_s = self._first_byte_s if self._first_byte_s >= 0 else whole_s
        self._requests.observe(self._operation, code, first_byte_s, whole_s)
