"""The interface for notifications to the kernel, and for questions about a process.

`fuse/notifier.py` implements the interface for the kernel session, and
`fuse/pyfuse3_session.py` for pyfuse3.
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelNotifier:
    """Sends notifications to the kernel; this base class sends none, and inspects no process."""

    def invalidate_attributes(self, nodeid: int) -> None:
        """Make the kernel drop a node's cached attributes; returns at once."""

    def invalidate_names(self) -> None:
        """Make the kernel look up all cached names again before use; returns at once."""

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        """Make the kernel drop the nodes in `nodeids` that no program uses; False if it can't."""
        return False

    async def was_killed(self, pid: int) -> bool:
        """True if the thread `pid` closes its files because its process is being killed."""
        return False

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if `pid`'s process has `ino` open for writing, so will close it; None: unknown."""
        return None
