"""One HTTP/1.1 exchange on a connection that is open already.

urllib3 and http.client take a third of a millisecond for an exchange, most of
it for reading the answer's headers as if they were a mail's. Here a request is
one write, and an answer some reads, which answers.py takes apart. The connections are
those of pool.py.

A long body without TLS goes from the socket into one buffer, and from there into
its file: two system calls for a MiB, both without the interpreter's lock. Over TLS it
comes in records (records.py).

A socket's time-out ends a silence, not an answer of which a byte comes now and then:
that is what `LeastProgress` watches for.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from fusefs.store.http import records
from fusefs.store.http.answers import (
    Answer,
    Arrived,
    Parsing,
    WireError,
    answer,
    final_head,
    parse,
    read_head,
    whole,
)

T = TypeVar("T")

READ_SIZE = 1 << 16
# Bodies of at most so many bytes are sent without asking whether they are wanted.
SMALL = 128 << 10
CONTINUE_WAIT_S = 1.0
# In so many seconds of waiting a connection gets on by so many bytes a second, or is given up.
PACE_WINDOW_S = 30.0
LEAST_RATE = 1 << 10
# How long a change may take. S3 begins the answer to one that takes minutes (a copy), and
# sends blanks until it is done.
ANSWER_LIMIT_S = 900.0
# What a long body is handed on in.
PIECE = 1 << 20
_TIMEVAL = struct.Struct("@ll")


class ByteSource(Protocol):
    """Where an answer comes from: a socket."""

    def recv(self, size: int, /) -> bytes: ...

    def gettimeout(self) -> float | None: ...


class LeastProgress:
    """Refuses a connection that moves too few bytes for the time that this side waits for it.

    What the caller does between the pieces, on a slow disk say, does not count. Nor does a wait
    that is longer than the socket's time-out `silence_s` allows (None: any): this process was
    stopped meanwhile.
    """

    __slots__ = ("_bytes", "_longest_s", "_waited_s", "_window_s")

    def __init__(self, window_s: float, silence_s: float | None = None) -> None:
        self._window_s = window_s
        # A receive that is to fill a buffer ends a moment after the time-out, with some bytes.
        self._longest_s = math.inf if silence_s is None else 2 * silence_s
        self._waited_s = 0.0
        self._bytes = 0

    def note(self, waited_s: float, count: int) -> None:
        """So many more bytes have gone or come after a wait.

        Raises:
            TimeoutError: that is next to nothing for the time that it took.
        """
        if waited_s < self._longest_s:
            self._waited_s += waited_s
        self._bytes += count
        if self._waited_s >= self._window_s:
            if self._bytes < LEAST_RATE * self._waited_s:
                raise TimeoutError("the connection hardly gets on")
            self._waited_s, self._bytes = 0.0, 0


class RequestBody(Protocol):
    """The body of a request, which may be large."""

    def __len__(self) -> int: ...

    def seek(self, offset: int, /) -> object: ...

    def whole(self) -> bytes:
        """All the bytes, which must be few. Blocks."""

    def read(self, size: int = -1, /) -> memoryview:
        """The next piece, valid until the one after; empty at the end. Blocks."""


def exchange(
    sock: socket.socket, head: bytes, body: RequestBody | None, *, is_head: bool
) -> tuple[Answer, bool]:
    """Send a request; return its answer, and whether the connection can be used again. Blocks.

    The head of a request with a body larger than `SMALL` says `expect: 100-continue`.

    Raises:
        WireError: the answer broke off, or was none.
        OSError: the connection broke, was silent for its time-out, or hardly got on.
    """
    is_change = not head.startswith((b"GET ", b"HEAD "))
    stream = Stream(sock, ANSWER_LIMIT_S if is_change else None)
    is_large = body is not None and len(body) > SMALL
    is_sent = False
    # A server that refuses the body need not wait for it: its answer may be there.
    with suppress(BrokenPipeError, ConnectionResetError):
        if body is None or not is_large:
            sock.sendall(head if body is None else head + body.whole())
            is_sent = True
        else:
            sock.sendall(head)
            refusal = _answer_instead_of_continue(sock, stream, is_head=is_head)
            if refusal is not None:
                return refusal, False
            _send_body(sock, body)
            is_sent = True
    found, is_reusable = stream.read(answer(stream, is_head=is_head))
    if found.status < 300 and not is_sent:
        raise WireError("the answer came before the whole body was sent")
    return found, is_reusable and is_sent


def _send_body(sock: socket.socket, body: RequestBody) -> None:
    pace = LeastProgress(PACE_WINDOW_S, sock.gettimeout())
    body.seek(0)
    while piece := body.read():
        while piece:  # `sendall` would have one time-out for all of it
            began = time.monotonic()
            count = sock.send(piece)
            pace.note(time.monotonic() - began, count)
            piece = piece[count:]


def _answer_instead_of_continue(
    sock: socket.socket, stream: Stream, *, is_head: bool
) -> Answer | None:
    """The final answer of a server that does not want the body; None if it is to be sent.

    Servers that know no `expect` wait for the body: after a second it is sent.
    """
    limit_s = sock.gettimeout()
    sock.settimeout(CONTINUE_WAIT_S)
    try:
        head = read_head(stream.read(stream.until(b"\r\n\r\n")))
    except TimeoutError:
        return None
    finally:
        sock.settimeout(limit_s)
    if head.status < 200:
        return None
    if head.status < 300:
        raise WireError("the answer came before the body was sent")
    return stream.read(whole(stream, head, is_head=is_head))[0]


def download(
    sock: socket.socket,
    request: bytes,
    size: int,
    begin: Callable[[Mapping[str, str]], None],
    take: Callable[[memoryview], None],
) -> tuple[Answer | None, bool]:
    """Send a GET and hand `size` bytes of its body to `take`, up to a MiB each. Blocks.

    Returns the answer, and whether the connection can be used again. `begin` may
    refuse the answer's headers. The answer to a failure has its content. None, and
    nothing was handed on, if the server does not say how long the body is.

    Raises:
        WireError: the answer broke off, or was none; what came of it was handed on.
        OSError: the connection broke, was silent for its time-out, or hardly got on.
    """
    sock.sendall(request)
    stream = Stream(sock)
    head = stream.read(final_head(stream))
    length = head.body_size(is_head=False)
    if head.status < 300 and length is None:
        return None, False
    if length is None or head.status >= 300:
        return stream.read(whole(stream, head, is_head=False))
    begin(head.headers)
    first = stream.buffered()
    _hand_on(sock, first, min(length, size), take)
    is_whole = len(first) <= length <= size
    return Answer(head.status, head.headers, b""), head.is_reusable and is_whole


def _hand_on(
    sock: socket.socket, first: bytes, size: int, take: Callable[[memoryview], None]
) -> None:
    limit_s = sock.gettimeout()
    pace = LeastProgress(PACE_WINDOW_S, limit_s)
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(0)
        receive = partial(records.receive, sock, limit_s=limit_s)
        _hand_on_pieces(receive, first, size, take, pace)
    else:
        # The kernel fills a whole buffer in one call, and watches the time.
        sock.settimeout(None)
        _set_receive_limit(sock, limit_s or 0.0)
        _hand_on_pieces(partial(_receive_all, sock), first, size, take, pace)
        _set_receive_limit(sock, 0.0)
    sock.settimeout(limit_s)


def _receive_all(sock: socket.socket, room: memoryview) -> int:
    try:
        return sock.recv_into(room, 0, socket.MSG_WAITALL)
    except BlockingIOError as error:
        raise TimeoutError("the server sent nothing more") from error


def _hand_on_pieces(
    receive: Callable[[memoryview], int],
    first: bytes,
    size: int,
    take: Callable[[memoryview], None],
    pace: LeastProgress,
) -> None:
    buffer = memoryview(bytearray(max(min(size, PIECE), len(first))))
    buffer[: len(first)] = first
    filled = min(len(first), size)
    while size:
        wanted = min(size, PIECE)
        try:
            while filled < wanted:
                began = time.monotonic()
                count = receive(buffer[filled:wanted])
                if not count:
                    raise WireError("the answer broke off")
                filled += count
                pace.note(time.monotonic() - began, count)
        finally:
            if filled:
                take(buffer[:filled])
        size -= wanted
        filled = 0


def _set_receive_limit(sock: socket.socket, limit_s: float) -> None:
    limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class Stream(Arrived):
    """What arrives on a connection; once it has begun, by a pace over so many seconds."""

    def __init__(self, sock: ByteSource, window_s: float | None = None) -> None:
        super().__init__()
        self._sock = sock
        self._pace = LeastProgress(
            PACE_WINDOW_S if window_s is None else window_s, sock.gettimeout()
        )
        self._has_begun = False

    def read(self, parsing: Parsing[T]) -> T:
        """What a generator makes of this stream. Blocks.

        Raises:
            WireError: it is no answer.
            OSError: the connection broke, was silent, or hardly got on.
        """
        return parse(parsing, self._receive)

    def _receive(self) -> bytes:
        began = time.monotonic()
        data = self._sock.recv(READ_SIZE)
        if self._has_begun:
            self._pace.note(time.monotonic() - began, len(data))
        self._has_begun = True
        return data
