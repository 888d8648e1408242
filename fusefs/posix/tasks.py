"""Tasks of changes: many at a time, and those that go on when their request is cancelled."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import trio

from fusefs.store.errors import StoreError

logger = logging.getLogger("fusefs.apart")

Result = TypeVar("Result")
Item = TypeVar("Item")


async def for_each(
    work: Callable[[Item], Awaitable[None]], items: Iterable[Item], at_once: int
) -> None:
    """Do something for each, many at a time; after an error those begun end, and it is raised."""
    todo = iter(items)
    errors: list[StoreError | OSError] = []

    async def go_on() -> None:
        for item in todo:
            try:
                await work(item)
            except (StoreError, OSError) as error:
                errors.append(error)
            if errors:
                return

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(go_on)
    if errors:
        raise errors[0]


def judged(error: Exception) -> StoreError | OSError:
    """The failure of a change; a fault of ours is logged, and its change stays on record."""
    if isinstance(error, StoreError | OSError):
        return error
    logger.error("a fault of fusefs", exc_info=error)
    return OSError(errno.EIO, f"a fault of fusefs: {error!r}")


async def run_uncancelled(
    nursery: trio.Nursery,
    work: Coroutine[Any, Any, Result],
    unseen: Callable[[], None],
    unwanted: Callable[[Result], None] = lambda _result: None,
) -> Result:
    """Run a change in `nursery`, so that cancelling its request leaves it not half done.

    A request of a process that is being killed is cancelled, which ends the wait alone. The
    kernel gets no answer then, and has to look names up again: `unseen` is called when the
    change has ended, and `unwanted` with its result. Of what the work raises an OSError is an
    answer, anything else a fault.
    """
    done = trio.Event()
    results: list[Result] = []
    errors: list[Exception] = []
    is_waited_for = True

    async def act() -> None:
        try:
            results.append(await work)
        except Exception as error:  # a fault of ours is for the session to answer
            errors.append(error)
        if is_waited_for:
            done.set()
            return
        unseen()
        if errors:
            is_fault = not isinstance(errors[0], OSError)
            logger.warning(
                "a change whose request was cancelled failed: %s",
                errors[0],
                exc_info=errors[0] if is_fault else None,
            )
        else:
            unwanted(results[0])

    nursery.start_soon(act)
    try:
        await done.wait()
    except trio.Cancelled:
        is_waited_for = False
        raise
    if errors:
        raise errors[0]
    return results[0]
