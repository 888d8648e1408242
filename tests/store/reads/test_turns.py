"""Long bodies over TLS are decrypted in turns, and leave the interpreter's lock between them."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.store.http import exchange, records
from fusefs.store.http.pool import ConnectionPool, Network
from fusefs.store.http.proxies import Proxies
from tests.support.servers.tls import tls_door

BODY = os.urandom(1 << 20)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY)
RECORD = 16 << 10
READERS = 6


@contextmanager
def connected(directory: Path, sent: int, *, ends: bool = False) -> Iterator[ConnectionPool]:
    """A pool of a server over TLS that answers with the first `sent` bytes of the body.

    It `ends` the connection after them.
    """

    def answer(client: socket.socket) -> None:
        with client:
            while client.recv(1 << 16):
                client.sendall(HEAD + BODY[:sent])
                if ends:
                    return

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with tls_door(address, directory) as door:
            network = Network(Proxies.of({}), str(door.authority), 5.0, 0.3, READERS)
            pool = network.pool(door.url)
            assert pool is not None
            yield pool
            pool.close()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read(pool: ConnectionPool) -> bytes:
    content = bytearray()
    with pool.connection() as connection:
        request = b"GET /key HTTP/1.1\r\n\r\n"
        _, connection.is_reusable = exchange.download(
            connection.sock, request, len(BODY), lambda _headers: None, content.extend
        )
        assert connection.sock.gettimeout() == 0.3
    return bytes(content)


def test_few_threads_decrypt_at_a_time_and_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_it: set[int] = set()
    most, pauses, contents = [0], [0.0], []
    monkeypatch.setattr(records, "turns", threading.Semaphore(1))
    monkeypatch.setattr(records.EventLoop, "requests", 1)
    decrypt = records._decrypt

    def watched(sock: ssl.SSLSocket, room: memoryview, *, pauses: bool) -> int | None:
        at_it.add(threading.get_ident())
        most[0] = max(most[0], len(at_it))
        try:
            return decrypt(sock, room, pauses=pauses)
        finally:
            at_it.remove(threading.get_ident())

    def pause(seconds: float) -> None:
        pauses[0] += 1
        time.sleep(seconds)

    monkeypatch.setattr(records, "_decrypt", watched)
    monkeypatch.setattr(records, "_pause", pause)
    with connected(tmp_path, len(BODY)) as pool:
        threads = [
            threading.Thread(target=lambda: contents.append(read(pool))) for _ in range(READERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert contents == [BODY] * READERS
        assert read(pool) == BODY  # over a connection that was used before
    assert most == [1]
    # As many as the longest turns have; short ones have none.
    assert pauses[0] <= (READERS + 1) * len(BODY) // RECORD / records.RECORDS


@pytest.mark.parametrize("sent", [0, 1000, RECORD, 300_000])
def test_a_silence_is_a_timeout(tmp_path: Path, sent: int) -> None:
    with connected(tmp_path, sent) as pool, pytest.raises(TimeoutError):
        read(pool)


@pytest.mark.parametrize("sent", [0, 1000, RECORD, 300_000])
def test_an_end_is_an_answer_that_broke_off(tmp_path: Path, sent: int) -> None:
    with (
        connected(tmp_path, sent, ends=True) as pool,
        pytest.raises(exchange.WireError, match="broke off"),
    ):
        read(pool)
