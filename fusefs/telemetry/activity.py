"""The activity of a mount: periodic tasks slow down while the mount is idle.

Periodic checks (the catalog, the limits of the cache, the number of names) are needed after
requests of programs, requests to S3 and commands, which are noted here. In an idle mount the checks
of all tasks run at the same instants, `IDLE_S` apart, and notice changes of the disk by other
mounts and programs with this delay. The next request ends the pauses.
"""

from __future__ import annotations

import math
import time

import trio

# Time without activity after which a mount is idle: longer than two pauses of any check, so that
# each check notices the effects of the last request.
IDLE_AFTER_S = 6.0
IDLE_S = 10.0


class Activity:
    """Paces the periodic tasks of a mount by its last activity. Belongs to the event loop."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._resting: trio.Event | None = None

    def note(self) -> None:
        self._last = time.monotonic()
        if self._resting is not None:
            self._resting.set()
            self._resting = None

    async def pause(self, seconds: float, idle_s: float = IDLE_S) -> None:
        """Sleep for `seconds`; in an idle mount, until the next activity, `idle_s` at most."""
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
