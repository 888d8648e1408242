"""The use of a mount, so that an idle one wakes up for nothing.

What has to be looked at again and again (the catalog, the limits of the cache, the number of
names) changes with requests of programs, requests to S3 and commands, which are noted here.
While there are none, the looks of all tasks fall on the same instants, `IDLE_S` apart: what
other mounts and other programs do to the disk is seen that late. The first request ends the
wait.
"""

from __future__ import annotations

import math
import time

import trio

# Longer than two of any look's usual pauses: what the last request has left is seen to.
IDLE_AFTER_S = 6.0
IDLE_S = 10.0


class Activity:
    """The last use of a mount. Belongs to the event loop."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._resting: trio.Event | None = None

    def note(self) -> None:
        self._last = time.monotonic()
        if self._resting is not None:
            self._resting.set()
            self._resting = None

    async def pause(self, seconds: float, idle_s: float = IDLE_S) -> None:
        """Wait for `seconds`, or for as long as up to `idle_s` while the mount is idle."""
        if seconds >= idle_s or time.monotonic() - self._last < IDLE_AFTER_S:
            await trio.sleep(seconds)
            return
        if self._resting is None:
            self._resting = trio.Event()
        next_look = idle_s * (math.floor(trio.current_time() / idle_s) + 1)
        with trio.move_on_at(next_look):
            await self._resting.wait()


ACTIVITY = Activity()
"""That of this process, which serves one mount."""
