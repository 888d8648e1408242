"""Hedged requests: a small GET whose answer is slow is sent again on another connection.

A few of many GETs take ten times as long as the others, because of the one server that answers
them; a second GET is then answered before the first (Dean and Barroso, "The Tail at Scale", CACM
56(2), 2013). So a GET is sent again if it waits for its first byte longer than 95% of the latest
small GETs did, and longer than twice their median. The first success counts; the other GET is
cancelled, which closes its connection. Large ranges are not hedged: their readers wait for the
transfer.

Hedges are at most SHARE of all GETs, use connections that no other request waits for, and stop
while the store asks to slow down.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from contextlib import suppress

import trio

from fusefs.store.admission.connection_budget import ConnectionBudget
from fusefs.store.engine.engine import Completion, Engine, Request, Transfer
from fusefs.store.interface import Priority

# The largest share of GETs that are sent again, and the most hedges at once.
SHARE = 0.03
MOST_AT_ONCE = 3
# A GET is slow if it takes longer than this share of GETs, and MEDIANS times the median.
QUANTILE = 0.95
MEDIANS = 2.0
# A nearby server is slow now and then because this machine is busy; a second GET would not help.
LEAST_S = 0.02
LEAST_SAMPLES = 100
SAMPLES = 512
RENEW_EVERY = 32  # samples; sorting them takes 40 us


class Hedging:
    """Sends slow small GETs of a store a second time. Belongs to the event loop."""

    def __init__(self, connections: ConnectionBudget, counted: Counter[str]) -> None:
        self._connections = connections
        self._counted = counted
        self._allowance = 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._is_renewed_in = LEAST_SAMPLES
        # First GETs, each with the time from which it is slow.
        self._sent: deque[tuple[float, Transfer]] = deque()
        self._is_watching = False
        # Seconds without a first byte after which a second GET is sent; infinite means never.
        self.wait_s = math.inf

    def note_sent(self) -> None:
        """Count a first GET that was sent; it adds SHARE to the number of allowed second GETs."""
        self._allowance = min(float(MOST_AT_ONCE), self._allowance + SHARE)

    def note_first_byte(self, took_s: float) -> None:
        """Record the seconds to a GET's first byte, or, if it was sent twice, until both ended."""
        self._samples.append(took_s)
        self._is_renewed_in -= 1
        if not self._is_renewed_in:
            self._is_renewed_in = RENEW_EVERY
            ordered = sorted(self._samples)
            quantile = ordered[int(len(ordered) * QUANTILE)]
            self.wait_s = max(quantile, MEDIANS * ordered[len(ordered) // 2], LEAST_S)

    def take(self) -> bool:
        """Take a spare connection for a second GET; False if there is none or SHARE is used up."""
        if self._allowance < 1 or not self._connections.take_spare():
            return False
        self._allowance -= 1
        self._counted["gets"] += 1
        self._counted["hedged"] += 1
        return True

    def give_back(self, *, has_won: bool) -> None:
        """Give back a second GET's connection; `has_won` tells if its answer was used."""
        self._connections.release(Priority.PREFETCH)
        self._counted["hedged_won"] += has_won

    async def race(self, engine: Engine, request: Request) -> Transfer:
        """Send a GET, and a second GET if the first is slow; return the completed GET to use.

        The result is the GET that succeeded first, or the first GET if both failed.
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
            with suppress(OSError):  # no descriptor is free for a second GET
                return await self._race(engine, request, first)
        completion = completion or await first.completed()
        self.note_first_byte(completion.first_byte_s or completion.last_byte_s)
        return first

    async def _watch(self) -> None:
        """Wake tasks whose GET is slow; a timer for each GET would cost a tenth of a GET's time."""
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

        async def complete(one: Transfer, other: Transfer) -> None:
            if _stands(await one.completed()):
                other.cancel()

        try:
            second = engine.submit(request)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(complete, first, second)
                nursery.start_soon(complete, second, first)
            self.note_first_byte(self.wait_s + trio.current_time() - began)
            has_won = _stands(second.completion) and not _stands(first.completion)
        finally:
            self.give_back(has_won=has_won)
        return second if has_won else first


def _stands(outcome: Completion | None) -> bool:
    """True if a GET's outcome is final: a success, or a refusal that a second GET would get too."""
    if outcome is None or (outcome.error is not None and outcome.status < 300):
        return False
    return outcome.status < 500 and outcome.status != 429
