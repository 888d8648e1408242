"""How long requests to S3 take, and what programs that wait for them wait for.

A `RequestClock` accompanies one attempt of a request from being sent to its end, in the event
loop or in a thread. In a thread it is found by `first_byte` and `set_aside`, so that the
modules that read answers need not hand it on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fusefs.telemetry.histogram import S3_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value
from fusefs.telemetry.stalls import WaitCause, current

T = TypeVar("T")

_LOOKS = frozenset(("HEAD", "LIST", "LIST PARTS", "LIST UPLOADS"))
# What these take is for the most part the time of their bodies.
_SENDS = frozenset(("PUT", "PUT PART", "CLUSTER PUT"))
NOTHING = -1


class S3Requests:
    """The times of one mount's requests to one store, from any thread.

    The names of their metrics begin with `prefix`.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        # Of the first byte and of the whole, by operation and code.
        self._times: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}

    def observe(self, operation: str, code: str, first_byte_s: float, whole_s: float) -> None:
        with self._lock:
            times = self._times.get((operation, code))
            if times is None:
                times = self._times[operation, code] = Histogram(S3_BOUNDS), Histogram(S3_BOUNDS)
            times[0].observe(first_byte_s)
            times[1].observe(whole_s)

    def samples(self) -> dict[str, list[Sample]]:
        """The samples of `requests_total` and of both times."""
        totals, first_bytes, wholes = [], [], []
        with self._lock:
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


S3_REQUESTS = S3Requests("s3")
CLUSTER_REQUESTS = S3Requests("cluster_cache")
"""Those of this process, which serves one mount, to its bucket and to its cluster cache."""


def cause_of(operation: str) -> int:
    """The number of the cause that a request waits for until its answer begins."""
    if operation in _LOOKS:
        return WaitCause.METADATA
    if operation == "CLUSTER GET":
        return WaitCause.CLUSTER_CACHE
    return WaitCause.S3_TRANSFER if operation in _SENDS else WaitCause.S3_FIRST_BYTE


class RequestClock:
    """One attempt of a request: `first_byte` when its answer begins, `end` when it is over.

    A thread whose attempt was abandoned may use it after its end, which changes nothing.
    """

    __slots__ = (
        "_began",
        "_cause",
        "_first_byte_s",
        "_is_aside",
        "_lock",
        "_operation",
        "_requests",
        "_work",
    )

    def __init__(self, operation: str, requests: S3Requests) -> None:
        """It is sent now, as a part of the current task's work."""
        self._operation = operation
        self._requests = requests
        self._work = current()
        # Between the thread of an attempt and the event loop that gives it up.
        self._lock = threading.Lock()
        self._cause = cause_of(operation)  # NOTHING after its end
        self._is_aside = False
        self._first_byte_s = -1.0
        self._work.enter(self._cause)
        self._began = time.monotonic()

    def first_byte(self) -> None:
        """Its answer begins; later calls change nothing."""
        if self._first_byte_s >= 0:
            return
        self._first_byte_s = time.monotonic() - self._began
        with self._lock:
            if self._cause == WaitCause.S3_FIRST_BYTE:
                self._cause = WaitCause.S3_TRANSFER
                self._work.move(WaitCause.S3_FIRST_BYTE, WaitCause.S3_TRANSFER)

    def set_aside(self) -> None:
        """The time is that of the caller from now on, who does something with the answer."""
        with self._lock:
            if self._cause != NOTHING:
                self._is_aside = True
                self._work.leave(self._cause)

    def resume(self) -> None:
        """What `set_aside` began is over."""
        with self._lock:
            if self._cause != NOTHING:
                self._is_aside = False
                self._work.enter(self._cause)

    def end(self, code: str) -> None:
        """It is over; `code` is a refusal's status, 200 for any success, `none`, or `cancelled`.

        With "" it was not sent.
        """
        whole_s = time.monotonic() - self._began
        with self._lock:
            if not self._is_aside:
                self._work.leave(self._cause)
            self._cause = NOTHING
        if code:
            first_byte_s = self._first_byte_s if self._first_byte_s >= 0 else whole_s
            self._requests.observe(self._operation, code, first_byte_s, whole_s)


_thread = threading.local()


def clocked(clock: RequestClock, work: Callable[[], T]) -> Callable[[], T]:
    """`work` for a thread, with `clock` as the clock of the request that it sends."""

    def run() -> T:
        _thread.clock = clock
        try:
            return work()
        finally:
            _thread.clock = None

    return run


def first_byte() -> None:
    """The answer to the request that this thread has sent begins."""
    clock: RequestClock | None = getattr(_thread, "clock", None)
    if clock is not None:
        clock.first_byte()


class handling_answer:
    """This thread does something with what has come of its request's answer, meanwhile.

    For each piece of each answer; a generator would take twice as long.
    """

    __slots__ = ("_clock",)

    def __enter__(self) -> None:
        self._clock: RequestClock | None = getattr(_thread, "clock", None)
        if self._clock is not None:
            self._clock.set_aside()

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.resume()
