"""The waits of programs' requests, counted like the kernel's pressure stall information.

For each cause of waits, this module counts the requests that wait for it now, the time in which at
least one request waited (*stalled*), and the sum of all waiting times (*wait*). Causes overlap, so
`any` is the union of all causes.

A *work* is an activity that any number of requests may wait for: the answer to one request, a
download, an upload. `enter` and `leave` note the causes of a work's delays; `stage` does so for the
work of the current task. `awaited` notes a request that waits for a work, and `waiting_for` a work
that waits for another work. Time counts only while a work has both a cause and a waiting request.
Tasks inherit the work of the task that started them (a context variable); prefetching begins a work
of its own, or is `unattended`. Shares of the last seconds are computed from snapshots, which are
taken when causes change, at most once a second: no timer is needed.

All classes and functions belong to the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple


class WaitCause:
    """The causes for which a request may wait, by number; `ANY` is the union of all others.

    `CONNECTION`: no connection of the budget is free. `THROTTLED`: S3 has refused requests as too
    many. `S3_FIRST_BYTE`, `S3_TRANSFER`: the start and the rest of an answer, or the sending of a
    body. `METADATA`: a listing or a HEAD. `CACHE_DISK`: the local disk. `CACHE_FULL`: no room in
    the cache. `CREDENTIALS`: credentials are looked up or renewed. `CLUSTER_CACHE`: an answer of
    the cluster cache.

    The causes are plain numbers, because members of an enumeration take twice as long as keys.
    """

    CONNECTION = 0
    THROTTLED = 1
    S3_FIRST_BYTE = 2
    S3_TRANSFER = 3
    METADATA = 4
    CACHE_DISK = 5
    CACHE_FULL = 6
    CREDENTIALS = 7
    CLUSTER_CACHE = 8
    ANY = 9


# The causes' names by number, as in metrics and status.
CAUSES = tuple(name.lower() for name in vars(WaitCause) if name.isupper())
_ANY = WaitCause.ANY
SNAPSHOT_EVERY_S = 1.0
# The longest period of `shares`, for which snapshots are stored.
KEPT_S = 300.0


class Pressure(NamedTuple):
    """The stalled and the waiting seconds of each cause, at the index of its number."""

    stalled: tuple[float, ...]
    wait: tuple[float, ...]


class _Counted:
    """The times of one cause (see `Pressure`), and when (`changed`) its `waiters` last changed."""

    __slots__ = ("changed", "stalled", "wait", "waiters")

    def __init__(self) -> None:
        self.waiters = 0
        self.changed = self.stalled = self.wait = 0.0


class Stalls:
    """The waits of one mount's requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self._causes = tuple(_Counted() for _ in CAUSES)
        self._began = time.monotonic()
        # The time of the next snapshot, in monotonic seconds.
        self._due = self._began + SNAPSHOT_EVERY_S
        self._snapshots: deque[tuple[float, tuple[float, ...]]] = deque()

    def change(self, causes: Iterable[int], count: int, at: float | None) -> None:
        """Add `count` (may be negative) to the waiting requests of `causes`, as of `at` or now."""
        if at is None:
            at = time.monotonic()
        if at >= self._due:
            self._due = at + SNAPSHOT_EVERY_S
            self._snapshots.append((at, self.totals(at).stalled))
            while len(self._snapshots) > 1 and self._snapshots[1][0] <= at - KEPT_S:
                self._snapshots.popleft()
        for cause in causes:
            counted = self._causes[cause]
            elapsed = at - counted.changed
            if elapsed > 0:  # `at` may be before the last change
                if counted.waiters:
                    counted.stalled += elapsed
                    counted.wait += counted.waiters * elapsed
                counted.changed = at
            counted.waiters += count

    def shares(self, seconds: float) -> list[float]:
        """Return the share of the last `seconds` in which requests waited, by cause."""
        now = time.monotonic()
        stalled, then = self.totals(now).stalled, now - seconds
        before = self._stalled_at(then, now, stalled)
        return [
            min(1.0, max(0.0, (late - early) / seconds))
            for late, early in zip(stalled, before, strict=True)
        ]

    def totals(self, now: float | None = None) -> Pressure:
        """Return the times from the process's start to `now` (monotonic s; None: this moment)."""
        now = time.monotonic() if now is None else now
        stalled, wait = [], []
        for counted in self._causes:
            elapsed = max(0.0, now - counted.changed) if counted.waiters else 0.0
            stalled.append(counted.stalled + elapsed)
            wait.append(counted.wait + counted.waiters * elapsed)
        return Pressure(tuple(stalled), tuple(wait))

    def _stalled_at(self, then: float, now: float, stalled: tuple[float, ...]) -> list[float]:
        """Interpolate the stalled times at `then` from snapshots; at `now` they are `stalled`."""
        early, late = (self._began, (0.0,) * len(stalled)), (now, stalled)
        for snapshot in self._snapshots:
            if snapshot[0] > then:
                late = snapshot
                break
            early = snapshot
        if then <= early[0] or late[0] <= early[0]:
            return list(early[1])
        share = (then - early[0]) / (late[0] - early[0])
        return [one + share * (two - one) for one, two in zip(early[1], late[1], strict=True)]


# The waits of this process, which serves one mount.
STALLS = Stalls()


class Work:
    """An activity, such as a download, that any number of requests may wait for."""

    __slots__ = ("_causes", "_stalls", "_waiters")

    def __init__(self, stalls: Stalls = STALLS) -> None:
        self._stalls = stalls
        self._waiters = 0
        # The number of the work's tasks or threads that wait for a cause, by cause.
        self._causes: dict[int, int] = {}

    def enter(self, cause: int, at: float | None = None) -> None:
        """Note that a cause begins to delay this work, now or at `at` (monotonic seconds)."""
        causes = self._causes
        if cause in causes:
            causes[cause] += 1
            return
        causes[cause] = 1
        if self._waiters:
            changing = (cause,) if len(causes) > 1 else (cause, _ANY)
            self._stalls.change(changing, self._waiters, at)

    def leave(self, cause: int, at: float | None = None) -> None:
        """Note that a cause from `enter` no longer delays this work, now or since `at`."""
        causes = self._causes
        if causes[cause] > 1:
            causes[cause] -= 1
            return
        del causes[cause]
        if self._waiters:
            changing = (cause,) if causes else (cause, _ANY)
            self._stalls.change(changing, -self._waiters, at)

    def move(self, cause: int, to: int, at: float | None = None) -> None:
        """Replace a cause from `enter` by the cause `to`, now or at `at`."""
        self.enter(to, at)
        self.leave(cause, at)

    def wait(self, count: int) -> None:
        """Add `count` (may be negative) to the number of requests that wait for this work."""
        self._waiters += count
        if self._causes:
            self._stalls.change((*self._causes, _ANY), count, None)

    def begin(self) -> None:
        """Make this work the current task's work, until the task ends."""
        _work.set(self)

    def awaited(self) -> _Waiters:
        """Count one more request as waiting for this work in a block (`with work.awaited()`)."""
        return _Waiters(self, 1)

    def doing(self) -> _Doing:
        """Make this work, in a `with` block, the work of the current task and of its new tasks."""
        return _Doing(self)


class _Waiters:
    """A context manager that counts requests as waiting; twice as fast as a generator."""

    __slots__ = ("_count", "_work")

    def __init__(self, work: Work, count: int) -> None:
        self._work = work
        self._count = count

    def __enter__(self) -> None:
        if self._count:
            self._work.wait(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count:
            self._work.wait(-self._count)


class _Doing:
    """A context manager that makes a work the current task's work."""

    __slots__ = ("_token", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._token = _work.set(self._work)

    def __exit__(self, *_: object) -> None:
        _work.reset(self._token)


_UNATTENDED = Work()
_work: ContextVar[Work] = ContextVar("work", default=_UNATTENDED)


def current() -> Work:
    """Return the current task's work."""
    return _work.get()


class served:
    """Give the current task, in a `with` block, a new work for which one request waits."""

    __slots__ = ("_token", "_work")

    def __init__(self) -> None:
        self._work = Work()

    def __enter__(self) -> None:
        self._work._waiters = 1
        self._token = _work.set(self._work)

    def __exit__(self, *_: object) -> None:
        _work.reset(self._token)
        self._work.wait(-1)


def unattended() -> _Doing:
    """Give this task and its new tasks, in a `with` block, a work for which no request waits."""
    return _UNATTENDED.doing()


def waiting_for(work: Work) -> _Waiters:
    """Count, in a `with` block, the requests that wait for this task's work as waiting for `work`.

    Only the requests that wait when the block begins are counted; an unattended work has none.
    """
    mine = current()
    # If a part of a work waits for another part, its requests are counted already.
    return _Waiters(work, 0 if mine is work else mine._waiters)


class stage:
    """Note that a cause delays this task's work in a block (`with stage(WaitCause.METADATA)`)."""

    __slots__ = ("_cause", "_work")

    def __init__(self, cause: int) -> None:
        self._cause = cause
        self._work = _work.get()

    def __enter__(self) -> None:
        self._work.enter(self._cause)

    def __exit__(self, *_: object) -> None:
        self._work.leave(self._cause)
