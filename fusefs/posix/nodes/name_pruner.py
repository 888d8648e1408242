"""A limit on the names that the kernel remembers.

Each name that the kernel knows costs the daemon an inode of about 1 KiB, until the kernel forgets
the name, which happens only when the kernel's own memory is short. So the number of names has a
limit: beyond it a notification (FUSE_NOTIFY_PRUNE, Linux 6.18) makes the kernel drop the oldest
names that are not in use, and send a FORGET for each. A dropped name is looked up again when a
program uses it again. Listings, which show a hundred thousand names a second, give the kernel no
inodes while there are too many (`InodeTable.is_full`).

Older kernels have no safe notification for this: FUSE_NOTIFY_INVAL_ENTRY takes the
directory's lock, which may be held by a lookup that waits for this process (a deadlock). On
these kernels the names are only counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import trio

from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.telemetry.activity import ACTIVITY

logger = logging.getLogger("fusefs.names")

# The pause before the next pass over the names, if too many of them were in use.
AGAIN_AFTER_S = 1.0
# A notification with this many names takes a millisecond or two.
BATCH = 128
# Pruning ends this share below the limit, as new names come at once.
MARGIN = 0.25


class NamePruner:
    """Makes the kernel forget names when the inode table is over its limit. For the event loop.

    `prune` asks the kernel to drop the given nodes that no program uses. It returns at once:
    False if the kernel has no such notification.
    """

    def __init__(self, inodes: InodeTable, prune: Callable[[Sequence[int]], bool]) -> None:
        self._inodes = inodes
        self.most = inodes.most
        self._prune = prune
        self.pruned = 0
        self.can_prune = True

    async def run(self) -> None:
        """Prune whenever there are too many names, until cancelled; return if the kernel can't."""
        while self.can_prune:
            if len(self._inodes) <= self.most:
                await self._inodes.crossed.wait()
            self._inodes.crossed = trio.Event()
            if len(self._inodes) > self.most:
                await self.shrink()
            if len(self._inodes) > self.most:
                await ACTIVITY.pause(AGAIN_AFTER_S)

    async def shrink(self) -> None:
        """Prune the oldest names, in one pass, until few enough are left."""
        target = int(self.most * (1 - MARGIN))
        candidates = self._unused()
        before = self.pruned
        while len(self._inodes) > target and (batch := list(islice(candidates, BATCH))):
            if not self._prune(batch):
                self.can_prune = False
                logger.info("this kernel forgets names only by itself (Linux 6.18 can be made to)")
                return
            self.pruned += len(batch)
            # Meanwhile the session reads the FORGETs.
            await trio.lowlevel.checkpoint()
        if self.pruned > before:
            logger.debug(
                "the kernel was notified to forget %d names; %d are left",
                self.pruned - before,
                len(self._inodes),
            )

    def _unused(self) -> Iterator[int]:
        """The ids of unused nodes: the oldest files first, then directories, children first."""
        found = self._inodes.all()
        for inode in found:
            if inode.info is not None and _is_unused(inode):
                yield inode.nodeid
        for inode in reversed(found):
            if inode.info is None and inode.parent is not None and _is_unused(inode):
                yield inode.nodeid


def _is_unused(inode: Inode) -> bool:
    return bool(inode.nlookup) and not (inode.is_open or inode.children or inode.staged is not None)
