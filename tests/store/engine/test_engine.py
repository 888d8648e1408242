"""The engine: requests, sinks, bodies, deadlines, cancellation and errors by name."""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.cache.integrity.checksums import sums_of
from fusefs.store.engine.engine import (
    Completion,
    Deadlines,
    Engine,
    FileBody,
    FileSink,
    MemorySink,
    Request,
    Sums,
    Transfer,
    open_engine,
)
from tests.support.servers.scripted import RESET, Received, Script, answer, scripted_server
from tests.support.waiting import eventually

BODY = os.urandom(3 << 20)
QUICK = Deadlines(connect_s=5, silence_s=0.3, least_rate=1000, window_s=0.3)


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "sink", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def ranged(request: Received) -> Iterable[bytes]:
    """Serve BODY, whole or a range of it."""
    if request.line.startswith("HEAD"):
        return [answer(BODY)[: -len(BODY)]]
    wanted = request.header("range")
    if wanted is None:
        return [answer(BODY, etag='"one"')]
    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
    shown = f"bytes {first}-{last}/{len(BODY)}"
    return [answer(BODY[first : last + 1], "206 Partial", content_range=shown, etag='"one"')]


async def exchanged(engine: Engine, script: Script, **request: object) -> Completion:
    """The completion of one request to a server with this script."""
    with scripted_server(script) as server:
        arguments = {"method": "GET", **request}
        return await engine.send(Request(url=f"{server.url}/key", **arguments))  # type: ignore[arg-type]


async def test_an_answer_comes_with_status_headers_and_body(engine: Engine) -> None:
    with scripted_server(lambda _: [answer(b"hello", "404 Not Found", ETag='"x"')]) as server:
        request = Request("GET", f"{server.url}/a/../b%2f?list-type=2", [("x-amz-a", "b")])
        completion = await engine.send(request)
    assert (completion.status, completion.body, completion.error) == (404, b"hello", None)
    assert completion.headers == {"content-length": "5", "etag": '"x"'}
    (received,) = server.requests
    assert (
        received.head
        == (
            f"GET /a/../b%2f?list-type=2 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            "x-amz-a: b\r\n"
        ).encode()
    )


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
async def test_a_body_is_sent_with_its_length_and_nothing_else(engine: Engine, method: str) -> None:
    with scripted_server(lambda _: [answer()]) as server:
        for body in (b"", b"abc", BODY):
            request = Request(method, f"{server.url}/k", [("content-type", "a/b")], body)
            assert (await engine.send(request)).status == 200
            received = server.requests.pop()
            assert received.body == body
            assert set(received.head.splitlines()[1:]) == {
                f"Host: 127.0.0.1:{server.port}".encode(),
                b"content-type: a/b",
                f"Content-Length: {len(body)}".encode(),
            }


async def test_a_body_is_sent_from_a_file(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(BODY)
    with scripted_server(lambda _: [answer()]) as server, (tmp_path / "body").open("rb") as file:
        request = Request("PUT", f"{server.url}/k", body=FileBody(file.fileno(), 100, 1 << 20))
        assert (await engine.send(request)).status == 200
        assert server.requests[0].body == BODY[100 : 100 + (1 << 20)]
        beyond = request._replace(body=FileBody(file.fileno(), 100, len(BODY)))
        completion = await engine.send(beyond)
    assert completion.error == "source-failed"


LENGTHS = [(0, 100), (5000, 1), (1000, 2 << 20), *((7, 56 + 9 * n) for n in range(20))]


@pytest.mark.parametrize(("start", "length"), LENGTHS)
async def test_a_range_goes_to_its_place_in_a_file(
    engine: Engine, sink: int, start: int, length: int
) -> None:
    shown: list[int] = []
    sums: Sums = []

    def on_progress(received: int, more: Sums) -> None:
        shown.append(received)
        sums.extend(more)

    with scripted_server(ranged) as server:
        request = Request(
            "GET",
            f"{server.url}/k",
            [("range", f"bytes={start}-{start + length - 1}")],
            sink=FileSink(sink, start, start, length, '"one"', len(BODY), sums=True),
            progress=1 << 20,
        )
        completion = await engine.send(request, on_progress)
    assert (completion.status, completion.received, completion.error) == (206, length, None)
    assert completion.body == b""
    assert os.pread(sink, len(BODY), 0) == bytes(start) + BODY[start : start + length]
    expected = sums_of(lambda size, at: memoryview(os.pread(sink, size, at)), start, start + length)
    assert sums == expected
    assert shown == sorted(shown)
    assert shown[-1] == length


async def test_the_first_bytes_of_a_whole_object_are_taken(engine: Engine, sink: int) -> None:
    completion = await exchanged(
        engine, lambda _: [answer(BODY)], sink=FileSink(sink, 10, 0, 100_000)
    )
    assert (completion.status, completion.received, completion.error) == (200, 100_000, None)
    assert os.pread(sink, len(BODY), 0) == bytes(10) + BODY[:100_000]


@pytest.mark.parametrize(
    ("headers", "status", "error"),
    [
        ({"etag": '"two"', "content_range": "bytes 10-19/100"}, "206 P", "etag"),
        ({"content_range": "bytes 10-19/100"}, "206 P", "etag"),
        ({"etag": '"one"', "content_range": "bytes 11-20/100"}, "206 P", "range"),
        ({"etag": '"one"', "content_range": "bytes 10-18/100"}, "206 P", "range"),
        ({"etag": '"one"', "content_range": "bytes 10-20/100"}, "206 P", "range"),
        ({"etag": '"ones"', "content_range": "bytes 10-19/100"}, "206 P", "etag"),
        ({"etag": '"on"', "content_range": "bytes 10-19/100"}, "206 P", "etag"),
        ({"etag": '"one"', "content_range": "bytes 10-19/101"}, "206 P", "size"),
        ({"etag": '"one"', "content_range": "items 10-19/100"}, "206 P", "range"),
        ({"etag": '"one"', "content_range": "bytes 10-99999999999999999999/100"}, "206 P", "range"),
        ({"etag": '"one"', "content_range": "bytes -1-19/100"}, "206 P", "range"),
        ({"etag": '"one"'}, "206 P", "range"),
        ({"etag": '"one"'}, "200 OK", "range"),
        ({"etag": '"one"'}, "203 Other", "protocol"),
        ({"etag": "one", "content_range": "bytes 10-19/100"}, "206 P", None),
        ({"etag": '"one"', "content_range": "bytes 10-19/*"}, "206 P", None),
    ],
)
async def test_an_answer_to_another_question_is_not_written(
    engine: Engine, sink: int, headers: dict[str, str], status: str, error: str | None
) -> None:
    completion = await exchanged(
        engine,
        lambda _: [answer(b"0123456789", status, **headers)],
        sink=FileSink(sink, 0, 10, 10, '"one"', 100),
    )
    assert completion.error == error
    assert os.fstat(sink).st_size == (0 if error else 10)
    assert completion.status == int(status[:3])


@pytest.mark.parametrize("shown", ["bytes 10-19/100", "bytes 10-14/100"])
async def test_a_range_that_ends_early_is_short(engine: Engine, sink: int, shown: str) -> None:
    completion = await exchanged(
        engine,
        lambda _: [answer(b"01234", "206 P", content_range=shown)],
        sink=FileSink(sink, 0, 10, 10, None, 100),
    )
    assert (completion.error, completion.received) == ("short", 5)
    assert os.pread(sink, 100, 0) == b"01234"


@pytest.mark.parametrize("size", [4, 6])
async def test_an_object_that_was_sent_unpacked_has_another_size(
    engine: Engine, sink: int, size: int
) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    completion = await exchanged(
        engine,
        lambda _: [head + b"5\r\n01234\r\n0\r\n\r\n"],
        sink=FileSink(sink, 0, 0, size, None, size),
    )
    assert completion.error == "size"


async def test_a_whole_object_of_another_size_is_not_written(engine: Engine, sink: int) -> None:
    completion = await exchanged(
        engine, lambda _: [answer(b"0123456789")], sink=FileSink(sink, 0, 0, 9, None, 9)
    )
    assert completion.error == "size"
    assert os.fstat(sink).st_size == 0


@pytest.mark.parametrize("head", ["Content-Length: 101", "A: b"])
async def test_more_than_the_limit_is_too_large(engine: Engine, head: str) -> None:
    script = [f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + b"a" * 101, b""]
    assert (await exchanged(engine, lambda _: script, sink=MemorySink(101))).body == b"a" * 101
    assert (await exchanged(engine, lambda _: script, sink=MemorySink(100))).error == "too-large"


async def test_the_document_of_an_error_comes_into_memory(engine: Engine, sink: int) -> None:
    completion = await exchanged(
        engine,
        lambda _: [answer(b"<Code>PreconditionFailed</Code>", "412 No")],
        sink=FileSink(sink, 0, 0, 5),
    )
    assert completion.body == b"<Code>PreconditionFailed</Code>"
    assert completion.error is None
    assert os.fstat(sink).st_size == 0


async def test_a_head_has_no_body(engine: Engine) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1234567890\r\n\r\n"
    completion = await exchanged(engine, lambda _: [head], method="HEAD")
    assert (completion.status, completion.error) == (200, None)
    assert completion.headers["content-length"] == "1234567890"


@pytest.mark.parametrize(
    ("path", "flags", "number"), [("/dev/full", os.O_RDWR, 28), ("/dev/null", os.O_RDONLY, 9)]
)
async def test_a_sink_that_fails_is_told_from_the_network(
    engine: Engine, path: str, flags: int, number: int
) -> None:
    fd = os.open(path, flags)
    completion = await exchanged(engine, ranged, sink=FileSink(fd, 0, 0, len(BODY)))
    os.close(fd)
    assert (completion.error, completion.errno) == ("sink-failed", number)


@pytest.mark.parametrize("end", ["taken", "left", "short", "no room"])
async def test_a_file_is_created_with_all_its_bytes_or_not_at_all(
    engine: Engine, tmp_path: Path, end: str
) -> None:
    path = tmp_path / "folder" / "new"
    if end == "no room":
        path.parent.touch()
    sink = FileSink(-1, 0, 0, 10, '"one"', 10, True, str(path))
    whole = answer(b"0123456789", etag='"one"')
    with scripted_server(lambda _: [whole[:-1], b""] if end == "short" else [whole]) as server:
        transfer = engine.submit(Request("GET", server.url, sink=sink, progress=1))
        completion = await transfer.completed()
    fd = transfer.take_file() if end != "left" else -1
    del transfer
    if end == "taken":
        assert (completion.error, completion.received) == (None, 10)
        assert path.read_bytes() == os.pread(fd, 100, 0) == b"0123456789"
        os.close(fd)
    else:
        assert fd == -1
        assert not path.exists()
        assert completion.error == {"left": None, "short": "short", "no room": "sink-failed"}[end]


def never(_: Received) -> Iterator[bytes]:
    time.sleep(2)
    yield answer()


def trickling(_: Received) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    while True:
        yield b"a"
        time.sleep(0.05)


@pytest.mark.parametrize(("script", "error"), [(never, "timeout"), (trickling, "low-speed")])
async def test_what_is_too_slow_is_given_up(engine: Engine, script: Script, error: str) -> None:
    began = time.monotonic()
    completion = await exchanged(engine, script, deadlines=QUICK)
    assert completion.error == error
    assert time.monotonic() - began >= 0.3


async def test_nobody_listens(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    completion = await engine.send(Request("GET", f"http://127.0.0.1:{port}/"))
    assert (completion.status, completion.error, completion.errno) == (0, "connect", 111)
    completion = await engine.send(Request("GET", "http://no-such-host.invalid/"))
    assert completion.error == "resolve"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("end", [RESET, b""])
async def test_an_answer_that_never_comes_leaves_the_outcome_open(
    engine: Engine, method: str, end: bytes
) -> None:
    completion = await exchanged(engine, lambda _: [end], method=method)
    assert (completion.status, completion.error) == (0, "reset")


async def test_a_change_is_not_repeated_on_another_connection(engine: Engine) -> None:
    """libcurl repeats what it has sent over a reused connection that then was closed."""
    with scripted_server(lambda one: [b"" if one.body else answer()]) as server:
        request = Request("PUT", f"{server.url}/k", body=b"")
        assert (await engine.send(request)).status == 200
        completion = await engine.send(request._replace(body=b"x"))
        assert (completion.status, completion.error) == (0, "reset")
        assert len(server.requests) == 2


async def test_connections_are_reused(engine: Engine) -> None:
    with scripted_server(ranged) as server:
        for _ in range(10):
            await engine.send(Request("HEAD", f"{server.url}/k"))
            await engine.send(Request("GET", f"{server.url}/k", sink=MemorySink(len(BODY))))
        assert server.connections == 1


async def test_headers_that_cannot_be_sent_are_refused(engine: Engine) -> None:
    for name, value in (("a", "b\r\nc: d"), ("a", "b\0"), ("a", "€")):
        with pytest.raises(ValueError):  # noqa: PT011
            await engine.send(Request("GET", "http://127.0.0.1:1/", [(name, value)]))
    with pytest.raises(ValueError):  # noqa: PT011
        await engine.send(Request("GET", "http://127.0.0.1:1/a b"))


async def test_a_cancelled_request_leaves_its_sink_alone(engine: Engine, sink: int) -> None:
    sent = threading.Event()

    def endless(_: Received) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while True:
            sent.set()
            yield bytes(65536)

    shown: list[int] = []
    with scripted_server(endless) as server:
        target = FileSink(sink, 0, 0, 1 << 40)
        request = Request("GET", f"{server.url}/k", sink=target, progress=1 << 18)
        transfer = engine.submit(request, lambda received, _: shown.append(received))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(transfer.completed)
                await eventually(lambda: bool(shown))
                scope.cancel()
    completion = transfer.completion
    assert completion.error == "cancelled"
    assert completion.received == os.fstat(sink).st_size == shown[-1] > 0


async def test_who_waits_for_a_transfer_can_be_woken_before_its_end(engine: Engine) -> None:
    gate = threading.Event()

    def gated(_: Received) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
        gate.wait(5)
        yield b"\r\nab"

    with scripted_server(gated) as server:
        transfer = engine.submit(Request("GET", server.url))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_look_up, transfer)
            assert await transfer.completed_or_slow() is None
        assert not transfer.has_begun
        gate.set()
        with trio.fail_after(5):
            await eventually(lambda: transfer.has_begun)
            assert (await transfer.completed()).body == b"ab"
        other = engine.submit(Request("GET", server.url))
        other.cancel()
        assert (await other.completed()).error == "cancelled"


async def _look_up(transfer: Transfer) -> None:
    transfer.look_up()


async def test_an_engine_that_ends_cancels_what_is_under_way() -> None:
    failed: list[BaseException] = []

    async def send(engine: Engine, url: str) -> None:
        try:
            await engine.send(Request("GET", url))
        except trio.ClosedResourceError as error:
            failed.append(error)

    with scripted_server(never) as server:
        async with trio.open_nursery() as nursery, open_engine(4) as engine:
            for _ in range(20):
                nursery.start_soon(send, engine, server.url)
            await trio.testing.wait_all_tasks_blocked()
    assert len(failed) == 20
    with pytest.raises(trio.ClosedResourceError):
        await engine.send(Request("GET", "http://127.0.0.1:1"))


async def _fail(engines: list[Engine], url: str) -> None:
    async with open_engine(4) as engine:
        engines.append(engine)
        engine.submit(Request("GET", url))
        raise KeyError("a") from OSError("why")


async def test_an_exception_of_the_block_ends_the_engine_and_is_no_group() -> None:
    engines: list[Engine] = []
    with scripted_server(never) as server:
        with pytest.raises(KeyError) as raised:
            await _fail(engines, server.url)
        assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(trio.ClosedResourceError):
            engines[0].submit(Request("GET", server.url))


async def test_an_engine_in_a_cancelled_scope_ends() -> None:
    with scripted_server(never) as server, trio.move_on_after(10) as limit:
        async with open_engine(4) as engine:
            engine.submit(Request("GET", server.url))
            limit.cancel()
            await engine.send(Request("GET", server.url))
    assert limit.cancelled_caught


async def test_an_engine_without_threads_starts_when_there_are_some(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = trio.lowlevel.start_thread_soon
    started: list[object] = []

    def start_two(*arguments: object) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(start(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(trio.lowlevel, "start_thread_soon", start_two)
        with pytest.raises(OSError, match="no threads"):
            engine.submit(Request("GET", "http://127.0.0.1:1/"))
    assert (await exchanged(engine, lambda _: [answer(b"")])).status == 200
