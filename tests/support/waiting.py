"""Waiting for what must come about, on a machine that others use too."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from fusefs.telemetry.stalls import CAUSES, STALLS

LIMIT_S = 120.0

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str = "what the test waits for") -> Found:
    """Wait until a condition holds, and return what it returned."""
    deadline, pause_s = time.monotonic() + LIMIT_S, 0.005
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(pause_s := min(1.2 * pause_s, 0.05))
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait in a trio task until a condition holds, some of which may happen in threads."""
    with trio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing sets an event for tests
            await trio.sleep(0.001)


# The share of the waiting time that a test gives to one cause.
MOST = 0.8


@contextmanager
def mostly(cause: int) -> Iterator[None]:
    """Requests wait for this cause meanwhile for the most part, and not for others."""
    before = STALLS.totals().wait
    yield
    after = STALLS.totals().wait
    waited = {name: now - then for name, then, now in zip(CAUSES, before, after, strict=True)}
    total = waited.pop("any")
    shares = {name: round(seconds / total, 3) for name, seconds in waited.items()}
    assert shares.pop(CAUSES[cause]) >= MOST, shares
    assert sum(shares.values()) <= 1 - MOST + 0.01, shares
