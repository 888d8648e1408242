"""Threads that wait for S3, and for nothing else.

trio's own threads would do; but a request for a small file takes so little
time that their ways of starting and ending a job (a limiter, a context, the
thread's name set and set back, each a chance to lose the interpreter's lock)
were a third of it. Here a job is one entry in a queue on its way out, and
answers that come together wake the event loop once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import trio

T = TypeVar("T")


class _Job(Generic[T]):
    """What a thread is to call, and what came of it."""

    __slots__ = ("error", "result", "task", "work")

    def __init__(self, work: Callable[[], T], task: trio.lowlevel.Task) -> None:
        self.work = work
        self.task: trio.lowlevel.Task | None = task  # None: nobody waits any more
        self.result: T | None = None
        self.error: BaseException | None = None


class Threads:
    """At most `maximum` threads, started as they are needed. Belongs to the event loop."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._count = 0
        self._busy = 0
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._done: deque[_Job[Any]] = deque()
        self._is_told = False
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread and return what it returns.

        Cancelling leaves it running there, and nobody hears what comes of it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._token = self._token or trio.lowlevel.current_trio_token()
        job = _Job(work, trio.lowlevel.current_task())
        self._busy += 1
        if self._busy > self._count and self._count < self._maximum:
            self._count += 1
            threading.Thread(target=self._work, name="fusefs-s3", daemon=True).start()
        self._jobs.put(job)

        def abandon(_raise_cancel: object) -> trio.lowlevel.Abort:
            job.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abandon)
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job
        return cast(T, job.result)

    def close(self) -> None:
        """End the threads, each when it has finished what it is at."""
        for _ in range(self._count):
            self._jobs.put(None)
        self._count = 0

    def _work(self) -> None:
        """The life of a thread."""
        assert self._token is not None
        while (job := self._jobs.get()) is not None:
            try:
                if job.task is not None:
                    job.result = job.work()
            except BaseException as error:
                job.error = error
            self._done.append(job)
            del job
            # Told before the others' answers are taken, or not told at all.
            if not self._is_told:
                self._is_told = True
                try:
                    self._token.run_sync_soon(self._deliver)
                except trio.RunFinishedError:
                    return

    def _deliver(self) -> None:
        self._is_told = False
        while self._done:
            job = self._done.popleft()
            self._busy -= 1
            if job.task is not None:
                trio.lowlevel.reschedule(job.task)
