"""Requests that are signed and sent without botocore: the signatures, and which answers count."""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from fusefs.store.http.exchange import Answer, WireError, exchange
from fusefs.store.http.sigv4 import Signer

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
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, query: str,
    headers: dict[str, str], has_body: bool, token: str | None,
) -> None:  # fmt: skip
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


@dataclass
class Connection:
    """One of urllib3's connections, as far as it is used."""

    sock: socket.socket
    is_connected: bool = True

    def close(self) -> None:
        self.is_connected = False
        self.sock.close()


class Pool:
    """A pool of one connection, whose other end is `server`."""

    def __init__(self) -> None:
        self.server, client = socket.socketpair()
        client.settimeout(10)
        self.connection = Connection(client)
        self.pool: queue.LifoQueue[Connection] = queue.LifoQueue()
        self._put_conn = self.pool.put
        self.pool.put(self.connection)

    def answer(self, *pieces: bytes, ends: bool = False) -> None:
        """Answer the next request, some bytes at a time."""

        def work() -> None:
            self.server.recv(1 << 16)
            for piece in pieces:
                with contextlib.suppress(ConnectionError):
                    self.server.sendall(piece)
            if ends:
                self.server.close()

        self.thread = threading.Thread(target=work)
        self.thread.start()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.connection.close()
    pool.thread.join()
    pool.server.close()


def ask(pool: Pool, *, is_head: bool = False) -> Answer:
    answer = exchange(pool, HEAD, b"", is_head=is_head)
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody",),
        (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 4\r\n\r", b"\nbo", b"dy"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\ncontent-length:4\r\n\r\nbody",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n",
         b"3;x=y\r\nody\r\n0\r\nA: b\r\n\r\n"),
    ],
)  # fmt: skip
def test_an_answer_is_read_to_its_end_and_the_connection_serves_again(
    pool: Pool, pieces: tuple[bytes, ...]
) -> None:
    for _ in range(2):
        pool.answer(*pieces)
        answer = ask(pool)
        assert (answer.status, answer.content) == (200, b"body")
        pool.thread.join()
    assert pool.connection.is_connected


def test_what_ends_with_the_connection_is_whole(pool: Pool) -> None:
    pool.answer(b"HTTP/1.1 200 OK\r\nETag: x\r\n\r\nbo", b"dy", ends=True)
    answer = ask(pool)
    assert (answer.content, answer.headers) == (b"body", {"etag": "x"})
    assert not pool.connection.is_connected


def test_the_answer_to_a_head_has_no_body(pool: Pool) -> None:
    pool.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX: a\r\nx: b\r\n\r\n")
    assert ask(pool, is_head=True).headers == {"content-length": "4", "x": "a, b"}
    assert pool.connection.is_connected


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more",
    ],
)
def test_a_connection_that_cannot_be_trusted_is_closed(pool: Pool, answer: bytes) -> None:
    pool.answer(answer)
    assert ask(pool).content == b"body"
    assert not pool.connection.is_connected


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbo", b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4x\r\n\r\nbody", b"+OK ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nbody\r\n",
        b"HTTP/1.1 twohundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
    ],
)  # fmt: skip
def test_half_an_answer_is_none(pool: Pool, answer: bytes) -> None:
    pool.answer(answer, ends=True)
    with pytest.raises((WireError, ConnectionError)):
        ask(pool)
    assert not pool.connection.is_connected


def test_an_endless_header_is_given_up(pool: Pool) -> None:
    pool.answer(b"HTTP/1.1 200 OK\r\nX: ", b"x" * (1 << 19), ends=True)
    with pytest.raises(WireError):
        ask(pool)


def test_without_an_open_connection_nothing_is_sent(pool: Pool) -> None:
    pool.connection.is_connected = False
    pool.answer()
    assert exchange(pool, HEAD, b"", is_head=False) is None
    assert pool.pool.qsize() == 1
