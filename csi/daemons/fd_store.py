"""The descriptor store: copies of the mounts' /dev/fuse descriptors, in the supervisor's process.

A copy is closed when a client drops it, when its mount ends, and when the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from fusefs.keeper.control import Loop

# The name of a descriptor: the number of a mount, and the number of its connection.
Held = tuple[int, int]


class FdStore:
    """Owns descriptors, at first those in `held`, each named by its mount and its connection.

    `loop`, the event loop of the process, reports the end of a mount.
    """

    def __init__(self, loop: Loop, held: Mapping[Held, int]) -> None:
        self._loop = loop
        self._held: dict[Held, int] = {}
        for name, fd in held.items():
            self.hold(name, fd)

    def hold(self, name: Held, fd: int) -> None:
        """Add a descriptor under this name; an earlier descriptor of the name is closed."""
        self.drop(name)
        self._held[name] = fd
        # poll(2) reports POLLERR, which marks the mount's end, even if no events are asked for.
        self._loop.watch(fd, 0, partial(self.drop, name))

    def drop(self, name: Held) -> bool:
        """Close the descriptor of this name; return False if there is none."""
        fd = self._held.pop(name, -1)
        if fd < 0:
            return False
        self._loop.forget(fd)
        os.close(fd)
        return True

    def following(self, name: Held) -> tuple[Held, int] | None:
        """Return the next name after `name`, with its descriptor; None at the end of the store."""
        return min((item for item in self._held.items() if item[0] > name), default=None)
