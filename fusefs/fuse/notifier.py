"""Notifications to the kernel over /dev/fuse, and inspections of processes.

Only three notifications are used, whose `write` returns at once. The `write` of other
notifications can wait in the kernel for an answer of this very process.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Sequence

from fusefs.fuse import protocol
from fusefs.fuse.interrupts import Callers
from fusefs.linux.callers import WAS_KILLED
from fusefs.posix.nodes.notifier import KernelNotifier

logger = logging.getLogger("fusefs.session")


def note_lost_reply(error: OSError) -> None:
    """Log that the kernel refused a reply or notification, unless the request or mount is gone."""
    # ENOENT: the request was aborted. ENODEV: unmounted, which the next read reports.
    if error.errno not in (errno.ENOENT, errno.ENODEV):
        logger.warning("the kernel refused a reply: %s", error.strerror)


class DeviceNotifier(KernelNotifier):
    """Sends the notifications of one mount, over its /dev/fuse descriptor."""

    def __init__(self, fd: int, callers: Callers) -> None:
        self._fd = fd
        self._callers = callers

    async def was_killed(self, pid: int) -> bool:
        """True if the thread `pid` closes its files because its process is being killed."""
        return await self._callers.find_fate(pid) == WAS_KILLED

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if `pid` or its child has `ino` open for writing: a close follows; None: unknown."""
        return await self._callers.will_close(pid, ino)

    def invalidate_attributes(self, nodeid: int) -> None:
        """Make the kernel drop a node's cached attributes; returns at once."""
        size = protocol.OUT_HEADER.size + protocol.NOTIFY_INVAL_INODE.size
        header = protocol.OUT_HEADER.pack(size, protocol.NOTIFY_INVAL_INODE_CODE, 0)
        # With a negative offset the cached pages stay; to drop pages, the kernel might wait.
        body = protocol.NOTIFY_INVAL_INODE.pack(nodeid, -1, 0)
        try:
            os.writev(self._fd, (header, body))
        except OSError as error:
            note_lost_reply(error)

    def invalidate_names(self) -> None:
        """Make the kernel look up all cached names again before use; returns at once."""
        header = protocol.OUT_HEADER.pack(
            protocol.OUT_HEADER.size, protocol.NOTIFY_INC_EPOCH_CODE, 0
        )
        try:
            os.write(self._fd, header)
        except OSError as error:
            # EINVAL: before Linux 6.16 names stay valid until their time-out.
            if error.errno != errno.EINVAL:
                note_lost_reply(error)

    def prune_names(self, nodeids: Sequence[int]) -> bool:
        """Make the kernel drop the given nodes, except those in use; returns at once.

        The kernel takes no lock that a request could hold (fuse_notify_prune in fs/fuse/dev.c), and
        sends FORGET for dropped nodes. Returns False if the kernel is older than Linux 6.18.
        """
        ids = struct.pack(f"={len(nodeids)}Q", *nodeids)
        size = protocol.OUT_HEADER.size + protocol.NOTIFY_PRUNE.size + len(ids)
        header = protocol.OUT_HEADER.pack(size, protocol.NOTIFY_PRUNE_CODE, 0)
        try:
            os.writev(self._fd, (header, protocol.NOTIFY_PRUNE.pack(len(nodeids), 0, 0), ids))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            note_lost_reply(error)
        return True
