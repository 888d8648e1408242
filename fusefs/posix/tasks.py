"""Helpers for changes: run many at a time, and finish a change whose request is cancelled."""

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
    """Call `work` for each item, `at_once` at a time; stop at an error, and raise it at the end."""
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
    """Return a change's error, to be reported; log any other exception, and return EIO for it."""
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
    """Run a change in `nursery`, so that it is finished even if its request is cancelled.

    A request is cancelled when its process is killed; only the wait for the change ends then. The
    kernel gets no answer, and has to look names up again: once the change has ended, `unseen` is
    called, and `unwanted` with the change's result. An error of the change is raised, or logged
    after a cancel: an OSError or StoreError is an answer, any other exception is a fault.
    """
    done = trio.Event()
    results: list[Result] = []
    errors: list[Exception] = []
    is_waited_for = True

    async def act() -> None:
        try:
            results.append(await work)
        except Exception as error:  # the session answers a fault of fusefs
            errors.append(error)
        if is_waited_for:
            done.set()
            return
        unseen()
        if errors:
            logger.warning(
                "a change whose request was cancelled failed: %s",
                errors[0],
                exc_info=None if isinstance(errors[0], OSError | StoreError) else errors[0],
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
