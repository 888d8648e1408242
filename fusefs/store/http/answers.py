"""Answers of HTTP/1.1 (RFC 9112), taken apart as they arrive.

The functions that parse are generators: they yield where more bytes are needed, and are sent
those that came, b"" at the end of the connection. So threads, which block, and the event loop
parse alike, and each byte is looked at once, in however many pieces it comes.

What a server sends is not trusted: heads, bodies and interim answers have limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from fusefs.store.unreachable import TOO_LONG
from fusefs.telemetry.s3_requests import first_byte

T = TypeVar("T")
Parsing = Generator[None, bytes, T]

# More than any server sends; http.client's limit is a hundred lines of as many bytes.
MOST_HEADERS = 1 << 18
# A listing of a thousand keys of the longest kind has 4 MiB.
MOST_CONTENT = 16 << 20
# The document that goes with a failure has some hundred bytes.
MOST_ERROR = 1 << 20
# Of answers with a status below 200, which say that another one will come.
MOST_INTERIM = 10
# The digits of the largest size that is one.
LONGEST_SIZE = 19
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}[ \t]*")


class WireError(Exception):
    """What came is no answer, or not all of it."""


class TooLongError(WireError):
    """The answer is longer than any should be."""

    def __init__(self) -> None:
        super().__init__(TOO_LONG.sentence)


@dataclass(frozen=True, slots=True)
class Answer:
    """What S3 answered; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer begins with; `is_reusable` if another may come on the same connection."""

    status: int
    headers: Mapping[str, str]
    is_reusable: bool

    @property
    def is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    def body_size(self, *, is_head: bool) -> int | None:
        """How many bytes follow; None if only they themselves tell.

        Raises:
            WireError: the head does not make sense.
        """
        if is_head or self.status in (204, 304):
            return 0
        length = self.headers.get("content-length")
        if length is None or self.is_chunked:
            return None
        if not length.isdecimal() or len(length) > LONGEST_SIZE:
            raise WireError("what came is no answer")
        return int(length)


def read_head(text: bytes) -> AnswerHead:
    """What the lines before an answer's body tell.

    Raises:
        WireError: they are no such lines.
    """
    first, *lines = text.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    if not protocol.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdigit()):
        raise WireError("what came is no answer")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError("what came is no answer")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    is_reusable = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return AnswerHead(int(rest[:3]), headers, is_reusable)


class Arrived:
    """The bytes of a connection that have come and were not taken yet. All raise `WireError`."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._data = bytearray(data)

    @property
    def is_empty(self) -> bool:
        """True if nothing more has come."""
        return not self._data

    def until(self, mark: bytes) -> Parsing[bytes]:
        """What comes before `mark`, within MOST_HEADERS bytes; it is taken away too."""
        looked = 0
        while (found := self._data.find(mark, looked)) < 0:
            if len(self._data) > MOST_HEADERS:
                raise WireError("what came is no answer")
            looked = max(0, len(self._data) - len(mark) + 1)
            yield from self._more()
        return self._take(found, len(mark))

    def exactly(self, size: int) -> Parsing[bytes]:
        """The next `size` bytes."""
        while len(self._data) < size:
            yield from self._more()
        return self._take(size)

    def chunks(self, most: int) -> Parsing[bytes]:
        """A body in chunks, of `most` bytes at most, and the lines behind it."""
        content = bytearray()
        while True:
            line = (yield from self.until(b"\r\n")).partition(b";")[0]
            if not _CHUNK_SIZE.fullmatch(line):
                raise WireError("what came is no answer")
            size = int(line, 16)
            if not size:
                break
            if len(content) + size > most:
                raise TooLongError
            content += yield from self.exactly(size)
            yield from self.exactly(2)
        left = MOST_HEADERS
        while line := (yield from self.until(b"\r\n")):
            left -= len(line) + 2
            if left < 0:
                raise TooLongError
        return bytes(content)

    def rest(self, most: int) -> Parsing[bytes]:
        """Everything until the server closes the connection, `most` bytes at most."""
        while len(self._data) <= most:
            piece = yield
            if not piece:
                return self.buffered()
            self._data += piece
        raise TooLongError

    def buffered(self) -> bytes:
        """The bytes that have come already."""
        return self._take(len(self._data))

    def _take(self, size: int, mark: int = 0) -> bytes:
        taken = bytes(memoryview(self._data)[:size])
        del self._data[: size + mark]  # which moves nothing
        return taken

    def _more(self) -> Parsing[None]:
        piece = yield
        if not piece:
            raise WireError("the answer broke off")
        self._data += piece


def answer(
    arrived: Arrived, *, is_head: bool, most: int = MOST_CONTENT
) -> Parsing[tuple[Answer, bool]]:
    """An answer, and whether another may come on the same connection."""
    head = yield from final_head(arrived)
    return (yield from whole(arrived, head, is_head=is_head, most=most))


def final_head(arrived: Arrived) -> Parsing[AnswerHead]:
    """The head of the answer that no other follows."""
    for _ in range(MOST_INTERIM + 1):
        head = read_head((yield from arrived.until(b"\r\n\r\n")))
        if head.status >= 200:
            first_byte()
            return head
    raise WireError("the server says again and again that an answer will come")


def whole(
    arrived: Arrived, head: AnswerHead, *, is_head: bool, most: int = MOST_CONTENT
) -> Parsing[tuple[Answer, bool]]:
    """The answer with this head, and whether another may come on the same connection.

    Raises:
        TooLongError: it has more than `most` bytes. A failure is what its status says.
    """
    size = head.body_size(is_head=is_head)
    is_failure = head.status >= 300
    most = min(most, MOST_ERROR) if is_failure else most
    try:
        if size is not None and size > most:
            raise TooLongError
        if size is not None:
            content = yield from arrived.exactly(size)
        elif head.is_chunked:
            content = yield from arrived.chunks(most)
        else:
            content = yield from arrived.rest(most)
            return Answer(head.status, head.headers, content), False
    except TooLongError:
        if not is_failure:
            raise
        return Answer(head.status, head.headers, b""), False
    return Answer(head.status, head.headers, content), head.is_reusable and arrived.is_empty


def parse(parsing: Parsing[T], receive: Callable[[], bytes]) -> T:
    """Run a generator with what `receive` returns, which may block.

    Raises:
        WireError: what came is no answer.
        Exception: whatever `receive` raises.
    """
    try:
        next(parsing)
        while True:
            parsing.send(receive())
    except StopIteration as end:
        return cast(T, end.value)
