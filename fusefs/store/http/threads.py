"""Threads that wait for S3, and for nothing else, and what one request does in such a thread.

trio's own threads would do; but a request for a small file takes so little
time that their ways of starting and ending a job (a limiter, a context, the
thread's name set and set back, each a chance to lose the interpreter's lock)
were a third of it. Here a job is one entry in a queue on its way out, and
answers that come together wake the event loop once.

A thread that waits for the network can't be stopped, only abandoned. Once an
`Attempt` has been abandoned its thread never touches the caller's file again; if
it did so in that very moment, the caller waits for that one read or write of
the local disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

import trio

from fusefs.store.errors import AttemptError, Failure, StoreError, translate

T = TypeVar("T")


class _Job(Generic[T]):
    """What a thread is to call, and the result."""

    __slots__ = ("error", "result", "task", "work")

    def __init__(self, work: Callable[[], T], task: trio.lowlevel.Task) -> None:
        self.work = work
        self.task: trio.lowlevel.Task | None = task  # None: the task was cancelled
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
        self._is_waking = False
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread and return its result.

        Cancelling leaves it running there, and its result is dropped.

        Raises:
            AttemptError: there is no thread, and the system starts none now.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._token = self._token or trio.lowlevel.current_trio_token()
        job = _Job(work, trio.lowlevel.current_task())
        if self._busy >= self._count and self._count < self._maximum:
            self._start()
        self._busy += 1
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
        """End the threads, each after its current job."""
        for _ in range(self._count):
            self._jobs.put(None)
        self._count = 0

    def _start(self) -> None:
        """Start a thread; where the system has none to give, those that there are will do.

        Raises:
            AttemptError: there are none.
        """
        try:
            threading.Thread(target=self._work, name="fusefs-s3", daemon=True).start()
        except RuntimeError as error:  # of a control group, or of the user, there are too many
            if not self._count:
                failure = Failure(StoreError, f"no thread for S3: {error}", is_retryable=True)
                raise AttemptError(failure) from error
        else:
            self._count += 1

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
            # Set before the event loop takes the results, so that no result is left behind.
            if not self._is_waking:
                self._is_waking = True
                try:
                    self._token.run_sync_soon(self._deliver)
                except trio.RunFinishedError:
                    return

    def _deliver(self) -> None:
        self._is_waking = False
        while self._done:
            job = self._done.popleft()
            self._busy -= 1
            if job.task is not None:
                trio.lowlevel.reschedule(job.task)


class AbandonedError(Exception):
    """Ends the thread of an abandoned attempt; no caller sees it."""


class Attempt:
    """One run of a request in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a moment only, also by the event loop
        self._is_abandoned = False
        self._is_local = False
        self._local_error: Exception | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._local_ended = trio.Event()

    def guarded(self, work: Callable[..., T]) -> Callable[..., T]:
        """`work` with all exceptions as `AttemptError` but those of `locally`."""

        def run(*arguments: object) -> T:
            try:
                return work(*arguments)
            except AbandonedError:
                raise
            # Anything may come from HTTP libraries that read a foreign server's answers.
            except Exception as error:
                if self._local_error is not None:  # the library may have wrapped it
                    raise self._local_error from None
                if isinstance(error, AttemptError):
                    raise
                raise AttemptError(translate(error)) from error

        return run

    def locally(self, work: Callable[[], T]) -> T:
        """Call `work`, which uses a local file, unless abandoned. Blocks, in the thread."""
        with self._lock:
            if self._is_abandoned:
                raise AbandonedError
            self._is_local = True
        try:
            return work()
        except Exception as error:
            self._local_error = error
            raise
        finally:
            with self._lock:
                self._is_local = False
                if self._is_abandoned:
                    self._token.run_sync_soon(self._local_ended.set)

    async def abandon(self) -> None:
        """Have nothing run locally, now or later; waits for the local disk at most."""
        with self._lock:
            self._is_abandoned = True
            is_local = self._is_local
        if is_local:
            with trio.CancelScope(shield=True):
                await self._local_ended.wait()


class Progress(Protocol):
    """What a request achieves over several attempts."""

    def has_progressed(self) -> bool:
        """Whether the last attempt achieved something that the next need not repeat."""


class Transfer(Progress, Protocol):
    """A request whose thread uses a local file, over several attempts."""

    def begin(self) -> Attempt:
        """Begin an attempt."""
