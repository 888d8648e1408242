"""How long requests to S3 take, and what programs that wait for them wait for.

A `RequestClock` accompanies one attempt of a request from being sent to its end. It belongs to
the event loop, also where the attempt is made in a thread: there it is found by `first_byte` and
`handling_answer`, which leave notes (stalls.py). So the modules that read answers need not hand
it on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fusefs.telemetry.histogram import MOST_NEW, S3_BOUNDS, Histogram
from fusefs.telemetry.metrics import Sample, value
from fusefs.telemetry.stalls import STALLS, WaitCause, current

T = TypeVar("T")

# What a request waits for until its answer begins; for the first byte, if it does not stand here.
_CAUSES = {
    "HEAD": WaitCause.METADATA,
    "LIST": WaitCause.METADATA,
    "LIST PARTS": WaitCause.METADATA,
    "LIST UPLOADS": WaitCause.METADATA,
    "CLUSTER GET": WaitCause.CLUSTER_CACHE,
    # What these take is for the most part the time of their bodies.
    "PUT": WaitCause.S3_TRANSFER,
    "PUT PART": WaitCause.S3_TRANSFER,
    "CLUSTER PUT": WaitCause.S3_TRANSFER,
}
NOTHING = -1


class _Times:
    """Those of the first byte and of the whole, of one kind of request."""

    __slots__ = ("_first_byte", "_whole", "new")

    def __init__(self) -> None:
        self._first_byte = Histogram(S3_BOUNDS)
        self._whole = Histogram(S3_BOUNDS)
        # What is not sorted yet, by turns.
        self.new: list[float] = []

    def sort(self) -> tuple[Histogram, Histogram]:
        """The histograms of both, with all that is new."""
        self._first_byte.observe_all(self.new[::2])
        self._whole.observe_all(self.new[1::2])
        self.new.clear()
        return self._first_byte, self._whole


class S3Requests:
    """The times of one mount's requests to one store. Belongs to the event loop.

    The names of their metrics begin with `prefix`.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # By operation and code.
        self._times: dict[tuple[str, str], _Times] = {}

    def observe(self, operation: str, code: str, first_byte_s: float, whole_s: float) -> None:
        """Count a request that has ended; times are in seconds from when it was sent."""
        times = self._times.get((operation, code))
        if times is None:
            times = self._times[operation, code] = _Times()
        new = times.new
        new.append(first_byte_s)
        new.append(whole_s)
        if len(new) >= MOST_NEW:
            times.sort()

    def samples(self) -> dict[str, list[Sample]]:
        """The samples of `requests_total` and of both times."""
        totals, first_bytes, wholes = [], [], []
        for (operation, code), times in self._times.items():
            first_byte, whole = times.sort()
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
    return _CAUSES.get(operation, WaitCause.S3_FIRST_BYTE)


class RequestClock:
    """One attempt of a request: `first_byte` when its answer begins, `end` when it is over.

    Nothing changes after its end: a thread whose attempt was abandoned may note something later.
    `sent` is how many requests it was, in a thread: a redirect is followed within the attempt,
    and an answer that leaves a doubt is looked into.
    """

    __slots__ = (
        "_began",
        "_cause",
        "_first_byte_s",
        "_is_aside",
        "_operation",
        "_requests",
        "_work",
        "sent",
    )

    def __init__(self, operation: str, requests: S3Requests) -> None:
        """It is sent now, as a part of the current task's work."""
        self.sent = 0
        self._operation = operation
        self._requests = requests
        self._work = current()
        self._cause = cause_of(operation)  # NOTHING after its end
        self._is_aside = False
        self._first_byte_s = -1.0
        if STALLS.notes:
            STALLS.take_notes()
        self._began = time.monotonic()
        self._work.enter(self._cause, self._began)

    def first_byte(self, at: float | None = None) -> None:
        """Its answer begins, now or at that moment; later calls change nothing."""
        if self._first_byte_s >= 0 or self._cause == NOTHING:
            return
        if at is None:
            STALLS.take_notes()
            at = time.monotonic()
        self._first_byte_s = at - self._began
        if self._cause == WaitCause.S3_FIRST_BYTE and not self._is_aside:
            self._cause = WaitCause.S3_TRANSFER
            self._work.move(WaitCause.S3_FIRST_BYTE, WaitCause.S3_TRANSFER, at)

    def set_aside(self, at: float) -> None:
        """The time is not its own from then on: something is done with the answer."""
        if self._cause != NOTHING:
            self._is_aside = True
            self._work.leave(self._cause, at)

    def resume(self, at: float) -> None:
        """What `set_aside` began is over."""
        if self._cause != NOTHING:
            self._is_aside = False
            self._work.enter(self._cause, at)

    def end(self, code: str) -> None:
        """It is over; `code` is a refusal's status, 200 for any success, `none`, or `cancelled`.

        With "" it was not sent.
        """
        if STALLS.notes:
            STALLS.take_notes()
        now = time.monotonic()
        if not self._is_aside:
            self._work.leave(self._cause, now)
        self._cause = NOTHING
        if code:
            whole_s = now - self._began
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


def note_sent() -> None:
    clock: RequestClock | None = getattr(_thread, "clock", None)
    if clock is not None:
        clock.sent += 1


def first_byte() -> None:
    """The answer to the request that this thread has sent begins."""
    clock: RequestClock | None = getattr(_thread, "clock", None)
    if clock is not None:
        STALLS.note(clock.first_byte)


class handling_answer:
    """This thread does something with what has come of its request's answer, meanwhile.

    For each piece of each answer; a generator would take twice as long.
    """

    __slots__ = ("_clock",)

    def __enter__(self) -> None:
        self._clock: RequestClock | None = getattr(_thread, "clock", None)
        if self._clock is not None:
            STALLS.note(self._clock.set_aside)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            STALLS.note(self._clock.resume)
