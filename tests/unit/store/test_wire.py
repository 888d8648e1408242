"""Requests that are signed and sent without botocore: the signatures, and which answers count."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from botocore import UNSIGNED, auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import HTTPClientError
from botocore.session import Session

from fusefs.store.errors import AttemptError, translate
from fusefs.store.http import async_exchange
from fusefs.store.http import exchange as exchange_module
from fusefs.store.http.answers import MOST_CONTENT, MOST_ERROR, MOST_HEADERS, Answer, WireError
from fusefs.store.http.exchange import (
    LEAST_RATE,
    SMALL,
    LeastProgress,
    RequestBody,
    download,
    exchange,
)
from fusefs.store.http.pool import BorrowedConnection, ConnectionPool, Network
from fusefs.store.http.proxies import Proxies, make_client
from fusefs.store.http.sigv4 import Signer
from fusefs.store.s3.head import parse_head

HOST = "store.example:8333"
HEAD = b"GET /bucket HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("token", [None, "a token"])
@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "has_body"),
    [
        ("HEAD", "/bucket/a%20b/%C3%A4~", "", {}, False),
        ("GET", "/", "delimiter=%2F&list-type=2&prefix=a%2Bb%20c", {"user-agent": "x"}, False),
        ("PUT", "/bucket/key", "", {"x-amz-meta-a": "two  blanks "}, False),
        ("PUT", "/bucket/key", "partNumber=1&uploadId=u", {"expect": "100-continue"}, True),
    ],
)
def test_signatures_are_botocores(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    query: str,
    headers: dict[str, str],
    has_body: bool,
    token: str | None,
) -> None:
    credentials = ReadOnlyCredentials("access", "secret", token)
    signed = Signer("eu-west-1", "s3").sign(
        method, path, query, {"host": HOST, **headers}, credentials, has_body=has_body
    )
    moment = datetime.datetime.strptime(signed["x-amz-date"], "%Y%m%dT%H%M%SZ")
    monkeypatch.setattr(auth, "get_current_datetime", lambda: moment)
    url = f"http://{HOST}{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method, url, headers)
    # As it does where the payload's hash is left out.
    request.context["client_config"] = type(
        "Config", (), {"s3": {"payload_signing_enabled": not has_body}}
    )
    auth.S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)
    theirs = {name.lower(): value for name, value in request.headers.items()}
    assert signed == {"host": HOST, **theirs}


class Server:
    """A server that answers one request on each of its connections as the test says, and a pool."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pool = pool_of(f"http://127.0.0.1:{self.listener.getsockname()[1]}")
        self.accepted: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def is_idle(self) -> bool:
        """Whether the pool has a connection that can be used again."""
        sock = self.pool.take_idle()
        if sock is not None:
            self.pool.give_back(BorrowedConnection(sock, is_reusable=True))
        return sock is not None

    def answer(self, *pieces: bytes, ends: bool = False) -> None:
        """Answer the next request, some bytes at a time, on a new connection if there is none."""

        def work() -> None:
            if not self.accepted:
                self.accepted.append(self.listener.accept()[0])
            sock = self.accepted[-1]
            sock.recv(1 << 16)
            for piece in pieces:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(piece)
            if ends:
                sock.close()

        self.run(work)

    def run(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self.pool.close()
        self.join()
        for sock in (*self.accepted, self.listener):
            sock.close()


def pool_of(origin: str) -> ConnectionPool:
    pool = Network(Proxies.of({}), None, 10, 10, 2).pool(origin)
    assert pool is not None
    return pool


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def ask(server: Server, *, is_head: bool = False, body: RequestBody | None = None) -> Answer:
    with server.pool.connection() as connection:
        answer, connection.is_reusable = exchange(connection.sock, HEAD, body, is_head=is_head)
    server.join()
    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody",),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 4\r\n\r", b"\nbo", b"dy"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\ncontent-length:4\r\n\r\nbody",),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n",
            b"3;x=y\r\nody\r\n0\r\nA: b\r\n\r\n",
        ),
    ],
)
def test_an_answer_is_read_to_its_end_and_the_connection_serves_again(
    server: Server, pieces: tuple[bytes, ...]
) -> None:
    for _ in range(2):
        server.answer(*pieces)
        answer = ask(server)
        assert (answer.status, answer.content) == (200, b"body")
    assert server.is_idle


def test_what_ends_with_the_connection_is_whole(server: Server) -> None:
    server.answer(b"HTTP/1.1 200 OK\r\nETag: x\r\n\r\nbo", b"dy", ends=True)
    answer = ask(server)
    assert (answer.content, answer.headers) == (b"body", {"etag": "x"})
    assert not server.is_idle


def test_the_answer_to_a_head_has_no_body(server: Server) -> None:
    server.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX: a\r\nx: b\r\n\r\n")
    assert ask(server, is_head=True).headers == {"content-length": "4", "x": "a, b"}
    assert server.is_idle


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more",
    ],
)
def test_a_connection_that_cannot_be_trusted_is_closed(server: Server, answer: bytes) -> None:
    server.answer(answer)
    assert ask(server).content == b"body"
    assert not server.is_idle


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbo",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4x\r\n\r\nbody",
        b"+OK ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nbody\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nbody\r\n0\r\n\r\n",
        b"HTTP/1.1 twohundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
    ],
)
def test_half_an_answer_is_none(server: Server, answer: bytes) -> None:
    server.answer(answer, ends=True)
    with pytest.raises((WireError, ConnectionError)):
        ask(server)
    assert not server.is_idle


@pytest.mark.parametrize("length", ["-1", str(1 << 63), "9" * 5000])
def test_no_object_has_a_size_that_is_none(length: str) -> None:
    headers = {"last-modified": "Mon, 23 Nov 2026 10:00:00 GMT", "etag": '"e"'}
    with pytest.raises(AttemptError):
        parse_head("key", {**headers, "content-length": length})


def test_an_endless_header_is_given_up(server: Server) -> None:
    server.answer(b"HTTP/1.1 200 OK\r\nX: ", b"x" * (1 << 19), ends=True)
    with pytest.raises(WireError):
        ask(server)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n",
        CHUNKED + b"3b9aca00\r\n",
        CHUNKED + b"".join([b"10000\r\n" + bytes(65536) + b"\r\n"] * 257),
        CHUNKED + b"0\r\n" + b"A: b\r\n" * (MOST_HEADERS // 6 + 1),
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MOST_CONTENT + 1),
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 11,
    ],
    ids=["length", "chunk", "chunks", "trailers", "to the end", "interim"],
)
def test_an_answer_without_measure_is_given_up(server: Server, answer: bytes) -> None:
    server.answer(answer)
    with pytest.raises(WireError, match=r"longer than any|again and again"):
        ask(server)
    assert not server.is_idle


def test_botocore_reads_no_answer_without_measure(server: Server) -> None:
    def make(parameters: dict[str, Any]) -> Any:
        config = Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}, **parameters)
        url = f"http://127.0.0.1:{server.listener.getsockname()[1]}"
        return Session().create_client("s3", "us-east-1", endpoint_url=url, config=config)

    client = make_client(make, Proxies.of({}), None)
    server.answer(b"HTTP/1.1 200 OK\r\n\r\n", bytes(MOST_CONTENT + (1 << 17)))
    with pytest.raises(HTTPClientError) as raised:
        client.list_objects_v2(Bucket="bucket")
    assert "longer than any" in translate(raised.value).sentence
    server.join()


def test_a_failure_without_measure_is_what_its_status_says(server: Server) -> None:
    server.answer(b"HTTP/1.1 404 Not Found\r\n\r\n" + bytes(MOST_ERROR + 1))
    answer = ask(server)
    assert (answer.status, answer.content, server.is_idle) == (404, b"", False)


async def test_in_the_event_loop_a_chunked_answer_is_parsed_as_it_comes(server: Server) -> None:
    await trio.to_thread.run_sync(server.pool.open_idle)
    server.answer(CHUNKED, *[b"4\r\nbody\r\n"] * 25, b"0\r\n\r\n")
    answer = await async_exchange.exchange(server.pool, HEAD, b"", is_head=False, size=100)
    assert answer is not None
    assert answer.content == b"body" * 25
    assert server.is_idle


def test_a_connection_that_the_server_has_closed_is_not_used_again(server: Server) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"
    server.answer(answer)
    ask(server)
    assert server.is_idle
    server.accepted.pop().close()
    while server.is_idle:
        time.sleep(0.01)  # until the kernel has passed it on
    server.answer(answer)
    assert ask(server).content == b"body"


def test_no_more_connections_are_kept_than_the_setting_says(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.pool.connection()).is_reusable = True
    assert [server.pool.take_idle() is None for _ in range(3)] == [False, False, True]


def test_a_closed_pool_keeps_no_connection(server: Server) -> None:
    with server.pool.connection() as connection:
        server.pool.close()
        connection.is_reusable = True
    assert not server.is_idle
    assert connection.sock.fileno() == -1


class Body:
    """A body of three pieces."""

    def __init__(self) -> None:
        self.is_read = False
        self._pieces: Iterator[memoryview] = iter(())

    def __len__(self) -> int:
        return 3 * SMALL

    def seek(self, offset: int) -> None:
        assert offset == 0
        self._pieces = iter([memoryview(bytes(SMALL))] * 3)

    def whole(self) -> bytes:
        raise AssertionError("it is large")

    def read(self, _size: int = -1) -> memoryview:
        self.is_read = True
        return next(self._pieces, memoryview(b""))


@pytest.mark.parametrize("says_continue", [True, False])
def test_a_large_body_is_sent_once_the_server_wants_it_or_after_a_second(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, says_continue: bool
) -> None:
    monkeypatch.setattr(exchange_module, "CONTINUE_WAIT_S", 10.0 if says_continue else 0.05)
    got = []

    def serve() -> None:
        sock = server.listener.accept()[0]
        server.accepted.append(sock)
        assert sock.recv(len(HEAD)) == HEAD
        if says_continue:
            sock.sendall(b"HTTP/1.1 100 Continue\r\nServer: x\r\n\r\n")
        got.append(len(sock.recv(3 * SMALL, socket.MSG_WAITALL)))
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    server.run(serve)
    assert ask(server, body=Body()).status == 200
    assert got == [3 * SMALL]
    assert server.is_idle


def test_a_large_body_that_the_server_refuses_is_not_read(server: Server) -> None:
    server.answer(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
    body = Body()
    answer = ask(server, body=body)
    assert (answer.status, answer.content, body.is_read) == (403, b"no", False)
    assert not server.is_idle


def test_success_before_the_body_was_sent_is_no_answer(server: Server) -> None:
    """It may be the late answer to another request: nothing says that the body arrived."""
    server.answer(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')
    with pytest.raises(WireError, match="before the body was sent"):
        ask(server, body=Body())
    assert not server.is_idle


def test_a_connection_with_bytes_behind_a_download_is_closed(server: Server) -> None:
    server.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more")
    taken = bytearray()
    with server.pool.connection() as connection:
        answer, connection.is_reusable = download(
            connection.sock, HEAD, 4, lambda _headers: None, taken.extend
        )
    assert answer is not None
    assert (bytes(taken), server.is_idle) == (b"body", False)


@pytest.mark.parametrize("length", [1_000_000, 1 << 30, 3 << 30])
@pytest.mark.parametrize("status", ["200", "\u00b2\u00b2\u00b2"])
async def test_in_the_event_loop_what_was_not_requested_is_no_answer(
    server: Server, length: int, status: str
) -> None:
    head = f"HTTP/1.1 {status} OK\r\nContent-Length: {length}\r\n\r\n"
    await trio.to_thread.run_sync(server.pool.open_idle)
    server.answer(head.encode("latin-1") + bytes(1000))
    with trio.fail_after(10), pytest.raises(WireError):
        await async_exchange.exchange(server.pool, HEAD, b"", is_head=False, size=100)
    assert not server.is_idle


def trickle(server: Server, *begin: bytes) -> None:
    """Begin to answer the next request, and send a byte now and then until the client hangs up."""

    def work() -> None:
        sock = server.listener.accept()[0]
        server.accepted.append(sock)
        sock.recv(1 << 16)
        with contextlib.suppress(OSError):
            for piece in itertools.chain(begin, itertools.repeat(b"1")):
                sock.sendall(piece)
                time.sleep(0.005)

    server.run(work)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes too slowly is given up soon, and everything does."""
    monkeypatch.setattr(exchange_module, "LEAST_RATE", 1 << 40)
    monkeypatch.setattr(exchange_module, "PACE_WINDOW_S", 0.05)
    monkeypatch.setattr(exchange_module, "ANSWER_LIMIT_S", 0.1)


@pytest.mark.parametrize("head", [HEAD, b"PUT /bucket HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5000\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
    ids=["header", "length", "chunked", "to the end"],
)
@pytest.mark.usefixtures("impatient")
def test_an_answer_that_never_ends_is_given_up(server: Server, begin: bytes, head: bytes) -> None:
    trickle(server, begin)
    with pytest.raises(TimeoutError), server.pool.connection() as connection:
        exchange(connection.sock, head, None, is_head=False)


@pytest.mark.usefixtures("impatient")
def test_a_download_that_never_ends_is_given_up_with_what_has_come(server: Server) -> None:
    trickle(server, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    taken = bytearray()
    with server.pool.connection() as connection:
        connection.sock.settimeout(0.03)
        connection.is_reusable = True
    with pytest.raises(TimeoutError), server.pool.connection() as connection:
        download(connection.sock, HEAD, 100_000, lambda _headers: None, taken.extend)
    assert taken


@pytest.mark.usefixtures("impatient")
def test_a_body_that_the_server_hardly_takes_is_given_up(server: Server) -> None:
    def serve() -> None:
        sock = server.listener.accept()[0]
        server.accepted.append(sock)
        sock.recv(len(HEAD))
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                time.sleep(0.005)

    server.run(serve)
    endless = Body()
    endless.read = lambda _size=-1: memoryview(bytes(SMALL))  # type: ignore[method-assign]
    with pytest.raises(TimeoutError), server.pool.connection() as connection:
        exchange(connection.sock, HEAD, endless, is_head=False)


def test_a_slow_network_is_no_endless_answer() -> None:
    pace = LeastProgress(window_s=30.0)
    for _ in range(90):
        pace.note(1.0, LEAST_RATE)
    for _ in range(29):
        pace.note(1.0, 0)
    with pytest.raises(TimeoutError):
        pace.note(1.0, LEAST_RATE)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is stopped for hours whenever it waits for a connection."""
    clock = itertools.count(0.0, 36_000.0)
    monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def accept(server: Server) -> socket.socket:
    """The connection of the next request, which has been read."""
    server.accepted.append(server.listener.accept()[0])
    server.accepted[-1].recv(1 << 16)
    return server.accepted[-1]


@pytest.mark.parametrize("is_download", [False, True])
@pytest.mark.usefixtures("stopped")
def test_an_answer_is_not_given_up_because_this_process_was_stopped(
    server: Server, is_download: bool
) -> None:
    def serve() -> None:
        sock = accept(server)
        with contextlib.suppress(OSError):
            for piece in (b"HTTP/1.1 200 OK\r\nContent-", b"Length: 4\r\n\r\nb", b"ody"):
                sock.sendall(piece)
                time.sleep(0.05)  # so that the rest is waited for

    server.run(serve)
    taken = bytearray()
    if is_download:
        with server.pool.connection() as connection:
            download(connection.sock, HEAD, 4, lambda _headers: None, taken.extend)
    else:
        taken.extend(ask(server).content)
    assert taken == b"body"


@pytest.mark.usefixtures("stopped")
def test_a_body_goes_on_after_this_process_was_stopped(server: Server) -> None:
    def serve() -> None:
        sock = accept(server)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        received = 0
        while received < 3 * SMALL and (piece := sock.recv(1 << 16)):
            received += len(piece)
        with contextlib.suppress(OSError):
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    server.run(serve)
    assert ask(server, body=Body()).status == 200


@pytest.mark.usefixtures("impatient")
def test_an_answer_may_begin_late(server: Server) -> None:
    def serve() -> None:
        sock = server.listener.accept()[0]
        server.accepted.append(sock)
        sock.recv(1 << 16)
        time.sleep(2 * exchange_module.PACE_WINDOW_S)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody")

    server.run(serve)
    assert ask(server).content == b"body"


def test_idle_connections_that_the_network_may_have_lost_are_closed(server: Server) -> None:
    with server.pool.connection() as first, server.pool.connection() as second:
        first.is_reusable = second.is_reusable = True
    server.pool.close_idle()
    assert [first.sock.fileno(), second.sock.fileno(), server.is_idle] == [-1, -1, False]
    with server.pool.connection() as connection:
        connection.is_reusable = True
    assert server.is_idle


def test_who_connects_without_a_listener_learns_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        pytest.raises(AttemptError, match="connection refused") as raised,
        pool_of(origin).connection(),
    ):
        pass
    assert raised.value.failure.is_retryable


def test_a_proxy_over_tls_is_left_to_boto3() -> None:
    proxies = Proxies.of({"HTTPS_PROXY": "https://proxy.example.org:3128"})
    assert Network(proxies, None, 10, 10, 2).pool("https://s3.example.org") is None
