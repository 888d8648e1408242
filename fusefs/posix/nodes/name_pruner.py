"""Names that the kernel remembers, and how it is made to forget some when there are many.

Each name that the kernel knows is an inode here, of about 1 KiB, until the
kernel forgets it, which it does under its own memory pressure alone. So the
names have a limit: beyond it the kernel is notified to drop those that are the
oldest and not in use (FUSE_NOTIFY_PRUNE, Linux 6.18), which it answers with
FORGET. A name that is pruned is looked up again when it is used again. Listings, which
hand out a hundred thousand names a second, show names alone while there are too many
(`InodeTable.is_full`).

An older kernel has no such notification that could never wait for this very
process: FUSE_NOTIFY_INVAL_ENTRY takes the directory's lock, which a lookup
that waits for an answer holds. There names are only counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import trio
import trio.lowlevel

from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.telemetry.activity import ACTIVITY

logger = logging.getLogger("fusefs.names")

# How soon to go through the names again when too many of them were in use.
AGAIN_AFTER_S = 1.0
# A notification with so many names takes a millisecond or two.
BATCH = 128
# So much below the limit the pruning ends, for names come back at once.
MARGIN = 0.25


class NamePruner:
    """Has the kernel forget names where there are more than a table's most. For the event loop.

    `prune` has the kernel drop what no program uses of some node ids; it returns at
    once, and tells whether the kernel knows how.
    """

    def __init__(self, inodes: InodeTable, prune: Callable[[Sequence[int]], bool]) -> None:
        self._inodes = inodes
        self.most = inodes.most
        self._prune = prune
        self.pruned = 0
        self.can_prune = True

    async def run(self) -> None:
        """Prune whenever there are too many, until cancelled or the kernel does not know how."""
        while self.can_prune:
            if len(self._inodes) <= self.most:
                await self._inodes.crossed.wait()
            self._inodes.crossed = trio.Event()
            if len(self._inodes) > self.most:
                await self.shrink()
            if len(self._inodes) > self.most:
                await ACTIVITY.pause(AGAIN_AFTER_S)

    async def shrink(self) -> None:
        """Go once through the names, the oldest first, until few enough are left."""
        target = int(self.most * (1 - MARGIN))
        candidates = self._unused()
        before = self.pruned
        while len(self._inodes) > target and (batch := list(islice(candidates, BATCH))):
            if not self._prune(batch):
                self.can_prune = False
                logger.info("this kernel forgets names only by itself (Linux 6.18 can be made to)")
                return
            self.pruned += len(batch)
            # The FORGETs are read meanwhile.
            await trio.lowlevel.checkpoint()
        if self.pruned > before:
            logger.debug(
                "the kernel was notified to forget %d names; %d are left",
                self.pruned - before,
                len(self._inodes),
            )

    def _unused(self) -> Iterator[int]:
        """Node ids without use, the oldest first; directories after what is in them."""
        found = self._inodes.all()
        for inode in found:
            if inode.info is not None and _is_unused(inode):
                yield inode.nodeid
        for inode in reversed(found):
            if inode.info is None and inode.parent is not None and _is_unused(inode):
                yield inode.nodeid


def _is_unused(inode: Inode) -> bool:
    return bool(inode.nlookup) and not (inode.is_open or inode.children or inode.staged is not None)
