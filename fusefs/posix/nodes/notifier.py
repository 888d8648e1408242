"""The interface for notifications to the kernel, and for questions about a process.

It is implemented by `fuse/notifications.py` for the kernel session, and by
`fuse/pyfuse3_session.py` for pyfuse3.
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelNotifications:
    """The notifications that a session can send; this base class sends none."""

    def invalidate_attributes(self, nodeid: int) -> None:
        """Make the kernel drop a node's cached attributes."""

    def invalidate_names(self) -> None:
        """Make the kernel look all names up again before it uses them."""

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        """Ask the kernel to drop the given nodes that no program uses; False if it can't."""
        return False

    async def was_killed(self, pid: int) -> bool:
        """True if the process of a thread is being killed, and closes its files for that reason."""
        return False

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if a thread's process has another writable descriptor of a file; None: unknown."""
        return None
