"""The budget of connections: which requests run at once, by priority.

At most `maximum` requests run at once. When S3 throttles, the permitted number halves, at most
every 0.1 s; a full round of successes raises it by one (additive increase, multiplicative
decrease). If S3 continues to throttle, the rate of requests is limited instead (rate.py); a request
then waits for a connection and for its turn in the same queue.

Requests for waiting programs go before uploads, and uploads before prefetching. Uploads and
prefetching leave a few connections free for the next waiting program. Within a priority the objects
take turns, so that a reader of one small file waits for one request of each other object, not for
all parts of a large one. A request that was passed over PASSED_MOST times goes next, so that
uploads never starve.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

import trio

from fusefs.store.admission.rate import Rate
from fusefs.store.interface import Priority, Urgency
from fusefs.telemetry.stalls import WaitCause, stage

# A few round trips: requests refused in this time were sent before the last reduction.
BACK_OFF_EVERY_S = 0.1
# More urgent requests that may pass a waiting one; a ninth of all is enough for progress.
PASSED_MOST = 8


class _Lease:
    """A connection for an `async with` block; a class takes half the time of a generator.

    It first waits for its `turn` in the queue of the priority `rank`, which may still change, and
    then is counted under this priority.
    """

    __slots__ = ("_budget", "key", "priority", "rank", "turn")

    def __init__(self, budget: ConnectionBudget, priority: Urgency, key: str) -> None:
        self._budget = budget
        self.priority = priority
        self.key = key
        self.rank = priority()
        self.turn: trio.Event  # while it waits

    async def __aenter__(self) -> None:
        await self._budget.acquire(self)

    async def __aexit__(self, *_: object) -> None:
        self._budget.release(self.rank)


class _Queue:
    """The waiters of one priority: objects take turns, and each object's requests go in order."""

    def __init__(self) -> None:
        # Ordered dictionaries, since a cancelled waiter leaves the middle.
        self._of: OrderedDict[str, OrderedDict[_Lease, None]] = OrderedDict()

    def __iter__(self) -> Iterator[_Lease]:
        return chain.from_iterable(self._of.values())

    def add(self, waiter: _Lease) -> None:
        self._of.setdefault(waiter.key, OrderedDict())[waiter] = None

    def remove(self, waiter: _Lease) -> None:
        queue = self._of[waiter.key]
        del queue[waiter]
        if not queue:
            del self._of[waiter.key]

    def take(self, waiter: _Lease) -> None:
        """Remove the waiter whose turn has come; the other waiters of its object go to the back."""
        self.remove(waiter)
        if waiter.key in self._of:
            self._of.move_to_end(waiter.key)


class ConnectionBudget:
    """Lends the connections of one store to requests by priority, fewer while S3 throttles.

    Belongs to the event loop.
    """

    def __init__(
        self, maximum: int, nursery: trio.Nursery, next_budget: ConnectionBudget | None = None
    ) -> None:
        """`nursery` runs the task that admits requests while there is a rate limit.

        `next_budget`, if any, is the budget from which each request takes a connection as well,
        once this budget has lent it one.
        """
        self.maximum = maximum
        self._nursery = nursery
        self._next_budget = next_budget
        self._allowed = float(maximum)
        self._running = dict.fromkeys(Priority, 0)
        self.in_use = 0
        self._queues = {rank: _Queue() for rank in Priority}
        self.waiting = 0  # requests that wait for a connection or their turn
        # By priority: the number of more urgent requests admitted since its last admission.
        self._passed = dict.fromkeys(Priority, 0)
        self._backed_off = -math.inf
        self._is_timing = False
        self.rate = Rate()

    @property
    def allowed(self) -> int:
        """The number of requests that may run at once now."""
        return max(1, int(self._allowed))

    def lease(self, priority: Urgency, key: str = "") -> _Lease:
        """Return an `async with` context that waits for and holds a connection for object `key`."""
        return _Lease(self, priority, key)

    def note_throttled(self) -> None:
        """Halve the permitted connections, at most every 0.1 s, unless there is a rate limit."""
        now = trio.current_time()
        # With a rate limit, fewer connections would only leave a part of the rate unused.
        if self.rate.limit is None and now - self._backed_off >= BACK_OFF_EVERY_S:
            self._backed_off = now
            self._allowed = max(1.0, self._allowed / 2)

    def note_success(self) -> None:
        """Count a success, which raises the permitted connections if they were reduced."""
        self.rate.note_success()
        if self._allowed < self.maximum:
            self._allowed = min(float(self.maximum), self._allowed + 1 / self._allowed)
            self._admit()

    def reprioritize(self) -> None:
        """Move waiters to the queues of their present priorities, because a priority has risen."""
        for queue in self._queues.values():
            for waiter in list(queue):
                self._rank(waiter)
        self._admit()

    async def acquire(self, lease: _Lease) -> None:
        """Wait for a connection for `lease`; a cancelled call holds none."""
        if not self.waiting and self._has_room(lease.rank) and self.rate.is_due():
            await trio.lowlevel.checkpoint_if_cancelled()
            self._take(lease.rank)
            return
        lease.turn = trio.Event()
        self._queues[lease.rank].add(lease)
        self.waiting += 1
        self._admit()
        try:
            with stage(WaitCause.THROTTLED if self._is_throttled else WaitCause.CONNECTION):
                await lease.turn.wait()
        except trio.Cancelled:
            if lease.turn.is_set():
                self.release(lease.rank)
            else:
                self._queues[lease.rank].remove(lease)
                self.waiting -= 1
                self._admit()
            raise

    def release(self, rank: Priority) -> None:
        """Give back a connection; `rank` is the priority that `acquire` returned for it."""
        self.in_use -= 1
        self._running[rank] -= 1
        if self.waiting:
            self._admit()

    def take_spare(self) -> bool:
        """Take an unused connection, with the priority PREFETCH, without waiting.

        Returns False if there is none, other requests wait, or the store throttles.
        """
        if self._is_throttled or self.waiting or not self._has_room(Priority.PREFETCH):
            return False
        self._take(Priority.PREFETCH)
        return True

    @property
    def _is_throttled(self) -> bool:
        """True if the store has recently refused requests as too many."""
        if self.rate.limit is not None or self.allowed < self.maximum:
            return True
        return self._next_budget is not None and self._next_budget._is_throttled

    def _take(self, rank: Priority) -> None:
        """Count a request that has got a connection."""
        self.in_use += 1
        self._running[rank] += 1
        self.rate.note_sent()

    def _has_room(self, rank: Priority) -> bool:
        allowed, is_overdue = self.allowed, self._passed[rank] >= PASSED_MOST
        if rank > Priority.DEMAND and (self._running[rank] or not is_overdue):
            allowed -= min(allowed // 4, 4)  # kept for the next demand
        return self.in_use < allowed

    def _admit(self) -> None:
        """Give free connections to the next waiters."""
        while self.in_use < self.allowed:
            waiter = self._next()
            if waiter is None:
                return
            if not self.rate.is_due():
                if not self._is_timing:
                    self._is_timing = True
                    # Not in a waiter's task: its cancellation would leave the others waiting.
                    self._nursery.start_soon(self._admit_in_time)
                return
            self._queues[waiter.rank].take(waiter)
            self.waiting -= 1
            self._passed[waiter.rank] = 0
            for rank in self._queues:
                self._passed[rank] += rank > waiter.rank and any(self._queues[rank])
            self._take(waiter.rank)
            waiter.turn.set()

    async def _admit_in_time(self) -> None:
        """Admit waiters as the rate limit allows, until the limit delays no waiter any more."""
        try:
            while self.waiting and not self.rate.is_due():
                await trio.sleep_until(self.rate.due)
                self._admit()
        finally:
            self._is_timing = False
        self._admit()  # a turn may have come before this task first ran

    def _next(self) -> _Lease | None:
        """Return the waiter to admit now (one often passed over, else the most urgent), or None."""
        heads = [head for rank in self._queues if (head := self._head(rank)) is not None]
        fitting = [head for head in heads if self._has_room(head.rank)]
        return min(fitting, key=lambda head: self._passed[head.rank] < PASSED_MOST, default=None)

    def _head(self, rank: Priority) -> _Lease | None:
        while (waiter := next(iter(self._queues[rank]), None)) is not None:
            self._rank(waiter)
            if waiter.rank <= rank:
                return waiter
        return None

    def _rank(self, waiter: _Lease) -> None:
        """Move a waiter to the queue of its present priority."""
        rank = waiter.priority()
        if rank != waiter.rank:
            self._queues[waiter.rank].remove(waiter)
            waiter.rank = rank
            self._queues[rank].add(waiter)
