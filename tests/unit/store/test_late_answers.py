"""Answers that are not there in time: what races them may stop receiving and go on later."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import cast

import pytest
import trio

from fusefs.store.http.answers import Answer
from fusefs.store.http.async_exchange import Late, exchange
from fusefs.store.http.pool import BorrowedConnection, ConnectionPool
from fusefs.store.http.threads import AbandonedError

HEAD = b"GET /key HTTP/1.1\r\n\r\n"
SIZED = [
    b"HTTP/1.1 206 Partial Con",
    b"tent\r\nETag: x\r\nContent-Length: 6\r\n\r\nab",
    b"cd",
    b"ef",
]
CHUNKED = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"3\r\nab",
    b"c\r\n3\r\ndef\r\n0",
]
PAUSE_S = 0.02

Receive = Callable[[], Awaitable[Answer]]


class Pool:
    """Of one connection, which it has back `reusable` or not."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        self.sock: socket.socket | None = sock
        self.reusable: bool | None = None

    def take_idle(self) -> socket.socket | None:
        sock, self.sock = self.sock, None
        return sock

    def give_back(self, borrowed: BorrowedConnection) -> None:
        self.reusable = borrowed.is_reusable


async def answered(
    pieces: list[bytes], race: Callable[[Receive], Awaitable[Answer]], wait_s: float = PAUSE_S / 2
) -> tuple[Answer | None, bool | None]:
    """What becomes of an answer in pieces, and whether its connection is used again."""
    here, there = socket.socketpair()
    pool = Pool(here)

    async def answer() -> None:
        for piece in pieces:
            await trio.sleep(PAUSE_S)
            there.sendall(piece)

    with closing(here), closing(there):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            found = await exchange(
                cast("ConnectionPool", pool),
                HEAD,
                b"",
                is_head=False,
                size=6,
                late=Late(wait_s, race),
            )
    return found, pool.reusable


@pytest.mark.parametrize(
    "pieces", [SIZED, [*CHUNKED, b"\r\n\r\n"]], ids=["sized", "of unknown length"]
)
async def test_receiving_goes_on_where_it_was_stopped(pieces: list[bytes]) -> None:
    stopped = 0

    async def race(receive: Receive) -> Answer:
        nonlocal stopped
        while True:
            with trio.move_on_after(PAUSE_S / 3):
                return await receive()
            stopped += 1

    answer, is_reusable = await answered(pieces, race)
    assert answer is not None
    assert answer.content == b"abcdef"
    assert is_reusable
    assert stopped > 2


async def test_what_is_there_in_time_is_not_raced() -> None:
    async def race(_receive: Receive) -> Answer:
        raise AssertionError("it was in time")

    answer, is_reusable = await answered([b"".join(SIZED)], race, wait_s=5.0)
    assert answer is not None
    assert (answer.content, is_reusable) == (b"abcdef", True)


async def test_a_connection_whose_answer_is_given_up_is_not_used_again() -> None:
    async def race(_receive: Receive) -> Answer:
        raise AbandonedError

    here, there = socket.socketpair()
    pool = Pool(here)
    with closing(here), closing(there), pytest.raises(AbandonedError):
        await exchange(
            cast("ConnectionPool", pool), HEAD, b"", is_head=False, late=Late(0.01, race)
        )
    assert pool.reusable is False


async def test_the_time_out_ends_the_answer_and_not_what_races_it() -> None:
    ended = []

    async def race(receive: Receive) -> Answer:
        with pytest.raises(TimeoutError):
            await receive()
        await trio.sleep(0.1)  # as long as it takes
        ended.append(True)
        raise AbandonedError

    here, there = socket.socketpair()
    pool = Pool(here)
    here.settimeout(0.05)
    with closing(here), closing(there), pytest.raises(AbandonedError):
        await exchange(
            cast("ConnectionPool", pool), HEAD, b"", is_head=False, late=Late(0.01, race)
        )
    assert ended
