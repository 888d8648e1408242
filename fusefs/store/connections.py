"""Who may use a connection to S3: a budget that knows priorities and bends when S3 asks.

At most `maximum` requests run at once. When S3 throttles, the number that is
allowed halves, at most once a second; each request that succeeds raises it
again by a fraction, so that a full round of successes is worth one more
connection (additive increase, multiplicative decrease). Demanded requests go
before uploads and these before prefetching ones; both leave a few connections
free for the next demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from fusefs.store.base import Priority

BACK_OFF_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue; its priority may rise while it waits."""

    priority: Callable[[], Priority]
    turn: trio.Event


class Connections:
    """The budget of one store. Belongs to the event loop."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._allowed = float(maximum)
        self._in_use = 0
        self._queue: list[_Waiter] = []
        self._backed_off = -BACK_OFF_EVERY_S

    @property
    def allowed(self) -> int:
        return max(1, int(self._allowed))

    @property
    def in_use(self) -> int:
        return self._in_use

    def one(self, priority: Callable[[], Priority]) -> _Held:
        """Wait for a connection and hold it (`async with`). Cancelling gives it back."""
        return _Held(self, priority)

    def throttled(self) -> None:
        """S3 asked to slow down."""
        now = time.monotonic()
        if now - self._backed_off >= BACK_OFF_EVERY_S:
            self._backed_off = now
            self._allowed = max(1.0, self._allowed / 2)

    def succeeded(self) -> None:
        """A request went well."""
        if self._allowed < self.maximum:
            self._allowed = min(float(self.maximum), self._allowed + 1 / self._allowed)
            self._admit()

    def look_again(self) -> None:
        """A waiter's priority has risen."""
        self._admit()

    async def acquire(self, priority: Callable[[], Priority]) -> None:
        """Wait for a connection, to be given back by `release`; cancelled, it holds none."""
        if not self._queue and self._is_free(priority()):
            await trio.lowlevel.checkpoint_if_cancelled()
            self._in_use += 1
            return
        waiter = _Waiter(priority, trio.Event())
        self._queue.append(waiter)
        self._admit()
        try:
            await waiter.turn.wait()
        except trio.Cancelled:
            if waiter.turn.is_set():
                self._in_use -= 1
            else:
                self._queue.remove(waiter)
            self._admit()
            raise

    def release(self) -> None:
        """Give a connection back."""
        self._in_use -= 1
        if self._queue:
            self._admit()

    def _is_free(self, priority: Priority) -> bool:
        kept = self._kept_for_demand() if priority > Priority.DEMAND else 0
        return self._in_use < self.allowed - kept

    def _admit(self) -> None:
        """Give free connections to those who wait, the most urgent first."""
        while self._queue and self._in_use < self.allowed:
            waiter = min(self._queue, key=lambda one: one.priority())
            if not self._is_free(waiter.priority()):
                return
            self._queue.remove(waiter)
            self._in_use += 1
            waiter.turn.set()

    def _kept_for_demand(self) -> int:
        return min(self.allowed // 4, 4)


class _Held:
    """A connection for the time of an `async with`: a class costs half of what a generator does."""

    __slots__ = ("_connections", "_priority")

    def __init__(self, connections: Connections, priority: Callable[[], Priority]) -> None:
        self._connections = connections
        self._priority = priority

    async def __aenter__(self) -> None:
        await self._connections.acquire(self._priority)

    async def __aexit__(self, *_: object) -> None:
        self._connections.release()
