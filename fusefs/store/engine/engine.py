"""HTTP requests from the event loop, sent by libcurl in threads of their own.

The compiled part (_engine.c) works in a few threads that never hold the interpreter lock. Each
request is given to a worker, which sends it, writes the body of the answer to its sink, and adds
the completion to a list. A task here for each worker waits for this list with an eventfd and wakes
the tasks that sent the requests: a hundred completions are one wake-up. Requests with large bodies
have workers of their own, so that a small answer never waits until a large one is written.

One call of `send` is one request: nothing is signed, retried, queued or redirected here.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

import trio

from fusefs.store.engine import _engine

# A worker receives about 700 MB/s over TLS; more workers than processors gain nothing.
_MOST_LARGE_WORKERS: Final = 8
# Larger bodies go to the workers for large bodies.
_LARGE: Final = 512 << 10
# Sizes of the buffers for received bytes. Many small bodies are under way at a time.
_SMALL_AT_ONCE: Final = 64 << 10
_LARGE_AT_ONCE: Final = 256 << 10


class MemorySink(NamedTuple):
    """A sink in memory for an answer's body; above `limit` bytes the error is "too-large"."""

    limit: int = 1 << 20


class FileSink(NamedTuple):
    """A file as the sink for the body of an answer with status 200 or 206.

    `fd` is duplicated for the request's lifetime. The `length` bytes of the object from `start` on
    go to `offset` of the file, and no byte outside of [offset, offset + length) is written. Before
    the first byte is written, the answer's ETag and size are compared with `etag` and `size`, and
    its range with `start` and `length`; None is not compared.

    With `sums`, progress reports include the CRC32 of the written bytes: (start, stop, sum) by
    offsets of the file, cut where a mebibyte of the file ends.

    With a `path`, at which no file exists, and -1 for `fd`, the engine creates the file, and its
    folder if missing, once all `length` bytes (at most 256 KiB) have come; see `take_file`.
    """

    fd: int
    offset: int
    start: int
    length: int
    etag: str | None = None
    size: int | None = None
    sums: bool = False
    path: str | None = None


class FileBody(NamedTuple):
    """A request body: `length` bytes of a file from `offset` on. `fd` is duplicated."""

    fd: int
    offset: int
    length: int


class Route(NamedTuple):
    """The way to a server.

    `proxy` is a URL with http:// or https://, or None for a direct connection; the environment is
    never consulted. `ca_file` lists the trusted authorities, for the server and for a proxy with
    https; None for a server without TLS.
    """

    proxy: str | None = None
    ca_file: str | None = None


class Deadlines(NamedTuple):
    """Time limits of one request, in seconds.

    `connect_s` is for the name lookup, the connection and TLS. After that, `silence_s` without a
    byte in either direction, or `total_s` since `submit` (0: no limit), cause the error "timeout".
    While a body is sent or received, a mean rate below `least_rate` bytes per second in a window of
    `window_s` causes the error "low-speed" (0: no limit).
    """

    connect_s: float = 10.0
    silence_s: float = 30.0
    least_rate: float = 0.0
    window_s: float = 30.0
    total_s: float = 0.0


class Request(NamedTuple):
    """One HTTP/1.1 request.

    `url` is percent-encoded and sent byte for byte. Only `headers`, Host and Content-Length are
    sent; a body of None has no Content-Length, one of b"" has 0. The body of an answer that is not
    2xx is received in memory, whatever the sink; above 1 MiB it is dropped. While a FileSink is
    filled, progress is reported at the first 64 KiB and after each further `progress` bytes (0:
    only at the end). With `fresh`, no connection is reused.
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


class Completion(NamedTuple):
    """The end of a request.

    `status` is 0 and `headers` are empty if no answer came; names of headers are in lower case.
    `body` is that of a MemorySink, or the document of an answer that is not 2xx. `received` bytes
    of the body are in the file of a FileSink, also after an error.

    `error` is None if the whole answer is in the sink, else one of: resolve, connect, proxy,
    certificate, tls, timeout, low-speed, reset, short, malformed, protocol (network and server);
    too-large, range, etag, size (the answer does not fit the sink); sink-failed, source-failed (see
    `errno`; 0: the file is too short); memory; cancelled. With a status of 300 or above, no error
    is set for a body that breaks off. `detail` is libcurl's sentence, `proxy_status` the answer to
    CONNECT, or 0.

    Times are seconds since `submit`; 0 for an event that did not happen.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    received: int
    error: str | None
    errno: int
    proxy_status: int
    detail: str
    connected_s: float
    first_byte_s: float
    last_byte_s: float


Sums: TypeAlias = list[tuple[int, int, int]]
OnProgress: TypeAlias = Callable[[int, Sums], None]

_SUM = struct.Struct("@QQQ")
# Headers that libcurl would add by itself, switched off.
_NOT_ADDED = "Accept:\0Expect:\0Proxy-Connection:\0"
_UNSENDABLE = re.compile("[^!-~]")
_CONNECT, _PARTIAL_FILE = 7, 18
# Errors by CURLcode (curl/curl.h). All other codes are "protocol".
_ERRORS = {
    5: "proxy",  # COULDNT_RESOLVE_PROXY
    6: "resolve",  # COULDNT_RESOLVE_HOST
    _CONNECT: "connect",
    8: "malformed",  # WEIRD_SERVER_REPLY: a header without a colon or with a NUL, say
    _PARTIAL_FILE: "short",
    27: "malformed",  # OUT_OF_MEMORY: libcurl's code for a header that is too long
    28: "timeout",  # OPERATION_TIMEDOUT
    35: "tls",  # SSL_CONNECT_ERROR
    52: "reset",  # GOT_NOTHING
    55: "reset",  # SEND_ERROR
    56: "reset",  # RECV_ERROR
    59: "tls",  # SSL_CIPHER
    60: "certificate",  # PEER_FAILED_VERIFICATION
    65: "reset",  # SEND_FAIL_REWIND: libcurl could not repeat the body
    77: "tls",  # SSL_CACERT_BADFILE
    83: "certificate",  # SSL_ISSUER_ERROR
    97: "proxy",  # PROXY
}


class Transfer:
    """A request that was submitted to an engine. Only one task at a time may wait for it.

    `completion` is set once no thread uses the request's descriptors and body any more. Without an
    `on_progress`, `sums` then has the checksums of all written bytes.
    """

    __slots__ = (
        "_handle",
        "_has_proxy",
        "_on_progress",
        "_sink",
        "_task",
        "_was_cancelled",
        "_worker",
        "completion",
        "sums",
    )

    def __init__(
        self, worker: _engine.Worker, request: Request, on_progress: OnProgress | None
    ) -> None:
        self.completion: Completion | None = None
        self.sums: Sums = []
        self._worker = worker
        self._has_proxy = request.route.proxy is not None
        self._sink = request.sink
        self._was_cancelled = False
        self._on_progress = on_progress
        self._task: trio.lowlevel.Task | None = None
        self._handle = worker.submit(self, _flat(request))

    @property
    def has_begun(self) -> bool:
        """True once the headers of the answer have come."""
        return self._worker.status(self._handle) != 0

    def take_file(self) -> int:
        """Return the descriptor of the file that was created at `FileSink.path`, or -1.

        The transfer must be complete. A created file that is not taken is removed.
        """
        return self._worker.take_file(self._handle)

    def cancel(self) -> None:
        """Cancel the transfer, unless it is complete already; `completed` returns soon after."""
        self._was_cancelled = True
        self._worker.cancel(self._handle)

    async def completed(self) -> Completion:
        """Wait for the completion, which may be an error, and return it.

        Cancellation ends the transfer first: `completion` is set when Cancelled is raised. If the
        transfer is complete by then, the call returns normally.

        Raises:
            trio.ClosedResourceError: the engine was closed.
        """
        while (completion := await self.completed_or_slow()) is None:
            pass
        return completion

    async def completed_or_slow(self) -> Completion | None:
        """Wait as `completed` does, but return None if the task is woken by `look_up` before."""
        cancelled: list[Callable[[], object]] = []

        def abort(raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
            cancelled.append(raise_cancel)
            self.cancel()
            return trio.lowlevel.Abort.FAILED  # the task wakes up with the completion

        while self.completion is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
            if self.completion is None and not cancelled:
                return None
        if self.completion.error == "cancelled":
            for raise_cancel in cancelled:
                raise_cancel()
            if not self._was_cancelled:
                raise trio.ClosedResourceError
        return self.completion

    def progressed(self, received: int, packed: bytes) -> None:
        """Pass progress to `on_progress`, or keep the checksums, which _engine.c has `packed`."""
        sums = list(_SUM.iter_unpack(packed))
        if self._on_progress is not None:
            self._on_progress(received, sums)
        else:
            self.sums += sums

    def complete(self, outcome: _engine.Outcome) -> None:
        """Set the completion from `outcome` and wake the waiting task."""
        status, head, body, received, error, code = outcome[:6]
        done = Completion(status, _parsed(head), body, received, error, *outcome[6:])
        error = self._error(done, code)
        self.completion = done if error == done.error else done._replace(error=error)
        self.look_up()

    def _error(self, done: Completion, code: int) -> str | None:
        """Return the error of a request that has ended with `code`, a CURLcode."""
        sink = self._sink
        if done.status >= 300 and done.error != "cancelled":
            return None  # a refusal counts, even if its document or the upload broke off
        if done.error is not None:
            return done.error
        if not done.status and code in (0, _PARTIAL_FILE):
            return "reset"  # libcurl accepts headers that are cut off by the connection's end
        if code:
            is_proxys = done.proxy_status >= 300 or code == _CONNECT
            is_proxys = is_proxys and self._has_proxy and not done.connected_s
            return "proxy" if is_proxys else _ERRORS.get(code, "protocol")
        if isinstance(sink, FileSink) and done.received < sink.length:
            # A complete answer of another length than the object was decompressed on the way.
            is_whole = done.status == 200 and sink.size is not None
            return "size" if is_whole and "transfer-encoding" in done.headers else "short"
        return None

    def look_up(self) -> None:
        """Wake the task that waits for the transfer, even if the transfer is not complete."""
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


def _parsed(head: bytes) -> dict[str, str]:
    """Parse headers of the form "Name\\0value\\0..."; repeated names are joined (RFC 9110, 5.3)."""
    parts = head.decode("latin-1").split("\0")
    headers = dict(zip(map(str.lower, parts[::2]), parts[1::2], strict=False))
    if len(headers) < len(parts) // 2:
        headers = {}
        for name, value in zip(map(str.lower, parts[::2]), parts[1::2], strict=False):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the headers in libcurl's form, each with a NUL after it.

    Raises:
        ValueError: a header has a line break or a NUL, or is not Latin-1.
    """
    lines = [*map(": ".join, headers), ""]
    text = "\0".join(lines)
    if text.count("\0") != len(lines) - 1 or "\r" in text or "\n" in text:
        raise ValueError("a header has a line break or a zero")
    text = text.replace(": \0", ";\0")  # libcurl's form of a header without a value
    return (text + _NOT_ADDED).encode("latin-1")


def _flat(request: Request) -> tuple[object, ...]:
    """Return the tuple that `_engine.Worker.submit` takes; ValueError if HTTP can't express it."""
    body, sink = request.body, request.sink
    if _UNSENDABLE.search(request.method + request.url):
        raise ValueError("a URL is percent-encoded ASCII")
    size = -1
    sent = (None, *body) if isinstance(body, FileBody) else (body, -1, 0, 0)
    if isinstance(sink, MemorySink):
        received: tuple[object, ...] = (sink.limit, -1, 0, 0, 0, None, size, False, None, None)
    else:
        size = -1 if sink.size is None else sink.size
        etag = None if sink.etag is None else sink.etag.strip('"')
        folder = None if sink.path is None else sink.path.rpartition("/")[0]
        received = (0, *sink[:4], etag, size, sink.sums, sink.path, folder)
    return (
        request.method,
        request.url,
        _lines(request.headers),
        *sent,
        *received,
        *request.route,
        *request.deadlines,
        request.progress,
        request.fresh,
    )


def _is_large(request: Request) -> bool:
    body, sink = request.body, request.sink
    sent = body.length if isinstance(body, FileBody) else len(body or b"")
    return sent > _LARGE or (isinstance(sink, FileSink) and sink.length > _LARGE)


class Engine:
    """Sends requests by libcurl. Belongs to the event loop.

    The engine's threads start with the first request, so that a process may fork before. `nursery`
    runs the engine's tasks, and the tasks of the layers above that send requests by the engine.
    """

    def __init__(self, nursery: trio.Nursery, max_connections: int) -> None:
        """Use `open_engine` to create an engine.

        `max_connections` limits the idle connections that each worker keeps open.
        """
        self.nursery = nursery
        self._max_connections = max_connections
        self._workers: list[_engine.Worker] = []  # the first has the small bodies
        self._is_closed = False

    def submit(self, request: Request, on_progress: OnProgress | None = None) -> Transfer:
        """Give a request to a worker; return its transfer at once.

        `on_progress` gets the number of bytes in a FileSink, in order and without gaps, and their
        checksums that were not reported before (see FileSink). All are reported before the transfer
        has its completion, however it ends. `on_progress` is called in the event loop and must not
        raise.

        Raises:
            ValueError: the request can't be expressed in HTTP (a line break in a header).
            OSError: a descriptor can't be duplicated, or no thread can be started.
            trio.ClosedResourceError: the engine was closed.
        """
        if self._is_closed:
            raise trio.ClosedResourceError
        workers = self._workers or self._start()
        # The first of equals, so that a few requests reuse a few connections.
        is_large = _is_large(request)
        worker = min(workers[1:], key=attrgetter("load")) if is_large else workers[0]
        return Transfer(worker, request, on_progress)

    async def send(self, request: Request, on_progress: OnProgress | None = None) -> Completion:
        """Submit a request as `submit` does, wait for its completion and return it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.submit(request, on_progress).completed()

    def close(self) -> None:
        """Cancel all transfers; after their completions, the engine's threads and tasks end."""
        self._is_closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()

    def _start(self) -> list[_engine.Worker]:
        large = min(_MOST_LARGE_WORKERS, max(2, len(os.sched_getaffinity(0)) // 2))
        sizes = _SMALL_AT_ONCE, *[_LARGE_AT_ONCE] * large
        workers = [_engine.Worker(self._max_connections, size) for size in sizes]
        try:
            for worker in workers:
                self._start_thread(worker)
        except RuntimeError as error:  # the system starts no thread
            for worker in workers:
                worker.stop()
            raise OSError(f"no threads for the engine: {error}") from error
        self._workers = workers
        return workers

    def _start_thread(self, worker: _engine.Worker) -> None:
        token = trio.lowlevel.current_trio_token()
        # Cancelled tasks wait for their transfers' completions, so only the thread's end ends
        # the delivery.
        running = trio.CancelScope(shield=True)
        trio.lowlevel.start_thread_soon(worker.run, lambda _: token.run_sync_soon(running.cancel))
        self.nursery.start_soon(_deliver_while, running, worker)


async def _deliver_while(running: trio.CancelScope, worker: _engine.Worker) -> None:
    """Deliver a worker's reports until its thread ends, which cancels `running`."""
    with running:
        while True:
            await trio.lowlevel.wait_readable(worker.eventfd)
            _deliver(worker)
    _deliver(worker)


def _deliver(worker: _engine.Worker) -> None:
    """Report the progress of transfers, and wake the tasks of completed ones."""
    for transfer, received, packed, outcome in worker.collect():
        if received:
            transfer.progressed(received, packed)
        if outcome is not None:
            transfer.complete(outcome)


@asynccontextmanager
async def open_engine(max_connections: int) -> AsyncIterator[Engine]:
    """Yield an engine. At the end of the block all its transfers are cancelled.

    An exception of the block is raised as it is, not in a group.
    """
    try:
        async with trio.open_nursery() as nursery:
            engine = Engine(nursery, max_connections)
            try:
                yield engine
            finally:
                engine.close()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__
