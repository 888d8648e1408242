"""The descriptor store: copies of the mounts' /dev/fuse descriptors, in the supervisor's process.

What is held goes with the process, and when it is dropped or the mount is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from fusefs.keeper.control import Loop

# The numbers of a mount and of its connection.
Held = tuple[int, int]


class FdStore:
    """Holds descriptors, those that are `held` from the beginning; all of them are its own.

    `loop` is its process's.
    """

    def __init__(self, loop: Loop, held: Mapping[Held, int]) -> None:
        self._loop = loop
        self._held: dict[Held, int] = {}
        for name, fd in held.items():
            self.hold(name, fd)

    def hold(self, name: Held, fd: int) -> None:
        """Hold a descriptor, in the place of the one of this name."""
        self.drop(name)
        self._held[name] = fd
        # For no event: the kernel reports POLLERR, which is the mount's end, in any case.
        self._loop.watch(fd, 0, partial(self._forget, name))

    def _forget(self, name: Held) -> None:
        self.drop(name)

    def drop(self, name: Held) -> bool:
        """Close what is held under a name; False if nothing is."""
        fd = self._held.pop(name, -1)
        if fd < 0:
            return False
        self._loop.forget(fd)
        os.close(fd)
        return True

    def following(self, name: Held) -> tuple[Held, int] | None:
        """The first held descriptor behind this name, in the order of names; None at the end."""
        return min((item for item in self._held.items() if item[0] > name), default=None)
