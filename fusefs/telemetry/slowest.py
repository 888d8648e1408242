"""The keys whose requests waited longest of late, each with its longest wait: a few of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

MOST = 5
# Each of them is shown for this long at least, and for twice as long at most.
PERIOD_S = 300.0
# Less than this is not worth a look, nor the time to make out the key.
LEAST_S = 0.01


class Wait(NamedTuple):
    """A request that has waited; `ended` is in monotonic seconds."""

    seconds: float
    ended: float
    operation: str
    key: str


class SlowestWaits:
    """The longest waits, by key, of this period and the one before. Belongs to the event loop.

    `describe` makes an operation and a key of an opcode and a node id.
    """

    def __init__(self, describe: Callable[[int, int], tuple[str, str]]) -> None:
        self._describe = describe
        self._began = time.monotonic()
        self._now: dict[str, Wait] = {}
        self._before: dict[str, Wait] = {}

    def ended(self, opcode: int, nodeid: int, since: float) -> None:
        """A request that was read at `since`, in monotonic seconds, is answered now."""
        now = time.monotonic()
        seconds = now - since
        if seconds < LEAST_S:
            return
        self._turn(now)
        if len(self._now) == MOST and seconds <= min(self._now.values()).seconds:
            return
        wait = Wait(seconds, now, *self._describe(opcode, nodeid))
        self._now[wait.key] = max(wait, self._now.get(wait.key, wait))
        if len(self._now) > MOST:
            del self._now[min(self._now.values()).key]

    def describe(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        self._turn(now)
        both = sorted([*self._before.values(), *self._now.values()])
        longest = sorted({wait.key: wait for wait in both}.values(), reverse=True)[:MOST]
        return [
            {
                "operation": wait.operation,
                "key": wait.key,
                "waited_s": wait.seconds,
                "ago_s": now - wait.ended,
            }
            for wait in longest
        ]

    def _turn(self, now: float) -> None:
        periods = int((now - self._began) / PERIOD_S)
        if periods:
            self._before = self._now if periods == 1 else {}
            self._now = {}
            self._began += periods * PERIOD_S
