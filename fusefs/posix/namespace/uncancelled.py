"""Runs changes so that cancelling a request leaves none half done.

A request of a process that is being killed is cancelled; its change goes on to
its end in the daemon's nursery. The kernel gets no answer then, and has to look
names up again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import trio

logger = logging.getLogger("fusefs.apart")

Result = TypeVar("Result")


class UncancelledRunner:
    """Runs changes in `nursery`; `unseen` is called after each whose request was cancelled."""

    def __init__(self, nursery: trio.Nursery, unseen: Callable[[], None]) -> None:
        self._nursery = nursery
        self._unseen = unseen

    async def run(
        self,
        work: Coroutine[Any, Any, Result],
        *,
        unwanted: Callable[[Result], None] = lambda _result: None,
    ) -> Result:
        """Do some work and return its result.

        Cancelling ends the wait alone; the result is then given to `unwanted`.

        Raises:
            Exception: the work did; an OSError is an answer, anything else a fault.
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
            self._unseen()
            if errors:
                is_fault = not isinstance(errors[0], OSError)
                logger.warning(
                    "a change whose request was cancelled failed: %s",
                    errors[0],
                    exc_info=errors[0] if is_fault else None,
                )
            else:
                unwanted(results[0])

        self._nursery.start_soon(act)
        try:
            await done.wait()
        except trio.Cancelled:
            is_waited_for = False
            raise
        if errors:
            raise errors[0]
        return results[0]
