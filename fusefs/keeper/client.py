"""The daemon's end of the socket to its keeper; the protocol is in protocol.py.

If the socket is full, one task sends the remaining messages, so that they keep their
order and a caller that needs no answer does not wait. When the keeper's end closes,
all calls that wait for an answer fail with ECONNRESET and `gone` is set: the mount
goes on without a keeper until another keeper connects.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from fusefs.keeper import protocol as wire
from fusefs.keeper.protocol import KeeperMessage
from fusefs.linux import sockets
from fusefs.linux.callers import FATES, HOLDS, HOLDS_NOT, UNKNOWN
from fusefs.telemetry.activity import ACTIVITY, IDLE_S

TICK_S = 1.0
# A keeper that takes longer to answer is taken to hang.
LOOK_LIMIT_S = 2.0


class KeeperError(Exception):
    """The keeper sent something unexpected, or is gone while it is needed."""


@dataclass(slots=True)
class Welcome:
    """The keeper's WELCOME to a daemon, whose `task` is FRESH, TAKE_OVER or PREPARE.

    With `is_privileged` the keeper mounts and registers files. `connection` is the number of the
    mount's FUSE connection, 0 if there is no mount yet or the number is unknown.
    """

    task: int
    is_privileged: bool
    connection: int


@dataclass(slots=True)
class TakenMount:
    """The last daemon's mount: its /dev/fuse `fd`, and `backing` ids: {id: (st_dev, st_ino)}."""

    fd: int
    backing: dict[int, tuple[int, int]]
    is_all_answered: bool


class KeeperClient:
    """The daemon's connection to its keeper. Belongs to the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._outbox, self._queue = trio.open_memory_channel[tuple[bytes, tuple[int, ...]]](
            math.inf
        )
        # True if the queue is empty, so that the next message may be sent at once.
        self._is_idle = True
        self._last_number = 0
        self._alive_due = -math.inf
        self._waiting: dict[int, _Reply] = {}
        # The PID namespace of the pids in requests, if the keeper can look them up; else 0.
        self.namespace = 0
        self.gone = trio.Event()
        self.quiesced = trio.Event()

    # Before serving: one question at a time.

    async def hello(self) -> Welcome:
        """Begin the session with HELLO, and return the keeper's answer."""
        message = await self._ask(wire.pack(wire.HELLO, wire.VERSION, 1), wire.WELCOME)
        return Welcome(message.a, bool(message.d & 1), message.d >> 1)

    async def mount(self) -> int:
        """Ask the keeper to mount; return the /dev/fuse descriptor. Raises mount(2)'s OSError."""
        message = await self._ask(wire.pack(wire.MOUNT), wire.MOUNTED)
        if message.error:
            raise OSError(message.error, os.strerror(message.error))
        return message.fd

    def deposit(self, fd: int) -> None:
        """Give the keeper the /dev/fuse descriptor of a mount that fusermount3 made."""
        wire.send(self._socket, wire.pack(wire.DEPOSIT), fd)

    def prepared(self) -> None:
        """Tell the keeper that this process is ready to take over the mount."""
        wire.send(self._socket, wire.pack(wire.PREPARED))

    async def take(self) -> TakenMount:
        """Wait until the keeper hands over the mount, and return it."""
        take = await self._receive(wire.TAKE)
        backing = {}
        for _ in range(take.a):
            entry = await self._receive(wire.ENTRY)
            backing[entry.a] = (entry.b, entry.c)
        return TakenMount(take.fd, backing, bool(take.b))

    async def _ask(self, question: bytes, answer: int) -> KeeperMessage:
        wire.send(self._socket, question)
        return await self._receive(answer)

    async def _receive(self, kind: int) -> KeeperMessage:
        message = await self._next_message()
        if message is None:
            raise KeeperError("the keeper has ended")
        if message.kind != kind:
            raise KeeperError(f"the keeper sent {message.kind} instead of {kind}")
        return message

    async def _next_message(self) -> KeeperMessage | None:
        """Wait for a message and return it; None when the keeper has ended."""
        while True:
            try:
                return wire.receive(self._socket, wire.FROM_KEEPER)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)

    # While serving.

    def serving(self, *, has_resend: bool) -> None:
        """Tell the keeper that this process serves, and whether the kernel can resend requests."""
        self._send(wire.pack(wire.SERVING, has_resend))

    def known(self, backing_id: int, inode: int) -> None:
        """Tell a new keeper the backing id and the st_ino of a file that is registered already."""
        self._send(wire.pack(wire.KNOWN, 0, backing_id, inode))

    def alive(self) -> None:
        """Send a TICK, at most one per TICK_S, for a task that occupies the event loop for long."""
        now = time.monotonic()
        if now >= self._alive_due:
            self._alive_due = now + TICK_S
            self._send(wire.pack(wire.TICK))

    def unmount(self) -> None:
        """Ask the privileged keeper to unmount, or to detach the mount if it is in use."""
        self._send(wire.pack(wire.UNMOUNT))

    def ending(self) -> None:
        """Tell the keeper that this process ends on purpose, ahead of messages still queued."""
        try:
            wire.send(self._socket, wire.pack(wire.ENDING))
        except OSError:
            self.gone.set()

    async def run(self, in_flight: Callable[[], int], hang_s: float) -> None:
        """Exchange messages until the keeper is gone; report `in_flight()` within each `hang_s`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick, in_flight, hang_s)
            nursery.start_soon(self._send_all)
            try:
                await self._receive_all()
            finally:
                self.gone.set()
                for reply in self._waiting.values():
                    reply.come(0, errno.ECONNRESET)
                self._waiting.clear()
                nursery.cancel_scope.cancel()

    async def open_backing(self, fds: Sequence[int]) -> list[tuple[int, int]]:
        """Register up to `MOST_FILES` open files for passthrough, in one message.

        Returns a pair for each file: its backing id and 0, or 0 and an errno.
        """
        if self.gone.is_set():
            return [(0, errno.ECONNRESET) for _ in fds]
        first = self._last_number + 1
        replies = [self._expect_reply()[1] for _ in fds]
        self._send(wire.pack(wire.BACKING_OPEN, first, len(fds)), *fds)
        # Shielded: an id that the keeper sends must not get lost, and the answer comes soon.
        with trio.CancelScope(shield=True):
            await replies[-1].event.wait()  # one answer has all
        return [(reply.value, reply.error) for reply in replies]

    async def look_at_process(self, pid: int, ino: int = 0) -> int:
        """Ask the keeper if process `pid` lives or is ending, or if it or a child can write `ino`.

        Returns one of `FATES`, or with `ino` (a file's st_ino) HOLDS, HOLDS_NOT or UNKNOWN, as in
        linux/callers.py. UNKNOWN also means that no answer came within `LOOK_LIMIT_S`.
        """
        if self.gone.is_set() or not self.namespace:
            return UNKNOWN
        number, reply = self._expect_reply()
        self._send(wire.pack(wire.LOOK, number, pid, ino))
        try:
            with trio.move_on_after(LOOK_LIMIT_S):
                await reply.event.wait()
        finally:
            self._waiting.pop(number, None)
        known = (HOLDS, HOLDS_NOT) if ino else FATES
        return reply.value if reply.value in known else UNKNOWN

    def close_backing(
        self, backing_id: int, done: Callable[[int, int], None] | None = None
    ) -> trio.Event:
        """Close a backing id; the reply or ECONNRESET sets the event and calls `done(0, errno)`."""
        number, reply = self._expect_reply()
        reply.done = done
        if self.gone.is_set():
            self._waiting.pop(number).come(0, errno.ECONNRESET)
        else:
            self._send(wire.pack(wire.BACKING_CLOSE, number, backing_id))
        return reply.event

    def _expect_reply(self) -> tuple[int, _Reply]:
        self._last_number += 1
        reply = self._waiting[self._last_number] = _Reply()
        return self._last_number, reply

    def _send(self, message: bytes, *fds: int) -> None:
        if self.gone.is_set():
            return
        if self._is_idle:
            try:
                sockets.send(self._socket, message, fds)
                return
            except BlockingIOError:
                self._is_idle = False
            except OSError:
                return  # the keeper is gone; `run` finds out by itself
        self._outbox.send_nowait((message, fds))

    async def _send_all(self) -> None:
        async for message, fds in self._queue:
            while True:
                try:
                    sockets.send(self._socket, message, fds)
                    break
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                except OSError:
                    return  # the keeper is gone; `run` finds out by itself
            self._is_idle = not self._queue.statistics().current_buffer_used

    async def _receive_all(self) -> None:
        while (message := await self._next_message()) is not None:
            if message.kind == wire.QUIESCE:
                self.quiesced.set()
            elif message.kind == wire.ABLE:
                self.namespace = message.b
            elif message.kind == wire.BACKING_OPENED:
                for number, (backing_id, error) in enumerate(message.pairs, message.a):
                    if number in self._waiting:
                        self._waiting.pop(number).come(backing_id, error)
            elif message.kind in _REPLIES and message.a in self._waiting:
                self._waiting.pop(message.a).come(message.b, message.error)

    async def _tick(self, in_flight: Callable[[], int], hang_s: float) -> None:
        while True:
            count = in_flight()
            self._send(wire.pack(wire.TICK, count))
            if count:
                await trio.sleep(TICK_S)
            else:
                await ACTIVITY.pause(TICK_S, max(TICK_S, min(IDLE_S, hang_s / 3)))


_REPLIES = (wire.BACKING_CLOSED, wire.LOOKED)


class _Reply:
    """A pending answer to a BACKING_CLOSE or a LOOK, or for one file of a BACKING_OPEN."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.value = 0
        self.error = 0
        self.done: Callable[[int, int], None] | None = None

    def come(self, value: int, error: int) -> None:
        self.value, self.error = value, error
        self.event.set()
        if self.done is not None:
            self.done(value, error)
