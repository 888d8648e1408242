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
        """Call `work`, which uses a local file, unless abandoned. Blocks, in the thread.

        Raises:
            AbandonedError: the attempt was abandoned: `work` is not called.
            Exception: whatever `work` raises; `guarded` leaves it as it is.
        """
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


class _Call:
    """One call of a `SharedCall`, and why it failed."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.failure: Failure | None = None


class SharedCall(Generic[T]):
    """A call in a thread for all that want its result. Belongs to the event loop.

    Who is cancelled does not wait for the thread, and the call goes on: `accept` gets what
    comes of it in any case.
    """

    def __init__(self, accept: Callable[[T], None]) -> None:
        self._accept = accept
        self._call: _Call | None = None

    @property
    def is_under_way(self) -> bool:
        return self._call is not None

    async def wait(self, work: Callable[[], T]) -> None:
        """Wait for the end of the call that is under way, or else of one of `work`.

        Raises:
            AttemptError: it failed.
        """
        call = self._call
        if call is None:
            call = self._call = _Call()
            trio.lowlevel.spawn_system_task(self._run, call, Attempt().guarded(work))
        await call.ended.wait()
        if call.failure is not None:
            raise AttemptError(call.failure)

    async def _run(self, call: _Call, work: Callable[[], T]) -> None:
        try:
            self._accept(await trio.to_thread.run_sync(work, abandon_on_cancel=True))
        except AttemptError as error:
            call.failure = error.failure
        except RuntimeError as error:  # the system starts no thread
            call.failure = Failure(StoreError, f"no thread for S3: {error}", is_retryable=True)
        finally:
            self._call = None
            call.ended.set()


class Progress(Protocol):
    """What a request achieves over several attempts."""

    def has_progressed(self) -> bool:
        """Whether the last attempt achieved something that the next need not repeat."""


class Transfer(Progress, Protocol):
    """A request whose thread uses a local file, over several attempts."""

    def begin(self) -> Attempt:
        """Begin an attempt."""
