"""Calls the compiled code (fast_path.c) that answers requests about files in the cache ("warm").

While the journal (posix/journal/) is off or being compacted, Python answers by the same rules.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

import trio

from fusefs.cache.cached_file import CHECKED_AT_OPEN
from fusefs.fuse import _fast_path
from fusefs.fuse.busy_poll import LONGEST_NS, BusyPoll
from fusefs.fuse.notifier import note_lost_reply
from fusefs.posix.journal.journal import Journal
from fusefs.posix.operations import Operations
from fusefs.telemetry.requests import RequestTimes

logger = logging.getLogger("fusefs.session")


# The number of requests that compiled code answers before other tasks get their turn (2 ms).
MOST_AT_ONCE = 512


class FastPathReader(trio.abc.Instrument):
    """Reads one mount's requests and lets compiled code answer some. Belongs to the event loop.

    `receive` leaves a request for Python in the request buffer. After `receive`, `update` must be
    called before other code runs: it adds the opens and closes that compiled code has answered to
    Python's tables. In a block of `updated_first`, trio calls it before steps of other tasks.
    """

    def __init__(
        self,
        fd: int,
        request: mmap,
        reply: mmap,
        operations: Operations,
        times: RequestTimes,
        log: Journal,
    ) -> None:
        self._operations = operations
        self._times = times
        self._log = log
        cache, handles = operations.cache, operations.handles
        self.compiled = _fast_path.FastPath(
            fd,
            request,
            reply,
            operations,
            operations.inodes.by_id,
            handles,
            handles.files,
            handles.restored,
            cache.name_of,
            cache.by_name,
            operations.backing.ids,
            CHECKED_AT_OPEN,
        )
        self._busy_poll = BusyPoll()
        self._left = MOST_AT_ONCE
        self._receiver: trio.lowlevel.Task | None = None

    @contextmanager
    def updated_first(self) -> Iterator[None]:
        """Call `update` before each step of other tasks while this task receives in the block."""
        self._receiver = trio.lowlevel.current_task()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            self.update()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Call `update`, unless the step is of the receiving task."""
        if task is self._receiver:
            return
        try:
            self.update()
        except BaseException:
            # trio would continue without this instrument. The next process reads the journal.
            logger.critical("a fault in fusefs", exc_info=True)
            os._exit(1)

    def begin(self) -> bool:
        """Allow compiled code another `MOST_AT_ONCE` requests, after other tasks have run.

        Returns False if Python must answer all requests, as the journal is off or being compacted.
        """
        self.update()
        self._left = MOST_AT_ONCE
        return self._log.plain_log is not None

    def receive(self, *, may_poll: bool) -> int | None:
        """Read requests until one is for Python; return its size, 0 if other tasks must run first.

        Returns None if no request is there, nor comes during a poll (if `may_poll`). Raises the
        OSError of read(2).
        """
        compiled = self.compiled
        poll_ns = LONGEST_NS if may_poll and self._busy_poll.is_worth_it() else 0
        polled, hits, polled_ns = compiled.polled, compiled.hits, compiled.polled_ns
        outcome = compiled.serve(self._log.plain_log, self._left, poll_ns)
        self._left -= compiled.spent
        if compiled.polled != polled:
            self._busy_poll.account(
                compiled.polled - polled, compiled.hits - hits, compiled.polled_ns - polled_ns
            )
        if outcome == -errno.EAGAIN:
            return None
        if outcome < 0:
            raise OSError(-outcome, os.strerror(-outcome))
        return outcome

    def update(self) -> None:
        """Bring Python's tables up to date with the requests that compiled code has answered."""
        taken = self.compiled.take()
        if taken is None:
            return
        counts, timed, opened, read_bytes, refused, lost = taken
        times, operations = self._times, self._operations
        period = self.compiled.period
        for opcode, count in counts:
            times.counts[opcode] += count
        if timed:
            times.timed(timed, period)
        for opcode, count in refused:
            times.refused(opcode, count)
        self.compiled.period = times.period
        operations.counters.cache_bytes += read_bytes
        for inode, file, fh, backing_id, flags, unique, is_closed in opened:
            if inode is None:
                operations.release(fh, is_logged=True)
            else:
                operations.opener.was_opened(
                    inode, file, fh, backing_id, flags, unique, is_closed=bool(is_closed)
                )
        if lost:
            note_lost_reply(OSError(lost, os.strerror(lost)))
