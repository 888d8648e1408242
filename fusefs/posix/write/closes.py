"""Closes under local durability: uploads wait for a pause between them.

A program that writes many files (tar, cp, rsync) closes one after the other, and
uploads take the processor from it. So an upload that is due waits until no file
was closed for QUIET_S, up to a time limit of its own. One task wakes all that wait.
"""

from __future__ import annotations

import trio

# A program that writes small files closes one every few milliseconds.
QUIET_S = 0.2


class RecentCloses:
    """When programs last closed files of one mount; its task lives in `nursery`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        # In trio's seconds.
        self._quiet_at = 0.0
        self._waiting: set[trio.Event] = set()
        self._is_watched = False

    def note(self) -> None:
        """A file was closed just now."""
        self._quiet_at = trio.current_time() + QUIET_S

    @property
    def is_busy(self) -> bool:
        """Whether a file was closed within QUIET_S."""
        return trio.current_time() < self._quiet_at

    async def wait_for_pause(self, hurry: trio.Event, deadline: float) -> None:
        """Return at a pause, which sets `hurry`, when that is set, or at `deadline`."""
        self._waiting.add(hurry)
        if not self._is_watched:
            self._is_watched = True
            self._nursery.start_soon(self._watch)
        try:
            with trio.move_on_at(deadline):
                await hurry.wait()
        finally:
            self._waiting.discard(hurry)

    async def _watch(self) -> None:
        try:
            while self._waiting:
                await trio.sleep_until(self._quiet_at)
                if not self.is_busy:
                    for hurry in self._waiting:
                        hurry.set()
                    self._waiting.clear()
        finally:
            self._is_watched = False
