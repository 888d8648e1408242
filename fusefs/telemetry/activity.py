"""Activity of a mount: periodic tasks slow down while it is idle.

Periodic checks (the catalog, the limits of the cache, the number of names) depend on requests of
programs, requests to S3 and commands, which are noted here. While there are none, the checks of all
tasks run at the same instants, `IDLE_S` apart: changes that other mounts and programs make to the
disk are noticed with this delay. The first request ends the wait.
"""

from __future__ import annotations

import math
import time

import trio

# Longer than two pauses of any check, so that the effects of the last request are noticed.
IDLE_AFTER_S = 6.0
IDLE_S = 10.0


class Activity:
    """The time of a mount's last activity. Belongs to the event loop."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._resting: trio.Event | None = None

    def note(self) -> None:
        self._last = time.monotonic()
        if self._resting is not None:
            self._resting.set()
            self._resting = None

    async def pause(self, seconds: float, idle_s: float = IDLE_S) -> None:
        """Sleep for `seconds`, or while the mount is idle for up to `idle_s`."""
        if seconds >= idle_s or time.monotonic() - self._last < IDLE_AFTER_S:
            await trio.sleep(seconds)
            return
        if self._resting is None:
            self._resting = trio.Event()
        next_look = idle_s * (math.floor(trio.current_time() / idle_s) + 1)
        with trio.move_on_at(next_look):
            await self._resting.wait()


# The activity of this process, which serves one mount.
ACTIVITY = Activity()
