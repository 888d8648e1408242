"""The interface for notifications to the kernel, and for questions about a process.

It is implemented by `fuse/notifier.py` for the kernel session, and by
`fuse/pyfuse3_session.py` for pyfuse3.
"""

from __future__ import annotations

from collections.abc import Sequence


class KernelNotifier:
    """Sends the notifications that a session can send; this base class sends none."""

    def invalidate_attributes(self, nodeid: int) -> None:
        """Make the kernel drop a node's cached attributes; returns at once."""

    def invalidate_names(self) -> None:
        """Make the kernel look up all cached names again before use; returns at once."""

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        """Make the kernel drop the given nodes that no program uses; return False if it can't."""
        return False

    async def was_killed(self, pid: int) -> bool:
        """True if thread `pid` closes its files because its process is being killed."""
        return False

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if the process of thread `pid` still has `ino` open for writing; None if unknown."""
        return None
