"""Small requests from the event loop itself, without a thread.

To hand a request to a thread and its answer back takes as long as the request
of a small object, and has the two wait for the interpreter's lock: a PUT of
64 KiB is 0.15 ms of processor time here, and 0.3 to 0.6 in a thread. A GET in
obstore's thread costs 75 waits for that lock.

This is one attempt, over a connection that is open. Whatever is not a plain
success is left to a thread, with retries.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
from typing import TypeAlias

import trio

from fusefs.store.http import exchange as wire
from fusefs.store.http.exchange import Answer
from fusefs.store.http.pool import Borrowed, ConnectionPool

_Socket: TypeAlias = "_Plain | socket.socket"
# What an answer takes beside the requested bytes.
HEAD_ROOM = 16 << 10


async def exchange(
    pool: ConnectionPool, head: bytes, body: bytes | bytearray, *, is_head: bool, size: int = 0
) -> Answer | None:
    """Send a request and return its answer; None if the pool has no idle connection.

    `size` is how many bytes the body of the answer has; that of a failure has at
    most HEAD_ROOM. Cancelled, the request may have been sent.

    Raises:
        WireError: the answer broke off, or was none.
        OSError: the connection broke, or was silent for its time-out.
    """
    sock = pool.take_idle()
    if sock is None:
        return None
    borrowed = Borrowed(sock)
    try:
        limit_s = sock.gettimeout()
        # A plain socket with a time-out does not block, beneath Python's own methods.
        plain = _Plain(sock) if limit_s and type(sock) is socket.socket else None
        if plain is None:
            sock.setblocking(False)
        deadline = trio.current_time() + (math.inf if limit_s is None else limit_s)
        with trio.CancelScope(deadline=deadline) as scope:
            if plain is not None:
                await _send(plain, plain.send_first(head, body))
            else:
                await _send(sock, memoryview(head + body))
            answer, is_reusable = await _receive(plain or sock, HEAD_ROOM + size, is_head=is_head)
        if scope.cancelled_caught:
            raise TimeoutError("the server sent nothing")
        if plain is None:
            sock.settimeout(limit_s)
        borrowed.is_reusable = is_reusable
        return answer
    finally:
        pool.give_back(borrowed)


class _Plain:
    """A socket without TLS that does not block, without what Python's methods do beside."""

    __slots__ = ("_fd",)

    def __init__(self, sock: socket.socket) -> None:
        self._fd = sock.fileno()

    def fileno(self) -> int:
        return self._fd

    def send_first(self, head: bytes, body: bytes | bytearray) -> memoryview:
        """Send what can be sent at once; return the rest."""
        try:
            count = os.writev(self._fd, (head, body))
        except BlockingIOError:
            count = 0
        if count < len(head):
            return memoryview(head[count:] + body)
        return memoryview(body)[count - len(head) :]

    def send(self, data: memoryview) -> int:
        return os.write(self._fd, data)

    def recv_into(self, room: memoryview) -> int:
        return os.readv(self._fd, (room,))


async def _send(sock: _Socket, view: memoryview) -> None:
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            await trio.lowlevel.wait_writable(sock)
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock)


async def _receive(sock: _Socket, room: int, *, is_head: bool) -> tuple[Answer, bool]:
    """An answer of `room` bytes at most, and whether another may come on the same connection."""
    buffer = bytearray(room)
    view = memoryview(buffer)
    filled, stop = 0, -1
    await trio.lowlevel.wait_readable(sock)
    while stop < 0:
        filled += await _receive_some(sock, view[filled:])
        stop = buffer.find(b"\r\n\r\n", 0, filled)
    head = wire.read_head(bytes(view[:stop]))
    size = head.body_size(is_head=is_head)
    if head.status < 200 or size is None:
        # Rare, and mostly a failure.
        return await _receive_piecemeal(sock, bytes(view[:filled]), is_head=is_head)
    start, stop = stop + 4, stop + 4 + size
    while filled < stop:
        filled += await _receive_some(sock, view[filled:])
    answer = Answer(head.status, head.headers, bytes(view[start:stop]))
    return answer, head.is_reusable and filled == stop


async def _receive_piecemeal(sock: _Socket, data: bytes, *, is_head: bool) -> tuple[Answer, bool]:
    """An answer of unknown length, of which `data` has come."""
    room = bytearray(wire.READ_SIZE)
    while True:
        try:
            return wire.read(wire.Stream(_Received(data)), is_head=is_head)
        except _NotYetError:
            data += room[: await _receive_some(sock, memoryview(room))]


async def _receive_some(sock: _Socket, room: memoryview) -> int:
    """Receive at least a byte; return how many."""
    if not room:
        raise wire.WireError("the answer is longer than what was asked for")
    while True:
        try:
            count = sock.recv_into(room)
        except (BlockingIOError, ssl.SSLWantReadError):
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)
        else:
            if not count:
                raise wire.WireError("the answer broke off")
            return count


class _NotYetError(Exception):
    """The answer is longer than what has come of it."""


class _Received:
    """What has come so far, in place of the connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, _size: int) -> bytes:
        data, self._data = self._data, b""
        if not data:
            raise _NotYetError
        return data
