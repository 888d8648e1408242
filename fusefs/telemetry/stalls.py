"""The waits of programs' requests, as the kernel's pressure stall information counts it.

For each cause there is a count of the requests that wait for it, the time in which there was at
least one (*stalled*) and the time of all of them added up (*wait*). `any` is their union: causes
overlap.

A *work* is something that any number of requests may wait for: the answer to one request, a
download, an upload. What it spends its time on is noted by `enter` and `leave`, or by a `stage`,
which finds the work of its own task; who waits for it, by `awaited`, or by `waiting_for` where a
work waits for another one's. Time counts while it has both, so what nothing waits for yet counts
for nothing. Tasks inherit the work of the task that has started them (a context variable); what is
fetched ahead begins a work of its own, or is `unattended`. Shares of the last seconds follow from
snapshots that are taken when causes change, at most one a second: nothing wakes up for them.

All of it belongs to the event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple


class WaitCause:
    """The causes for which a request may wait, by number; the last one is the union of all others.

    `CONNECTION`: one of the budget's connections to be free. `THROTTLED`: S3 to take more
    requests than it has refused. `S3_FIRST_BYTE`, `S3_TRANSFER`: the start and the rest of an
    answer, or a body to be sent. `METADATA`: a listing or a HEAD. `CACHE_DISK`: the local disk.
    `CACHE_FULL`: room in the cache. `CREDENTIALS`: keys to be found or renewed.
    `CLUSTER_CACHE`: an answer of the cluster cache.

    Plain numbers: members of an enumeration take twice as long to find things by.
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


# Their names by number, as metrics and status have them.
CAUSES = tuple(name.lower() for name in vars(WaitCause) if name.isupper())
_ANY = WaitCause.ANY
SNAPSHOT_EVERY_S = 1.0
# The longest time that `shares` looks back.
KEPT_S = 300.0


class Pressure(NamedTuple):
    """The times of each cause, in seconds, by its number."""

    stalled: tuple[float, ...]
    wait: tuple[float, ...]


class _Counted:
    """The times of one cause; see `Pressure`. `changed` is when `waiters` last did."""

    __slots__ = ("changed", "stalled", "wait", "waiters")

    def __init__(self) -> None:
        self.waiters = 0
        self.changed = self.stalled = self.wait = 0.0


class Stalls:
    """The waits of one mount's requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self._causes = tuple(_Counted() for _ in CAUSES)
        self._began = time.monotonic()
        # When the next snapshot is due, in monotonic seconds.
        self._due = self._began + SNAPSHOT_EVERY_S
        self._snapshots: deque[tuple[float, tuple[float, ...]]] = deque()

    def change(self, causes: Iterable[int], count: int, at: float | None) -> None:
        """So many more requests wait for these from a moment on (None: now), or fewer."""
        if at is None:
            at = time.monotonic()
        if at >= self._due:
            self._take_snapshot(at)
        for cause in causes:
            counted = self._causes[cause]
            elapsed = at - counted.changed
            if elapsed > 0:  # the moment may be past
                if counted.waiters:
                    counted.stalled += elapsed
                    counted.wait += counted.waiters * elapsed
                counted.changed = at
            counted.waiters += count

    def shares(self, seconds: float) -> list[float]:
        """The share of the last `seconds` in which requests waited, by cause."""
        now = time.monotonic()
        stalled, then = self.totals(now).stalled, now - seconds
        before = self._stalled_at(then, now, stalled)
        return [
            min(1.0, max(0.0, (late - early) / seconds))
            for late, early in zip(stalled, before, strict=True)
        ]

    def totals(self, now: float | None = None) -> Pressure:
        """All times since the process began, until `now` (monotonic seconds; None: this moment)."""
        now = time.monotonic() if now is None else now
        stalled, wait = [], []
        for counted in self._causes:
            elapsed = max(0.0, now - counted.changed) if counted.waiters else 0.0
            stalled.append(counted.stalled + elapsed)
            wait.append(counted.wait + counted.waiters * elapsed)
        return Pressure(tuple(stalled), tuple(wait))

    def _take_snapshot(self, now: float) -> None:
        """Keep what was until now."""
        self._due = now + SNAPSHOT_EVERY_S
        self._snapshots.append((now, self.totals(now).stalled))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - KEPT_S:
            self._snapshots.popleft()

    def _stalled_at(self, then: float, now: float, stalled: tuple[float, ...]) -> list[float]:
        """The stalled times as they were, between two snapshots in proportion."""
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


STALLS = Stalls()
"""Those of this process, which serves one mount."""


class Work:
    """Something that is done, and that requests may wait for; see the module's text."""

    __slots__ = ("_causes", "_stalls", "_waiters")

    def __init__(self, stalls: Stalls = STALLS) -> None:
        self._stalls = stalls
        self._waiters = 0
        # What it is at: how many of its tasks or threads, by cause.
        self._causes: dict[int, int] = {}

    def enter(self, cause: int, at: float | None = None) -> None:
        """It begins to spend time on something, now or at a moment, in monotonic seconds."""
        causes = self._causes
        if cause in causes:
            causes[cause] += 1
            return
        causes[cause] = 1
        if self._waiters:
            changing = (cause,) if len(causes) > 1 else (cause, _ANY)
            self._stalls.change(changing, self._waiters, at)

    def leave(self, cause: int, at: float | None = None) -> None:
        """End what was entered."""
        causes = self._causes
        if causes[cause] > 1:
            causes[cause] -= 1
            return
        del causes[cause]
        if self._waiters:
            changing = (cause,) if causes else (cause, _ANY)
            self._stalls.change(changing, -self._waiters, at)

    def move(self, cause: int, to: int, at: float | None = None) -> None:
        """End what was entered, and begin something else."""
        self.enter(to, at)
        self.leave(cause, at)

    def wait(self, count: int) -> None:
        """So many more requests wait for it, or fewer."""
        self._waiters += count
        if self._causes:
            self._stalls.change((*self._causes, _ANY), count, None)

    @property
    def waiters(self) -> int:
        """The number of requests that wait for it now."""
        return self._waiters

    def begin(self) -> None:
        """Stages of this task are this work's from now on, to the task's end."""
        _work.set(self)

    def awaited(self) -> _Awaited:
        return _Awaited(self)

    def doing(self) -> _Doing:
        """Stages of this task, and of those that it starts, are this work's meanwhile."""
        return _Doing(self)


class _Awaited:
    """Counts a request that waits; a class costs half of what a generator does."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._work.wait(1)

    def __exit__(self, *_: object) -> None:
        self._work.wait(-1)


class _Doing:
    """Makes a work the one of this task."""

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
    """The work that this task does a part of."""
    return _work.get()


class served:
    """This task's work is one request's meanwhile, which waits for it (`with served()`)."""

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
    """Mark the work of this task, and of those that it starts, as what no request waits for."""
    return _UNATTENDED.doing()


class waiting_for:
    """Mark this task's work as waiting for another one (`with waiting_for(work)`).

    So the requests that wait for the one wait for the other as well: none, if this task's
    work is unattended. Requests that come to wait for it later are not counted.
    """

    __slots__ = ("_count", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work
        mine = _work.get()
        # A part of a work that waits for another part: its requests are counted already.
        self._count = 0 if mine is work else mine.waiters

    def __enter__(self) -> None:
        if self._count:
            self._work.wait(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count:
            self._work.wait(-self._count)


class stage:
    """Mark the cause for which this task waits meanwhile (`with stage(WaitCause.CACHE_DISK)`)."""

    __slots__ = ("_cause", "_work")

    def __init__(self, cause: int) -> None:
        self._cause = cause
        self._work = _work.get()

    def __enter__(self) -> None:
        self._work.enter(self._cause)

    def __exit__(self, *_: object) -> None:
        self._work.leave(self._cause)
