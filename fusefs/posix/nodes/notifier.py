"""The file system's own requests to the kernel, through whichever session serves the mount.

The file system is built before its session. So its parts are given a
`Notifier`, which a session is connected to; until then, and where a session
can't do something, nothing happens. Nothing here waits for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelNotifications:
    """The notifications that a session may be able to send; as it stands, none."""

    def invalidate_attributes(self, nodeid: int) -> None:
        """Have the kernel ask for a node's attributes again."""

    def invalidate_names(self) -> None:
        """Have the kernel look names up again before it uses them."""

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        """Have the kernel drop those nodes that no program uses; False if it can't."""
        return False

    async def was_killed(self, pid: int) -> bool:
        """True if a thread closes its files because its process is being killed."""
        return False

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if a thread's process will close a file that it may write to; None: not known."""
        return None


class Notifier(KernelNotifications):
    """Passes everything on to the session of the mount. Belongs to the event loop."""

    def __init__(self) -> None:
        self._session = KernelNotifications()

    def connect(self, session: KernelNotifications) -> None:
        """Pass everything on to `session` from now on."""
        self._session = session

    def invalidate_attributes(self, nodeid: int) -> None:
        self._session.invalidate_attributes(nodeid)

    def invalidate_names(self) -> None:
        self._session.invalidate_names()

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        return self._session.prune_names(nodeids)

    async def was_killed(self, pid: int) -> bool:
        return await self._session.was_killed(pid)

    async def will_close(self, pid: int, ino: int) -> bool | None:
        return await self._session.will_close(pid, ino)
