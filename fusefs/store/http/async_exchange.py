"""Small requests from the event loop itself, without a thread.

To hand a request to a thread and its answer back takes as long as the request
of a small object, and has the two wait for the interpreter's lock: a PUT of
64 KiB is 0.15 ms of processor time here, and 0.3 to 0.6 in a thread. A GET in
obstore's thread costs 75 waits for that lock.

This is one attempt, over a connection that is open. Whatever is not a plain
success is left to a thread, with retries. A request whose answer is slow to begin
may be sent again on another connection (`Hedging`).
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeAlias, cast

import trio

from fusefs.store.admission.hedging import Hedging
from fusefs.store.http import exchange as wire
from fusefs.store.http.answers import Answer, Arrived, Parsing, WireError, answer, read_head
from fusefs.store.http.pool import BorrowedConnection, ConnectionPool
from fusefs.store.http.records import EventLoop

_Socket: TypeAlias = "_Plain | socket.socket"
# What an answer takes beside the requested bytes.
HEAD_ROOM = 16 << 10
# Of so many bytes that are missing of an answer it is worth the two calls to have the event loop
# woken for most of them together. Of a file of 100 KiB over TLS that saves a tenth of its
# processor time; the threads that receive large ones gain nothing by it.
LEAST_GATHERED = 32 << 10
# The longest record of TLS (RFC 8446, section 5.1). So much may have been read from the socket
# without being shown yet, because the rest of its record has not come.
RECORD = 16 << 10


@dataclass(frozen=True, slots=True)
class Late:
    """What to do about an answer that is not there, all of it, `wait_s` after the request.

    `race` gets what goes on receiving it, until the connection's time-out, and may be cancelled.
    It returns the answer; what it raises ends the exchange.
    """

    wait_s: float
    race: Callable[[Callable[[], Awaitable[Answer]]], Awaitable[Answer]]


async def exchange(
    pool: ConnectionPool,
    head: bytes,
    body: bytes | bytearray,
    *,
    is_head: bool,
    size: int = 0,
    hedge: Hedging | None = None,
    late: Late | None = None,
    begun: Callable[[], None] = lambda: None,
) -> Answer | None:
    """Send a request and return its answer; None if the pool has no idle connection.

    `size` is how many bytes the body of the answer has; that of a failure has at
    most HEAD_ROOM. Cancelled, the request may have been sent. With `hedge`, which
    is for requests that change nothing and have no body, it may be sent twice. `late` is for
    those without a hedge. `begun` is called when the answer begins, perhaps more than once.

    Raises:
        Exception: whatever `late` raises.
        WireError: the answer broke off, or was none.
        OSError: the connection broke, or was silent for its time-out.
    """
    sock = pool.take_idle()
    if sock is None:
        return None
    first = _Exchange(pool, sock, HEAD_ROOM + size, begun, is_head=is_head)
    with first:
        with trio.CancelScope(deadline=trio.current_time() + first.limit_s) as limit:
            await first.send(head, body)
            if late is not None:
                in_time = await first.receive_within(late.wait_s)
                if in_time is not None:
                    return in_time
            elif hedge is None or await first.has_begun(hedge):
                return await first.receive()
            elif hedge.take():
                return await _race(first, head, hedge)
            else:
                return await first.receive_late(hedge)
        if late is not None and not limit.cancelled_caught:
            return await late.race(partial(first.receive_until, limit.deadline))
    raise TimeoutError("the server sent nothing")


async def _race(first: _Exchange, head: bytes, hedge: Hedging) -> Answer:
    """Send a request again; return the first answer that stands, or else one of two failures.

    The connection of the request that is not waited for any more is closed.
    """
    outcomes: list[tuple[bool, Answer | Exception]] = []

    async def run(is_second: bool, receive: Callable[[], Awaitable[Answer]]) -> None:
        try:
            outcome: Answer | Exception = await receive()
        except Exception as error:  # raised below, if the other fails as well
            outcome = error
        outcomes.append((is_second, outcome))
        if _stands(outcome):
            nursery.cancel_scope.cancel()

    has_won = False
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, False, first.receive)
            nursery.start_soon(run, True, partial(_send_again, first, head))
        hedge.note_first_byte(trio.current_time() - first.sent_at)
        outcomes.sort(key=lambda one: (not _stands(one[1]), one[0]))
        is_second, outcome = outcomes[0]
        has_won = is_second and _stands(outcome)
    finally:
        hedge.give_back(has_won=has_won)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _stands(outcome: Answer | Exception) -> bool:
    """Whether it is a success, or a refusal that the other request would get as well."""
    return isinstance(outcome, Answer) and outcome.status < 500 and outcome.status != 429


async def _send_again(first: _Exchange, head: bytes) -> Answer:
    pool = first.pool
    sock = pool.take_idle()
    if sock is None:
        # Cancelled, it is opened all the same, for a later request.
        await trio.to_thread.run_sync(pool.open_idle, abandon_on_cancel=True)
        sock = pool.take_idle()
    if sock is None:
        raise WireError("another request has taken the connection")
    with _Exchange(pool, sock, first.room, first.begun, is_head=first.is_head) as second:
        await second.send(head, b"")
        return await second.receive()


class _Exchange:
    """One request on a connection, which its pool has back at the end of a `with`."""

    def __init__(
        self,
        pool: ConnectionPool,
        sock: socket.socket,
        room: int,
        begun: Callable[[], None],
        *,
        is_head: bool,
    ) -> None:
        limit_s = sock.gettimeout()
        self.pool = pool
        self.room = room
        self.begun = begun
        self.is_head = is_head
        self.limit_s = math.inf if limit_s is None else limit_s
        self.sent_at = 0.0
        self._borrowed = BorrowedConnection(sock)
        self._limit_s = limit_s
        # A plain socket with a time-out does not block, beneath Python's own methods.
        self._plain = _Plain(sock) if limit_s and type(sock) is socket.socket else None
        self._sock: _Socket = self._plain or sock
        self._buffer = bytearray(room)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._wake_size = 1
        # What takes an answer of unknown length apart.
        self._piecemeal: Parsing[tuple[Answer, bool]] | None = None

    def __enter__(self) -> Self:
        if self._plain is None:
            self._borrowed.sock.setblocking(False)
        EventLoop.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        EventLoop.requests -= 1
        if self._plain is None and self._borrowed.is_reusable:
            self._borrowed.sock.settimeout(self._limit_s)
        self.pool.give_back(self._borrowed)

    async def send(self, head: bytes, body: bytes | bytearray) -> None:
        if self._plain is not None:
            await _send(self._plain, self._plain.send_first(head, body))
        else:
            await _send(self._sock, memoryview(head + body))
        self.sent_at = trio.current_time()

    async def has_begun(self, hedge: Hedging) -> bool:
        """Whether the answer begins before the request may be sent again."""
        hedge.note_sent()
        with trio.CancelScope(deadline=self.sent_at + hedge.wait_s):
            await self._begin()
        # If not this one but the event loop was slow, the answer is there.
        has_begun = self._filled > 0 or self._is_readable()
        if has_begun:
            hedge.note_first_byte(trio.current_time() - self.sent_at)
        return has_begun

    async def receive_late(self, hedge: Hedging) -> Answer:
        """Receive an answer that is slow, and is not requested again."""
        await self._begin()
        hedge.note_first_byte(trio.current_time() - self.sent_at)
        return await self.receive()

    async def receive_within(self, seconds: float) -> Answer | None:
        """Receive an answer; None, and it can be received later, if it is not there in time."""
        with trio.CancelScope(deadline=self.sent_at + seconds):
            return await self.receive()
        # If not the answer but the event loop was slow, it is there.
        return await self.receive() if self._is_readable() else None

    async def receive_until(self, deadline: float) -> Answer:
        """Receive an answer until a moment of trio's clock.

        Raises:
            TimeoutError: it was not there by then.
        """
        with trio.CancelScope(deadline=deadline):
            return await self.receive()
        raise TimeoutError("the server sent nothing")

    async def receive(self) -> Answer:
        """Receive an answer, of `room` bytes at most.

        Cancelled, no other answer can be received; this one can, if it is called again.
        """
        await self._begin()
        buffer, view = self._buffer, self._view
        looked = 0
        while (stop := buffer.find(b"\r\n\r\n", looked, self._filled)) < 0:
            looked = max(0, self._filled - 3)
            await self._fill(self._filled + 1)
        head = read_head(bytes(view[:stop]))
        size = head.body_size(is_head=self.is_head)
        if head.status < 200 or size is None:
            # Rare, and mostly a failure.
            found, is_reusable = await self._receive_piecemeal()
        else:
            start, stop = stop + 4, stop + 4 + size
            if stop > len(buffer):
                raise WireError("the answer is longer than the requested range")
            await self._fill(stop)
            self._wake_for(0)
            found = Answer(head.status, head.headers, bytes(view[start:stop]))
            is_reusable = head.is_reusable and self._filled == stop
        self._borrowed.is_reusable = is_reusable
        return found

    async def _receive_piecemeal(self) -> tuple[Answer, bool]:
        """An answer of unknown length, of which something has come, and whether to reuse."""
        parsing = self._piecemeal
        room = bytearray(wire.READ_SIZE)
        try:
            if parsing is None:
                arrived = Arrived(self._buffer[: self._filled])
                parsing = self._piecemeal = answer(arrived, is_head=self.is_head, most=self.room)
                next(parsing)
            while True:
                parsing.send(bytes(room[: await _receive_some(self._sock, memoryview(room))]))
        except StopIteration as end:
            return cast(tuple[Answer, bool], end.value)

    async def _begin(self) -> None:
        """Receive the first bytes. Cancelling loses none."""
        if not self._filled:
            await trio.lowlevel.wait_readable(self._sock)
            await self._fill(1)
            self.begun()

    async def _fill(self, stop: int) -> None:
        """Receive until `stop` bytes have come.

        A small object over TLS comes in seven records, each of which is a call of its own: so
        what is there is taken without the layers of `recv_into`.
        """
        sock, view = self._sock, self._view
        while self._filled < stop:
            room = view[self._filled :]
            count = _read_record(sock, room) if isinstance(sock, ssl.SSLSocket) else 0
            if not count:
                self._wake_for(stop - self._filled)
                count = await _receive_some(sock, room)
            self._filled += count

    def _wake_for(self, missing: int) -> None:
        """Have this task woken when most of what is missing has come, not for each piece of it.

        See SO_RCVLOWAT in socket(7).
        """
        size = missing - RECORD if missing >= LEAST_GATHERED else 1
        if size != self._wake_size:
            self._wake_size = size
            self._borrowed.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))


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


def _read_record(sock: ssl.SSLSocket, room: memoryview) -> int:
    """Receive what there is of a record; 0 if there is none, or no room, or it has ended."""
    try:
        return cast(int, sock.read(len(room), room)) if room else 0
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return 0


async def _receive_some(sock: _Socket, room: memoryview) -> int:
    """Receive at least a byte; return how many."""
    if not room:
        raise WireError("the answer is longer than the requested range")
    while True:
        try:
            count = sock.recv_into(room)
        except (BlockingIOError, ssl.SSLWantReadError):
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)
        else:
            if not count:
                raise WireError("the answer broke off")
            return count
