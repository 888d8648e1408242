"""With local durability the disk begins to write a file while a program still does.

fsync, and with it close, then waits for the last bytes only. Nothing else
depends on it.
"""

from __future__ import annotations

import os

import trio

from fusefs.linux.libc import begin_writing
from fusefs.posix.nodes.inode import StagedFile

# The disk is told after so many bytes: enough for it to write them in one go.
STEP = 8 << 20


class DiskAhead:
    """Tells the disk; its tasks live in `nursery`. Belongs to the event loop."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._disk = trio.CapacityLimiter(4)
        # Files of which the disk is being told.
        self._telling: set[StagedFile] = set()

    def wrote(self, staged: StagedFile) -> None:
        """Note that there is more of a file."""
        if staged.written_to - staged.to_disk >= STEP and staged not in self._telling:
            self._telling.add(staged)
            self._nursery.start_soon(self._tell, staged)

    async def _tell(self, staged: StagedFile) -> None:
        # The file may be uploaded, and released, while this waits for the disk.
        fd = os.dup(staged.fd)
        try:
            while staged.written_to - staged.to_disk >= STEP:
                start, staged.to_disk = staged.to_disk, staged.written_to
                await trio.to_thread.run_sync(
                    begin_writing, fd, start, staged.to_disk, limiter=self._disk
                )
        finally:
            self._telling.discard(staged)
            os.close(fd)
