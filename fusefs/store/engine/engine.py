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
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeAlias

import trio

from fusefs.store.engine import _engine

# A worker receives about 700 MB/s over TLS; more of them than processors gain nothing.
_MOST_LARGE_WORKERS: Final = 8
_SMALL_WORKERS: Final = 1


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

    With a `path`, at which no file is, and -1 for `fd`, the file is created once all of `length`
    bytes are there, 256 KiB at most; its folder may be missing. `Transfer.take_file` hands it over.
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
    dropped. While a FileSink is filled, progress is reported once the first 64 KiB and each
    time that `progress` more bytes are there (0: only at the end). With `fresh`, no connection
    is reused.
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
    of the body are in the sink, also after an error.

    `error` is None if the whole answer is in the sink, or one of: resolve, connect, proxy,
    certificate, tls, timeout, low-speed, reset, short, protocol (network and server);
    too-large, range, etag, size (an answer that the sink must not have); sink-full (ENOSPC,
    EDQUOT), sink-failed, source-failed (`errno` says why, 0: the file is too short); memory;
    cancelled. A status of 300 and more stands, whatever comes after the headers. `detail` is
    libcurl's sentence, `proxy_status` the answer to CONNECT, or 0. `may_have_been_executed` is
    True if a byte of the request was sent and no whole answer came.

    Times are seconds since `submit`, 0 for what did not happen.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    received: int
    error: str | None
    errno: int
    proxy_status: int
    detail: str
    may_have_been_executed: bool
    connected_s: float
    first_byte_s: float
    last_byte_s: float


Sums: TypeAlias = list[tuple[int, int, int]]
OnProgress: TypeAlias = Callable[[int, Sums], None]

_SUM = struct.Struct("@QQQ")
# All that is sent beside Host and Content-Length: what libcurl would add by itself.
_NOT_ADDED = "Accept:\nProxy-Connection:\n"
_UNSENDABLE = re.compile("[^!-~]")
# CURLcode of curl/curl.h. Others are "protocol".
_ERRORS = {
    5: "proxy",  # COULDNT_RESOLVE_PROXY
    6: "resolve",  # COULDNT_RESOLVE_HOST
    7: "connect",  # COULDNT_CONNECT
    8: "malformed",  # WEIRD_SERVER_REPLY: a header without a colon or with a NUL, for two
    18: "short",  # PARTIAL_FILE
    27: "malformed",  # OUT_OF_MEMORY, which is what a header that is too long is to libcurl
    28: "timeout",  # OPERATION_TIMEDOUT
    35: "tls",  # SSL_CONNECT_ERROR
    52: "reset",  # GOT_NOTHING
    55: "reset",  # SEND_ERROR
    56: "reset",  # RECV_ERROR
    59: "tls",  # SSL_CIPHER
    60: "certificate",  # PEER_FAILED_VERIFICATION
    65: "reset",  # SEND_FAIL_REWIND, of a repetition that is not made
    77: "tls",  # SSL_CACERT_BADFILE
    83: "certificate",  # SSL_ISSUER_ERROR
    97: "proxy",  # PROXY
}


class Transfer(_engine.Transfer):
    """A request that an engine has been given. One task at a time may wait for it.

    `completion` is there once no thread uses the request's descriptors and body any more. Without
    an `on_progress`, `sums` are those of all that was written by then. `take_file`, once it is
    complete, hands over the descriptor of the file that it has created, or -1: one that is not
    taken is removed.
    """

    __slots__ = (
        "_has_proxy",
        "_native",
        "_on_progress",
        "_task",
        "_was_cancelled",
        "completion",
        "sums",
    )

    def __init__(
        self, native: _engine.Engine, on_progress: OnProgress | None, *, has_proxy: bool
    ) -> None:
        self.completion: Completion | None = None
        self.sums: Sums = []
        self._native = native
        self._has_proxy = has_proxy
        self._was_cancelled = False
        self._on_progress = on_progress
        self._task: trio.lowlevel.Task | None = None

    @property
    def has_begun(self) -> bool:
        """True once the headers of the answer have come."""
        return self.status != 0

    def cancel(self) -> None:
        """End the transfer soon, unless it is complete already. `completed` returns then."""
        self._was_cancelled = True
        self._native.cancel(self)

    async def completed(self) -> Completion:
        """Return the completion, which may be an error.

        Cancelled, the transfer is ended first, and `completion` is there when this raises. One
        that is complete by then returns normally.

        Raises:
            trio.ClosedResourceError: the engine was closed.
        """
        while (completion := await self.completed_or_slow()) is None:
            pass
        return completion

    async def completed_or_slow(self) -> Completion | None:
        """As `completed`; None if `look_up` was called meanwhile."""
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
        """Report progress; `packed` has sums as _engine.c keeps them."""
        sums = list(_SUM.iter_unpack(packed))
        if self._on_progress is not None:
            self._on_progress(received, sums)
        else:
            self.sums += sums

    def complete(self, outcome: _engine.Outcome) -> None:
        """Take the outcome and wake the task that waits for it."""
        status, head, body, received, error, code, number, proxy_status, detail, *_ = outcome
        may_have_been_executed, submitted, connected, first, last = outcome[9:]
        if error is None and code:
            error = _ERRORS.get(code, "protocol")
            if self._has_proxy and not connected and (proxy_status >= 300 or code == 7):
                error = "proxy"
        self.completion = Completion(
            status,
            _parsed(head),
            body,
            received,
            error,
            number,
            proxy_status,
            detail.decode(errors="replace"),
            may_have_been_executed,
            connected and connected - submitted,
            first and first - submitted,
            last - submitted,
        )
        self.look_up()

    def look_up(self) -> None:
        """Wake the task that waits for the transfer."""
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


def _parsed(head: bytes) -> dict[str, str]:
    """Headers of "name\\0value\\0..."; those with the same name are joined (RFC 9110, 5.3)."""
    parts = head.decode("latin-1").split("\0")
    headers = dict(zip(parts[::2], parts[1::2], strict=False))
    if len(headers) < len(parts) // 2:
        headers = {}
        for name, value in zip(parts[::2], parts[1::2], strict=False):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Headers as libcurl takes them, a line for each.

    Raises:
        ValueError: a header would be more than a line, or is not Latin-1.
    """
    lines = list(map(": ".join, headers))
    text = "".join([f"{line}\n" for line in lines])
    if text.count("\n") != len(lines) or "\r" in text or "\0" in text:
        raise ValueError("a header has a line break or a zero")
    text = text.replace(": \n", ";\n")  # libcurl's form of a header without a value
    expects = "" if "expect:" in text.lower() else "Expect:\n"
    return f"{text}{_NOT_ADDED}{expects}".encode("latin-1")


def _flat(request: Request) -> tuple[object, ...]:
    """A request as `_engine.Engine.submit` takes it."""
    body, sink = request.body, request.sink
    if _UNSENDABLE.search(request.method + request.url):
        raise ValueError("a URL is percent-encoded ASCII")
    size = -1
    sent = (None, *body) if isinstance(body, FileBody) else (body, -1, 0, 0)
    if isinstance(sink, MemorySink):
        received: tuple[object, ...] = (sink.limit, -1, 0, 0, 0, None, size, False, None)
    else:
        size = -1 if sink.size is None else sink.size
        etag = None if sink.etag is None else sink.etag.strip('"')
        received = (0, *sink[:4], etag, size, sink.sums, sink.path)
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


class Engine:
    """Sends requests by libcurl. Belongs to the event loop.

    Its threads start with the first request, so that a process may fork before it. `nursery` has
    its task, and those of the parts above that send by it.
    """

    def __init__(self, nursery: trio.Nursery, max_connections: int) -> None:
        """`open_engine` makes them.

        `max_connections` is how many idle connections each worker keeps open at most.
        """
        self.nursery = nursery
        processors = len(os.sched_getaffinity(0))
        large_workers = min(_MOST_LARGE_WORKERS, max(2, processors // 2))
        self._settings = _SMALL_WORKERS, large_workers, max_connections
        self._native: _engine.Engine | None = None
        # Ends with `close` alone: tasks that are cancelled wait for their transfers' completions.
        self._delivery = trio.CancelScope(shield=True)
        self._is_closed = False

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
        if self._is_closed:
            raise trio.ClosedResourceError
        native = self._native or self._start()
        transfer = Transfer(native, on_progress, has_proxy=request.route.proxy is not None)
        native.submit(transfer, _flat(request))
        return transfer

    async def send(self, request: Request, on_progress: OnProgress | None = None) -> Completion:
        """As `submit`, and then `Transfer.completed`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.submit(request, on_progress).completed()

    async def close(self) -> None:
        """Cancel what is under way and end the threads. Does not return before that."""
        self._is_closed = True
        native, self._native = self._native, None
        if native is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(native.close)
            _deliver(native)
            self._delivery.cancel()

    def _start(self) -> _engine.Engine:
        self._native = _engine.Engine(*self._settings, Transfer)
        self.nursery.start_soon(self._run, self._native)
        return self._native

    async def _run(self, native: _engine.Engine) -> None:
        with self._delivery:
            while True:
                await trio.lowlevel.wait_readable(native.eventfd)
                _deliver(native)


@asynccontextmanager
async def open_engine(max_connections: int) -> AsyncIterator[Engine]:
    """Hand out an engine. At the end of the block all that is under way is cancelled.

    An exception of the block is raised as it is, not in a group.
    """
    try:
        async with trio.open_nursery() as nursery:
            engine = Engine(nursery, max_connections)
            try:
                yield engine
            finally:
                await engine.close()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


def _deliver(native: _engine.Engine) -> None:
    """Wake the tasks whose transfers are complete or have got on."""
    completed, progressed = native.collect()
    for transfer, received, packed in progressed:
        transfer.progressed(received, packed)
    for transfer, outcome in completed:
        transfer.complete(outcome)
