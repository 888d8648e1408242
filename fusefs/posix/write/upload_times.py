"""Upload times of files that the local disk has, and that are not sent at once.

With local durability a program that writes many files (tar, cp, rsync) closes one after the
other, and uploads take processor time from it. So a due upload waits until no file was
closed for QUIET_S, up to a time limit of its own. One task wakes all that wait.

A log that a program keeps open is uploaded once in a while (`pause_s`). So is a file
that programs open, append to and close again and again: the first closes of
such a run wait for the bucket, and later ones wait for the local disk alone, as with local
durability. An upload sends the whole file; as the pauses grow with the run, all
uploads of a run send about twice the bytes of the last upload.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from fusefs.posix.nodes.inode import StagedFile

# Together with RETRY_S of backlog.py this is a minute.
EVERY_S = 55.0
# A large file that changes all the time is sent at this rate, in bytes a second.
RATE = 1 << 20
# This many closes of a run wait for the bucket.
WAITING = 4
# An upload of a run is delayed by GROWTH times the run's age, but by SHORTEST_S at least.
GROWTH = 3
SHORTEST_S = 1.0
MOST_RUNS = 1000
# A program that writes small files closes one every few milliseconds.
QUIET_S = 0.2


def pause_s(size: int) -> float:
    """Seconds between a change of a file of `size` bytes and its upload while programs use it."""
    return max(EVERY_S, size / RATE)


class AppendRuns:
    """The files that programs append to again and again. Belongs to the event loop."""

    def __init__(self) -> None:
        # By node id: the number of closes, the times of the first and last one in trio's seconds.
        self._runs: OrderedDict[int, tuple[int, float, float]] = OrderedDict()

    def closed(self, staged: StagedFile) -> float | None:
        """Note a close; return the seconds until the upload, or None if the close waits for it."""
        nodeid, now, size = staged.inode.nodeid, trio.current_time(), staged.size()
        count, begun, last = self._runs.pop(nodeid, (0, now, now))
        start = staged.appended_from if staged.etag is not None else None
        if start is None or size <= start:
            return None
        if now - last > pause_s(size):
            count, begun = 0, now
        self._runs[nodeid] = count + 1, begun, now
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        if count < WAITING:
            return None
        return min(max(GROWTH * (now - begun), SHORTEST_S), pause_s(size))

    def forget(self, staged: StagedFile) -> None:
        """End a file's run, as another node appends, too: its next closes wait for the bucket."""
        self._runs.pop(staged.inode.nodeid, None)


class RecentCloses:
    """The times at which programs last closed files of one mount; its task lives in `nursery`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        # In trio's seconds.
        self._quiet_at = 0.0
        self._waiting: set[trio.Event] = set()
        self._is_watched = False

    def note(self) -> None:
        self._quiet_at = trio.current_time() + QUIET_S

    @property
    def is_busy(self) -> bool:
        return trio.current_time() < self._quiet_at

    async def wait_for_pause(self, hurry: trio.Event, deadline: float) -> None:
        """Return once programs pause (this sets `hurry`), `hurry` is set, or at `deadline`."""
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
