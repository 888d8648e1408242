"""How many requests run at once, and which goes first: a budget with priorities.

At most `maximum` requests run at once. When S3 throttles, the number that is
allowed halves, at most once a second; each request that succeeds raises it
again by a fraction, so that a full round of successes is worth one more
connection (additive increase, multiplicative decrease). Where it goes on throttling,
the rate of requests is limited instead (rate.py). Demanded requests go
before uploads and these before prefetching ones; both leave a few connections
free for the next demand.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import trio

from fusefs.store.interface import Priority, Urgency
from fusefs.store.s3.rate import Rate

BACK_OFF_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits in the queue of `rank`; its priority may change meanwhile."""

    priority: Urgency
    turn: trio.Event
    rank: Priority


# In the order of their turns; ordered dictionaries, since a cancelled waiter leaves the middle.
_Queue = OrderedDict[_Waiter, None]


class ConnectionBudget:
    """The budget of one store. Belongs to the event loop."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._allowed = float(maximum)
        self._in_use = 0
        self._queues: dict[Priority, _Queue] = {rank: OrderedDict() for rank in Priority}
        self._backed_off = -BACK_OFF_EVERY_S
        self.rate = Rate()

    @property
    def allowed(self) -> int:
        return max(1, int(self._allowed))

    @property
    def in_use(self) -> int:
        return self._in_use

    def lease(self, priority: Urgency) -> _Lease:
        """Wait for a connection and hold it (`async with`). Cancelling gives it back."""
        return _Lease(self, priority)

    def note_throttled(self) -> None:
        """S3 asked to slow down."""
        now = time.monotonic()
        # With a rate, fewer connections would only leave some of it unused.
        if self.rate.limit is None and now - self._backed_off >= BACK_OFF_EVERY_S:
            self._backed_off = now
            self._allowed = max(1.0, self._allowed / 2)

    def note_success(self) -> None:
        """A request went well."""
        self.rate.note_success()
        if self._allowed < self.maximum:
            self._allowed = min(float(self.maximum), self._allowed + 1 / self._allowed)
            self._admit()

    def reprioritize(self) -> None:
        """Ask the waiters for their priorities again: one has risen."""
        for queue in self._queues.values():
            for waiter in list(queue):
                self._rank(waiter)
        self._admit()

    async def acquire(self, priority: Urgency) -> None:
        """Wait for a connection, to be given back by `release`; cancelled, it holds none."""
        rank = priority()
        if not self._has_waiters and self._is_free(rank):
            await trio.lowlevel.checkpoint_if_cancelled()
            self._in_use += 1
            return
        waiter = _Waiter(priority, trio.Event(), rank)
        self._queues[rank][waiter] = None
        self._admit()
        try:
            await waiter.turn.wait()
        except trio.Cancelled:
            if waiter.turn.is_set():
                self._in_use -= 1
            else:
                del self._queues[waiter.rank][waiter]
            self._admit()
            raise

    def release(self) -> None:
        """Give a connection back."""
        self._in_use -= 1
        if self._has_waiters:
            self._admit()

    @property
    def _has_waiters(self) -> bool:
        return any(self._queues.values())

    def _is_free(self, priority: Priority) -> bool:
        kept = self._kept_for_demand() if priority > Priority.DEMAND else 0
        return self._in_use < self.allowed - kept

    def _admit(self) -> None:
        """Give free connections to the waiters, the most urgent first."""
        while self._in_use < self.allowed:
            waiter = self._first()
            if waiter is None or not self._is_free(waiter.rank):
                return
            del self._queues[waiter.rank][waiter]
            self._in_use += 1
            waiter.turn.set()

    def _first(self) -> _Waiter | None:
        for rank, queue in self._queues.items():
            while queue:
                waiter = next(iter(queue))
                self._rank(waiter)
                if waiter.rank <= rank:
                    return waiter
        return None

    def _rank(self, waiter: _Waiter) -> None:
        """Move a waiter to the queue of its present priority."""
        rank = waiter.priority()
        if rank != waiter.rank:
            del self._queues[waiter.rank][waiter]
            waiter.rank = rank
            self._queues[rank][waiter] = None

    def _kept_for_demand(self) -> int:
        return min(self.allowed // 4, 4)


class _Lease:
    """A connection for the time of an `async with`: a class costs half of what a generator does."""

    __slots__ = ("_budget", "_priority")

    def __init__(self, budget: ConnectionBudget, priority: Urgency) -> None:
        self._budget = budget
        self._priority = priority

    async def __aenter__(self) -> None:
        budget = self._budget
        await budget.acquire(self._priority)
        if budget.rate.limit is not None:
            try:
                await budget.rate.turn()
            except trio.Cancelled:
                budget.release()
                raise

    async def __aexit__(self, *_: object) -> None:
        self._budget.release()
