"""Upload times of files that change for long: those that stay open or are appended to.

A log that a program keeps open is uploaded once in a while (`pause_s`). So is a file
that programs open, append to and close again and again: after the first closes of
such a run, which wait for the bucket, the others wait for the local disk alone, as with local
durability. An upload sends the whole file; with pauses that grow with the run, all
uploads of a run send about twice the bytes of the last one.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from fusefs.posix.nodes.inode import StagedFile

# With the time between two looks of backlog.py, a minute.
EVERY_S = 55.0
# A large file that changes all the time costs so many bytes a second.
RATE = 1 << 20
# So many closes of a run wait for the bucket.
WAITING = 4
# A run pauses for so many times as long as it has lasted, and this long at least.
GROWTH = 3
SHORTEST_S = 1.0
MOST_RUNS = 1000


def pause_s(size: int) -> float:
    """Seconds between a change of a file of `size` bytes and its upload while programs use it."""
    return max(EVERY_S, size / RATE)


class AppendRuns:
    """The files of one mount that were appended to of late. Belongs to the event loop."""

    def __init__(self) -> None:
        # By node: how many closes, the first and the last of them in trio's seconds.
        self._runs: OrderedDict[int, tuple[int, float, float]] = OrderedDict()

    def closed(self, staged: StagedFile) -> float | None:
        """Note a close; return the seconds until the upload, or None if the close waits for it."""
        nodeid, now, size = staged.inode.nodeid, trio.current_time(), staged.size()
        count, begun, last = self._runs.pop(nodeid, (0, now, now))
        start = staged.appended_from if staged.etag is not None else None
        if start is None or size <= start:
            return None
        if now - last > pause_s(size):
            count, begun = 0, now
        self._runs[nodeid] = count + 1, begun, now
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        if count < WAITING:
            return None
        return min(max(GROWTH * (now - begun), SHORTEST_S), pause_s(size))

    def forget(self, staged: StagedFile) -> None:
        """Have the next closes wait for the bucket: another node appends to the file as well."""
        self._runs.pop(staged.inode.nodeid, None)
