"""Hedged requests: a small GET that is slow to answer is sent again on another connection.

Of many GETs a few take ten times as long as the others, for reasons of the one server that happens
to answer them; sent again, they are answered before the first (Dean and Barroso, "The Tail at
Scale", CACM 56(2), 2013). So one that has no first byte after what nearly all of the latest small
GETs took, and after twice the median, is sent again. The first success counts, and the other is
given up with its connection. Of large ranges a reader waits for the transfer: they are not hedged.

Hedges are SHARE of the GETs at most, counted from the beginning, use connections that nothing else
waits for, and stop while the store asks to slow down.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import trio

from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.engine.engine import Completion, Engine, Request, Transfer
from fusefs.store.interface import Priority

# Of all GETs, how many are sent again at most, and how many of these at once.
SHARE = 0.03
MOST_AT_ONCE = 3
# Slow is what takes longer than this share of GETs, and so many times the median.
QUANTILE = 0.95
MEDIANS = 2.0
# A server nearby is slow now and then because this machine is busy; to ask again helps nothing.
LEAST_S = 0.02
LEAST_SAMPLES = 100
SAMPLES = 512
RENEW_EVERY = 32  # samples; to sort them takes 40 us


class Hedging:
    """First-byte times of one store's small GETs, and the delay after which another is sent.

    Belongs to the event loop.
    """

    def __init__(self, connections: ConnectionBudget, counted: Counter[str]) -> None:
        self._connections = connections
        self._counted = counted
        self._allowance = 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._is_renewed_in = LEAST_SAMPLES
        # First GETs, and when each is slow.
        self._sent: deque[tuple[float, Transfer]] = deque()
        self._is_watching = False
        # Seconds without a first byte after which another GET is sent; infinite is never.
        self.wait_s = math.inf

    def note_sent(self) -> None:
        """Count a first GET that was sent: it allows SHARE of a second one."""
        self._allowance = min(float(MOST_AT_ONCE), self._allowance + SHARE)

    def note_first_byte(self, took_s: float) -> None:
        """Note the time of a first byte, or for how long it was not there when the second's was."""
        self._samples.append(took_s)
        self._is_renewed_in -= 1
        if not self._is_renewed_in:
            self._is_renewed_in = RENEW_EVERY
            ordered = sorted(self._samples)
            quantile = ordered[int(len(ordered) * QUANTILE)]
            self.wait_s = max(quantile, MEDIANS * ordered[len(ordered) // 2], LEAST_S)

    def take(self) -> bool:
        """Take a connection for a second GET, if the allowance has one and nothing waits for it."""
        if self._allowance < 1 or not self._connections.take_spare():
            return False
        self._allowance -= 1
        self._counted["gets"] += 1
        self._counted["hedged"] += 1
        return True

    def give_back(self, *, has_won: bool) -> None:
        """Give the connection of a second GET back, which has ended or was not sent after all."""
        self._connections.release(Priority.PREFETCH)
        self._counted["hedged_won"] += has_won

    async def race(self, engine: Engine, request: Request) -> Transfer:
        """Send a GET, and again if its answer is slow to begin; return the first that stands.

        It is complete. If none stands, it is the first GET.
        """
        first = engine.submit(request)
        self.note_sent()
        if self.wait_s < math.inf:
            self._sent.append((trio.current_time() + self.wait_s, first))
            if not self._is_watching:
                self._is_watching = True
                engine.nursery.start_soon(self._watch)
        completion = await first.completed_or_slow()
        if completion is None and not first.has_begun and self.take():
            return await self._race(engine, request, first)
        completion = completion or await first.completed()
        self.note_first_byte(completion.first_byte_s or completion.last_byte_s)
        return first

    async def _watch(self) -> None:
        """Wake those whose answer is slow: a time limit for each would cost a tenth of a GET."""
        try:
            while self._sent:
                due, first = self._sent.popleft()
                if first.completion is None:
                    await trio.sleep_until(due)
                    first.look_up()
        finally:
            self._is_watching = False

    async def _race(self, engine: Engine, request: Request, first: Transfer) -> Transfer:
        began, has_won = trio.current_time(), False
        second = engine.submit(request)

        async def complete(one: Transfer, other: Transfer) -> None:
            if _stands(await one.completed()):
                other.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(complete, first, second)
                nursery.start_soon(complete, second, first)
            self.note_first_byte(self.wait_s + trio.current_time() - began)
            has_won = _stands(second.completion) and not _stands(first.completion)
        finally:
            self.give_back(has_won=has_won)
        return second if has_won else first


def _stands(outcome: Completion | None) -> bool:
    """True of a success, or of a refusal that the other request would get as well."""
    if outcome is None or (outcome.error is not None and outcome.status < 300):
        return False
    return outcome.status < 500 and outcome.status != 429
