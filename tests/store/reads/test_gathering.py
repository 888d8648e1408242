"""An object is received when most of it has come, and not piece by piece."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from fusefs.store.http.async_exchange import exchange as exchange_now
from fusefs.store.http.pool import BorrowedConnection, ConnectionPool, Network
from fusefs.store.http.proxies import Proxies
from tests.support.servers.tls import tls_door

REQUEST = b"GET /key HTTP/1.1\r\n\r\n"
PIECE = 4000
PAUSE_S = 0.005
# For the head, for all but a record, and for each piece of that; the object has 25 pieces.
MOST_WAITS = 12


def head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: %d\r\n\r\n" % len(body)


def in_pieces(body: bytes) -> list[bytes]:
    return [body[at : at + PIECE] for at in range(0, len(body), PIECE)]


@contextmanager
def connected(directory: Path, pieces: Sequence[bytes]) -> Iterator[ConnectionPool]:
    """A pool of a server over TLS that answers each request with these pieces, with pauses."""

    def serve(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while client.recv(1 << 16):
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(PAUSE_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with tls_door(address, directory) as door:
            network = Network(Proxies.of({}), str(door.authority), 5.0, 5.0, 1)
            pool = network.pool(door.url)
            assert pool is not None
            yield pool
            pool.close()
        thread.join()


def least(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


@pytest.mark.parametrize("size", [100_000, 50_000, 16 << 10, 1, 0])
async def test_the_event_loop_is_woken_a_few_times_for_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    waits = 0
    wait_readable = trio.lowlevel.wait_readable

    async def counted(sock: socket.socket) -> None:
        nonlocal waits
        waits += 1
        await wait_readable(sock)

    body = os.urandom(size)
    with connected(tmp_path, [head(body), *in_pieces(body)]) as pool:
        await trio.to_thread.run_sync(pool.open_idle)
        monkeypatch.setattr(trio.lowlevel, "wait_readable", counted)
        for _ in range(2):
            waits = 0
            answer = await exchange_now(pool, REQUEST, b"", is_head=False, size=size)
            assert answer is not None
            assert answer.content == body
            assert waits <= MOST_WAITS
            sock = pool.take_idle()
            assert sock is not None
            assert least(sock) == 1
            pool.give_back(BorrowedConnection(sock, is_reusable=True))
