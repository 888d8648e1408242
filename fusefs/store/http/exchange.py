"""One HTTP/1.1 exchange on a connection that is open already.

urllib3 and http.client take a third of a millisecond for an exchange, most of
it for reading the answer's headers as if they were a mail's. Here a request is
one write, and an answer some reads: the status line, the headers, and a body of
a known length, in chunks, or until the end (RFC 9112). Connections are opened
by urllib3, which knows of proxies and certificates, and borrowed from its pool.

A long body without TLS goes from the socket into one buffer, and from there into
its file: two system calls for a MiB, both without the interpreter's lock.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty
from typing import Any, Protocol

READ_SIZE = 1 << 16
# What a long body is handed on in.
PIECE = 1 << 20
_TIMEVAL = struct.Struct("@ll")
# More than any server sends; http.client's limit is a hundred lines of as many bytes.
MOST_HEADERS = 1 << 18


class WireError(Exception):
    """What came is no answer, or not all of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What S3 answered; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer begins with; `is_reusable` if another may come on the same connection."""

    status: int
    headers: Mapping[str, str]
    is_reusable: bool

    def body_size(self, *, is_head: bool) -> int | None:
        """How many bytes follow; None if only they themselves tell.

        Raises:
            WireError: the head does not make sense.
        """
        if is_head or self.status in (204, 304):
            return 0
        length = self.headers.get("content-length")
        if length is None or self.headers.get("transfer-encoding", "").lower() == "chunked":
            return None
        if not length.isdecimal():
            raise WireError("what came is no answer")
        return int(length)


class Source(Protocol):
    """Where an answer comes from: a socket."""

    def recv(self, size: int, /) -> bytes: ...


class RequestBody(Protocol):
    """The body of a request, which may be large."""

    def __len__(self) -> int: ...

    def seek(self, offset: int, /) -> object: ...

    def whole(self) -> bytes:
        """All the bytes, which must be few. Blocks."""

    def read(self, size: int = -1, /) -> memoryview:
        """The next piece, valid until the one after; empty at the end. Blocks."""


def exchange(pool: Any, head: bytes, body: bytes, *, is_head: bool) -> Answer | None:
    """Send a request and return its answer; None if the pool has no open connection. Blocks.

    Raises:
        WireError: the answer broke off, or was none.
        OSError: the connection broke, or was silent for the time that urllib3 has set.
    """
    connection = borrow(pool)
    if connection is None:
        return None
    is_reusable = False
    try:
        sock: socket.socket = connection.sock
        try:
            sock.sendall(head + body)
        except (BrokenPipeError, ConnectionResetError):
            # A server that says no need not wait for the body: its answer may be there.
            answer, _ = read(sock, is_head=is_head)
        else:
            answer, is_reusable = read(sock, is_head=is_head)
        return answer
    finally:
        if not is_reusable:
            connection.close()
        pool._put_conn(connection)


def borrow(pool: Any) -> Any:
    """An open connection, for nobody else until it is given back."""
    try:
        connection = pool.pool.get(block=False)
    except (Empty, AttributeError):  # the latter is of a pool that was closed
        return None
    if connection is not None and connection.is_connected:
        return connection
    if connection is not None:
        connection.close()
    pool._put_conn(connection)
    return None


def read(sock: Source, *, is_head: bool) -> tuple[Answer, bool]:
    """An answer, and whether another may come on the same connection."""
    stream = _Stream(sock)
    head = _final_head(stream)
    content, is_whole = _content(stream, head, is_head=is_head)
    return Answer(head.status, head.headers, content), is_whole and head.is_reusable


def _final_head(stream: _Stream) -> Head:
    while True:
        head = read_head(stream.until(b"\r\n\r\n"))
        if head.status >= 200:
            return head


def _content(stream: _Stream, head: Head, *, is_head: bool) -> tuple[bytes, bool]:
    """A body, and whether nothing else can be on its way."""
    size = head.body_size(is_head=is_head)
    if size is not None:
        content = stream.exactly(size)
    elif head.headers.get("transfer-encoding", "").lower() == "chunked":
        content = _read_chunks(stream)
    else:
        return stream.rest(), False
    return content, stream.is_empty


def download(
    pool: Any, request: bytes, size: int, begin: Callable[[Head], None],
    take: Callable[[memoryview], None],
) -> Answer | None:  # fmt: skip
    """Send a GET and hand `size` bytes of its body on, a MiB each; return the answer. Blocks.

    Not for TLS. `begin` may refuse what an answer's head tells. What tells of a
    failure is in the answer. None, and nothing was handed on, if the server does
    not say how long the body is.

    Raises:
        WireError: the answer broke off, or was none; what came of it was handed on.
        OSError: the connection broke, or was silent for the time that urllib3 has set.
    """
    connection = pool._get_conn()
    is_reusable = False
    try:
        if not connection.is_connected:
            connection.connect()
        sock: socket.socket = connection.sock
        limit_s = sock.gettimeout()
        sock.sendall(request)
        stream = _Stream(sock)
        head = _final_head(stream)
        told = head.body_size(is_head=False)
        if head.status < 300 and told is None:
            return None
        if told is None or head.status >= 300:
            content, is_whole = _content(stream, head, is_head=False)
            is_reusable = is_whole and head.is_reusable
            return Answer(head.status, head.headers, content)
        begin(head)
        # The kernel fills a whole buffer in one call, and watches the time.
        sock.settimeout(None)
        _set_receive_limit(sock, limit_s or 0.0)
        _hand_on(sock, stream.left(), min(told, size), take)
        _set_receive_limit(sock, 0.0)
        sock.settimeout(limit_s)
        is_reusable = head.is_reusable and told <= size
        return Answer(head.status, head.headers, b"")
    finally:
        if not is_reusable:
            connection.close()
        pool._put_conn(connection)


def _hand_on(
    sock: socket.socket, first: bytes, size: int, take: Callable[[memoryview], None]
) -> None:
    buffer = memoryview(bytearray(PIECE))
    buffer[: len(first)] = first
    filled = min(len(first), size)
    while size:
        wanted = min(size, PIECE)
        try:
            while filled < wanted:
                count = sock.recv_into(buffer[filled:wanted], 0, socket.MSG_WAITALL)
                if not count:
                    raise WireError("the answer broke off")
                filled += count
        except BlockingIOError as error:
            raise TimeoutError("the server said nothing more") from error
        finally:
            if filled:
                take(buffer[:filled])
        size -= wanted
        filled = 0


def _set_receive_limit(sock: socket.socket, limit_s: float) -> None:
    limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def read_head(text: bytes) -> Head:
    """What the lines before an answer's body tell.

    Raises:
        WireError: they are no such lines.
    """
    first, *lines = text.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    if not protocol.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise WireError("what came is no answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError("what came is no answer")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    is_reusable = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Head(int(rest[:3]), headers, is_reusable)


def _read_chunks(stream: _Stream) -> bytes:
    chunks = []
    while True:
        line = stream.until(b"\r\n").partition(b";")[0]
        try:
            size = int(line, 16)
        except ValueError as error:
            raise WireError("what came is no answer") from error
        if not size:
            break
        chunks.append(stream.exactly(size))
        stream.exactly(2)
    while stream.until(b"\r\n"):
        pass
    return b"".join(chunks)


class _Stream:
    """What arrives on a connection."""

    def __init__(self, sock: Source) -> None:
        self._sock = sock
        self._data = b""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come that was not asked for."""
        return not self._data

    def until(self, mark: bytes) -> bytes:
        """What comes before `mark`, which is taken away too."""
        while True:
            found, mark_found, rest = self._data.partition(mark)
            if mark_found:
                self._data = rest
                return found
            if len(self._data) > MOST_HEADERS:
                raise WireError("what came is no answer")
            self._data += self._more()

    def exactly(self, size: int) -> bytes:
        pieces, missing = [self._data[:size]], size - len(self._data)
        self._data = self._data[size:]
        while missing > 0:
            piece = self._more()
            pieces.append(piece[:missing])
            self._data = piece[missing:]
            missing -= len(piece)
        return b"".join(pieces)

    def left(self) -> bytes:
        """What has come already."""
        data, self._data = self._data, b""
        return data

    def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        pieces = [self._data]
        while piece := self._sock.recv(READ_SIZE):
            pieces.append(piece)
        self._data = b""
        return b"".join(pieces)

    def _more(self) -> bytes:
        data = self._sock.recv(READ_SIZE)
        if not data:
            raise WireError("the answer broke off")
        return data
