"""HTTP requests from the event loop, sent by libcurl in threads of their own.

The compiled part (_engine.c) has a few worker threads that never hold the interpreter
lock. A request is handed to one of them; the worker sends it, writes the body of the
answer to its sink, and puts the completion on a list. One task here waits for that list
with an eventfd and wakes the tasks that sent the requests: a hundred completions are one
wake-up. Requests with small bodies and requests with large ones have separate workers, so
that a small answer never waits until a large one is written.

One call of `send` is one request: nothing is signed, retried, queued or redirected here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Self, TypeAlias

import trio

from fusefs.store.engine import _engine
from fusefs.store.engine._engine import Completion as Completion

# A worker receives about 700 MB/s over TLS; more of them than processors gain nothing.
_MOST_LARGE_WORKERS: Final = 8


class MemorySink(NamedTuple):
    """Receive the body as bytes. One of more than `limit` bytes is the error "too-large"."""

    limit: int = 1 << 20


class FileSink(NamedTuple):
    """Write the body of an answer with status 200 or 206 to a file.

    `fd` is duplicated for as long as the request lives. The `length` bytes of the object from
    `start` on go to `offset` of the file, and no byte outside of [offset, offset + length) is
    written. Before the first one, the answer's ETag and size are compared with `etag` and
    `size`, and its range with `start` and `length`, except for those that are None.

    With `sums`, progress comes with the CRC32 of what was written: (start, stop, sum) by offsets
    of the file, cut where a mebibyte of the file ends.
    """

    fd: int
    offset: int
    start: int
    length: int
    etag: str | None = None
    size: int | None = None
    sums: bool = False


class FileBody(NamedTuple):
    """Send `length` bytes of a file from `offset` on. `fd` is duplicated."""

    fd: int
    offset: int
    length: int


class Route(NamedTuple):
    """The way to a server.

    `proxy` is a URL with http:// or https://, None to connect directly; the environment is
    never looked at. `ca_file` has the authorities that are trusted, of the server and of a
    proxy with https; None for a server without TLS.
    """

    proxy: str | None = None
    ca_file: str | None = None


class Deadlines(NamedTuple):
    """Time limits of one request, in seconds.

    `connect_s` is for the name, the connection and TLS. After that, `silence_s` without a byte in
    either direction, or `total_s` since `submit` (0: no limit), are the error "timeout". While a
    body is sent or received, a mean of less than `least_rate` bytes per second in a window of
    `window_s` is the error "low-speed" (0: no limit).
    """

    connect_s: float = 10.0
    silence_s: float = 30.0
    least_rate: float = 0.0
    window_s: float = 30.0
    total_s: float = 0.0


class Request(NamedTuple):
    """One HTTP/1.1 request.

    `url` is percent-encoded and sent byte for byte. `headers` are all that is sent beside Host
    and Content-Length; a body of None has no Content-Length, one of b"" has 0. The body of any
    answer that is not 2xx comes into memory, whatever the sink; one of more than 1 MiB is
    dropped. While a FileSink is filled, progress is reported each time that `progress` more bytes
    are there (0: only at the end). With `fresh`, no connection is reused.
    """

    method: str
    url: str
    headers: Iterable[tuple[str, str]] = ()
    body: bytes | bytearray | memoryview | FileBody | None = None
    sink: MemorySink | FileSink = MemorySink()
    route: Route = Route()
    deadlines: Deadlines = Deadlines()
    progress: int = 0
    fresh: bool = False


Sums: TypeAlias = list[tuple[int, int, int]]
OnProgress: TypeAlias = Callable[[int, Sums], None]


class Transfer(_engine.Transfer):
    """A request that an engine has been given. One task at a time may wait for it.

    `completion` is there once no thread uses the request's descriptors and body any more.
    """

    __slots__ = ("_native", "_on_progress", "_task", "completion")

    def __init__(self, native: _engine.Engine, on_progress: OnProgress | None) -> None:
        self.completion: Completion | None = None
        self._native = native
        self._on_progress = on_progress
        self._task: trio.lowlevel.Task | None = None

    def cancel(self) -> None:
        """End the transfer soon, unless it is complete already. `completed` returns then."""
        self._native.cancel(self)

    async def settled(self) -> None:
        """Return once there is a completion. Cancelled, the transfer goes on."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.checkpoint_if_cancelled()
        if self.completion is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)

    async def completed(self) -> Completion:
        """Return the completion, which may be an error.

        Cancelled, the transfer is ended first, and `completion` is there when this raises. One
        that is complete by then returns normally.

        Raises:
            trio.ClosedResourceError: the engine was closed.
        """
        cancelled: list[Callable[[], object]] = []

        def abort(raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
            cancelled.append(raise_cancel)
            self.cancel()
            return trio.lowlevel.Abort.FAILED  # the task wakes up with the completion

        if self.completion is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        assert self.completion is not None
        if self.completion.error == "cancelled":
            for raise_cancel in cancelled:
                raise_cancel()
            if not self._native.is_open():
                raise trio.ClosedResourceError
        return self.completion

    def _progressed(self, received: int, sums: Sums) -> None:
        if self._on_progress is not None:
            self._on_progress(received, sums)

    def _complete(self, completion: Completion) -> None:
        self.completion = completion
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


class Engine:
    """Sends requests by libcurl. Belongs to the event loop.

    Its threads start with the first request, so that a process may fork before it. `aclose`, or
    the end of the event loop, cancels what is under way and closes all connections. An async
    context manager.
    """

    def __init__(
        self, max_connections: int, *, small_workers: int = 1, large_workers: int | None = None
    ) -> None:
        """`max_connections` is how many idle connections each worker keeps open at most."""
        if large_workers is None:
            processors = len(os.sched_getaffinity(0))
            large_workers = min(_MOST_LARGE_WORKERS, max(2, processors // 2))
        self._settings = small_workers, large_workers, max_connections
        self._native: _engine.Engine | None = None
        self._delivery = trio.CancelScope()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def submit(self, request: Request, on_progress: OnProgress | None = None) -> Transfer:
        """Hand a request to a worker.

        `on_progress` gets the number of bytes that are in a FileSink, in order and without gaps,
        and those sums of them that it has not had yet (see FileSink). It gets all of them before
        the transfer has a completion, whatever its end is. It is called in the event loop and
        must raise nothing.

        Raises:
            ValueError: the request can't be expressed in HTTP (a line break in a header).
            OSError: a descriptor can't be duplicated.
            trio.ClosedResourceError: the engine was closed.
        """
        native = self._native or self._start()
        transfer = Transfer(native, on_progress)
        native.submit(transfer, request)
        return transfer

    async def send(self, request: Request, on_progress: OnProgress | None = None) -> Completion:
        """As `submit`, and then `Transfer.completed`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.submit(request, on_progress).completed()

    async def aclose(self) -> None:
        """Cancel what is under way and end the threads. Does not return before that."""
        self._is_closed = True
        native, self._native = self._native, None
        if native is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(native.close)
            _deliver(native)
            self._delivery.cancel()
        await trio.lowlevel.checkpoint()

    def counters(self) -> dict[str, int]:
        """Open connections, requests under way, and bytes in the workers' buffers."""
        return {} if self._native is None else self._native.counters()

    def _start(self) -> _engine.Engine:
        if self._is_closed:
            raise trio.ClosedResourceError
        self._native = _engine.Engine(*self._settings)
        trio.lowlevel.spawn_system_task(self._run, self._native)
        return self._native

    async def _run(self, native: _engine.Engine) -> None:
        with self._delivery:
            try:
                while True:
                    await trio.lowlevel.wait_readable(native.fileno())
                    _deliver(native)
            finally:
                if self._native is native:  # the event loop ends
                    self._native = None
                    native.close()


def _deliver(native: _engine.Engine) -> None:
    """Wake the tasks whose transfers are complete or have got on."""
    completed, progressed = native.collect()
    for transfer, received, sums in progressed:
        transfer._progressed(received, sums)
    for transfer, completion in completed:
        transfer._complete(completion)
