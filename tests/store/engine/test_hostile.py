"""Servers that break the protocol: nothing outside of a sink's range, and the right error."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from zlib import crc32

import pytest
import trio

from fusefs.store.engine.engine import (
    Completion,
    Deadlines,
    Engine,
    FileSink,
    MemorySink,
    Request,
    Sums,
)
from tests.support.servers.scripted import RESET, Received, answer, scripted_server

# A file of GUARDs, of which the sink is [BEFORE, BEFORE + len(BODY)).
BEFORE, AFTER = 7, 5000
GUARD = b"\xaa"
BODY = bytes(range(100)) * 30
START = 1000
SIZE = START + len(BODY) + 1
RANGE = f"bytes {START}-{START + len(BODY) - 1}/{SIZE}"
GOOD = answer(BODY, "206 Partial Content", content_range=RANGE, etag='"one"')
HEAD = len(GOOD) - len(BODY)
DEADLINES = Deadlines(connect_s=5, silence_s=2, total_s=10)


class Guarded:
    """A sink between bytes that must not change."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.sums: Sums = []
        os.write(self.fd, GUARD * (BEFORE + len(BODY) + AFTER))

    async def receive(self, engine: Engine, url: str) -> Completion:
        """Send a GET of the range; see that only bytes that were received are in the file."""
        sink = FileSink(self.fd, BEFORE, START, len(BODY), '"one"', SIZE, sums=True)
        request = Request("GET", url, sink=sink, deadlines=DEADLINES)
        with trio.fail_after(30):
            completion = await engine.send(request, lambda _, sums: self.sums.extend(sums))
        content = os.pread(self.fd, 1 << 20, 0)
        os.close(self.fd)
        received = completion.received if completion.status == 206 else 0
        assert content[:BEFORE] == GUARD * BEFORE
        assert content[BEFORE + received :] == GUARD * (len(BODY) - received + AFTER)
        covered = [(BEFORE, BEFORE + received, crc32(content[BEFORE : BEFORE + received]))]
        assert self.sums == (covered if received else [])
        self.content = content[BEFORE : BEFORE + received]
        return completion


async def in_parallel(tasks: Iterable[Callable[[], object]]) -> None:
    limiter = trio.CapacityLimiter(32)

    async def run(task: Callable[[], object]) -> None:
        async with limiter:
            await task()  # type: ignore[misc]

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(run, task)


@pytest.mark.parametrize("end", [RESET, b""])
async def test_an_answer_that_ends_at_any_byte(engine: Engine, tmp_path: Path, end: bytes) -> None:
    def cut(request: Received) -> list[bytes]:
        return [GOOD[: int(request.line.split()[1][1:])], end]

    async def receive(position: int) -> None:
        guarded = Guarded(tmp_path / str(position))
        completion = await guarded.receive(engine, f"{server.url}/{position}")
        assert BODY.startswith(guarded.content)
        assert completion.status == (206 if position >= HEAD else 0) or end == RESET
        if position == 0 or end == RESET:
            assert completion.error in ("reset", "short")
        elif position < HEAD:
            assert completion.error in ("reset", "protocol"), position
        else:
            assert completion.error == "short"
            assert completion.received == position - HEAD

    with scripted_server(cut) as server:
        positions = [*range(HEAD + 3), *range(HEAD + 100, len(GOOD), 300), len(GOOD) - 1]
        await in_parallel(partial(receive, one) for one in positions)


def in_chunks(body: bytes, size: int) -> bytes:
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)


CHUNKED = (
    f"HTTP/1.1 206 P\r\nETag: one\r\nContent-Range: {RANGE}\r\nTransfer-Encoding: chunked\r\n\r\n"
).encode()
TRAILERS = b"".join(b"x-amz-%d: %b\r\n" % (i, b"v" * 1000) for i in range(20))


@pytest.mark.parametrize("trailers", [b"", TRAILERS, b"etag: two\r\n"])
async def test_chunks_of_a_byte(engine: Engine, tmp_path: Path, trailers: bytes) -> None:
    def script(_: Received) -> Iterator[bytes]:
        whole = CHUNKED + in_chunks(BODY, 1) + b"0\r\n" + trailers + b"\r\n"
        yield whole[:-4000]
        for byte in whole[-4000:]:
            yield bytes([byte])

    with scripted_server(script) as server:
        guarded = Guarded(tmp_path / "sink")
        completion = await guarded.receive(engine, server.url)
    assert (completion.status, completion.error) == (206, None)
    assert guarded.content == BODY
    assert completion.headers["etag"] == "one"


def endless(start: bytes, more: bytes) -> Iterator[bytes]:
    yield start
    while True:
        yield more * max(1, 20000 // len(more))


OK = b"HTTP/1.1 206 P\r\n"
ENDLESS = {
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "1xx with headers": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"),
    "101": (b"", b"HTTP/1.1 101 Switching Protocols\r\nupgrade: a\r\n\r\n"),
    "headers": (OK, b"a: b\r\n"),
    "one header": (OK + b"a:", b"b"),
    "a folded header": (OK + b"a: b\r\n", b" c\r\n"),
    "a name": (OK, b"a"),
    "a status line": (b"HTTP/1.1 206 ", b"P"),
    "status lines": (b"", b"HTTP/1.1 206 P\r\n"),
    "zeros": (b"", b"\0"),
    "empty lines": (b"", b"\r\n"),
    "no HTTP": (b"", b"220 smtp ESMTP ready\r\n"),
    "HTTP/2": (b"", b"HTTP/2 206\r\n"),
    "a body": (GOOD[: HEAD - 2] + b"\r\n", b"x"),
    "a body without length": (
        GOOD[: HEAD - 2].replace(b"Content-Length", b"X-Length") + b"\r\n",
        b"x",
    ),
    "chunks": (CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    "a chunk": (CHUNKED + b"7fffffffffffffff\r\n", b"x"),
    "the size of a chunk": (CHUNKED, b"0"),
    "an extension of a chunk": (CHUNKED + b"1;", b"x"),
    "trailers": (CHUNKED + in_chunks(BODY, 3000) + b"0\r\n", b"a: b\r\n"),
    "a trailer": (CHUNKED + in_chunks(BODY, 3000) + b"0\r\na: ", b"b"),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_endless_answers_end(engine: Engine, tmp_path: Path, kind: str) -> None:
    with scripted_server(lambda _: endless(*ENDLESS[kind])) as server:
        guarded = Guarded(tmp_path / "sink")
        completion = await guarded.receive(engine, server.url)
        if kind == "a body":  # what comes after its length is no part of it
            assert (completion.error, completion.received) == (None, len(BODY))
        else:
            assert completion.error in (
                "malformed",
                "protocol",
                "reset",
                "range",
                "timeout",
                "etag",
            )


ODD = [
    b"HTTP/1.1 206 P\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 206 P\r\nContent-Length: 99999999999999999999\r\n\r\n",
    GOOD.replace(b"Content-Length: 3000", b"Content-Length: 2999"),
    GOOD.replace(b"1000-3999", b"1000-3998"),
    GOOD.replace(b"1000-3999", b"1000-3998").replace(b": 3000", b": 2999"),
    GOOD.replace(b"1000-3999", b"1000-999"),
    GOOD.replace(b"Content-Length: 3000", b"Content-Length: 3000\r\nContent-Length: 5"),
    GOOD.replace(b"etag", b"etag \0"),
    GOOD.replace(b"Content-Length: 3000", b"Content-Length: 3001") + b"y",
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/1.1 99999"),
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/1.1 0"),
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/1.1 -206"),
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/1.1 "),
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/1.1 204"),
    GOOD.replace(b"HTTP/1.1 206", b"HTTP/9.9 206"),
    GOOD.replace(b"1000-3999", b"1000-3999999999999999999999"),
    GOOD.replace(b"1000-3999", b"1000-9223372036854775807"),
    GOOD.replace(b"1000-3999", b"-9223372036854775808-3999"),
    GOOD.replace(b"/4001", b"/99999999999999999999"),
    GOOD.replace(b"bytes ", b"bytes"),
    GOOD.replace(b"Content-Length", b"Content-Encoding: gzip\r\nContent-Length"),
    GOOD.replace(b"Content-Length", b"Transfer-Encoding: gzip\r\nContent-Length"),
    CHUNKED + b"-1\r\n",
    CHUNKED + b"ffffffffffffffff\r\n" + BODY,
    CHUNKED + b"xyz\r\n" + BODY,
    CHUNKED + in_chunks(BODY + b"more", 100) + b"0\r\n\r\n",
    CHUNKED + in_chunks(BODY[:-1], 100) + b"0\r\n\r\n",
    CHUNKED.replace(b"chunked", b"chunked, gzip") + BODY,
]


@pytest.mark.parametrize("number", range(len(ODD)))
async def test_odd_answers(engine: Engine, tmp_path: Path, number: int) -> None:
    with scripted_server(lambda _: [ODD[number], b""]) as server:
        guarded = Guarded(tmp_path / "sink")
        completion = await guarded.receive(engine, server.url)
    if completion.error is None and completion.status == 206:
        assert guarded.content == BODY


async def test_answers_with_bytes_changed_at_random(engine: Engine, tmp_path: Path) -> None:
    async def receive(number: int) -> None:
        guarded = Guarded(tmp_path / str(number))
        completion = await guarded.receive(engine, f"{server.url}/{number}")
        if completion.error is None and completion.status == 206:
            assert completion.received == len(BODY)

    def changed(request: Received) -> list[bytes]:
        source = random.Random(request.line)
        whole = bytearray(source.choice([GOOD, CHUNKED + in_chunks(BODY, 500) + b"0\r\n\r\n"]))
        for _ in range(source.randint(1, 4)):
            at = source.randrange(min(len(whole), 250))
            whole[at : at + source.randint(0, 3)] = source.randbytes(source.randint(0, 4))
        return [bytes(whole), b""]

    with scripted_server(changed) as server:
        await in_parallel(partial(receive, one) for one in range(400))


async def test_a_body_in_memory_has_no_more_than_its_limit(engine: Engine) -> None:
    for start, more in (ENDLESS["a body without length"], ENDLESS["chunks"]):
        with scripted_server(lambda _, parts=(start, more): endless(*parts)) as server:  # type: ignore[misc]
            request = Request("GET", server.url, sink=MemorySink(100_000))
            completion = await engine.send(request)
        assert (completion.error, completion.body) == ("too-large", b"")


async def test_a_refusal_stands_though_its_document_broke_off(engine: Engine) -> None:
    head = b"HTTP/1.1 403 No\r\nContent-Length: 5000000\r\n\r\n"
    for end in ([b"<Error>", RESET], [b"<Error>", b""], [b"x" * 5_000_000]):
        with scripted_server(lambda _, end=end: [head, *end]) as server:  # type: ignore[misc]
            completion = await engine.send(Request("GET", server.url))
        assert (completion.status, completion.error) == (403, None)
        assert completion.body in (b"<Error>", b"")


async def test_a_refusal_of_an_upload_that_is_under_way_stands(engine: Engine) -> None:
    refused = 0
    with scripted_server(lambda _: [answer(b"<Error/>", "403 No"), b""]) as server:
        server.reads_bodies = False
        for _ in range(10):
            request = Request("PUT", server.url, body=bytes(20 << 20))
            completion = await engine.send(request)
            assert completion.status == 403 or completion.error == "reset"
            refused += completion.status == 403
    assert refused
