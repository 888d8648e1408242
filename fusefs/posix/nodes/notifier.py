"""The file system's own requests to the kernel; nothing here waits for it.

`fuse/notifications.py` has those of the kernel session, `fuse/pyfuse3_session.py` pyfuse3's.
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelNotifications:
    """The notifications that a mount may be able to send; as it stands, none."""

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
