"""Waiting for what must come about, on a machine that others use too."""

import time
from collections.abc import Callable
from typing import TypeVar

import trio

LIMIT_S = 60.0

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str = "what the test waits for") -> Found:
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.02)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait in a trio task until a condition holds, some of which may happen in threads."""
    with trio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing sets an event for tests
            await trio.sleep(0.001)
