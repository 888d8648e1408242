"""TLS in a thread, for long bodies: while the event loop has requests, it is done in turns.

Each record of TLS has 16 KiB at most, and each is a call that gives up the interpreter's lock
and wants it back some microseconds later. A thread that is woken for the lock finds it taken
again by then. With a dozen threads at it the event loop waited tens of milliseconds for the
lock after each of its system calls, and a small file's first read took six times as long while
a large file was read. So while the event loop sends requests itself, few threads decrypt at a
time, and each lets go of the lock for a moment after a number of records: long enough for the
event loop to be woken, and to take it. It costs a large file's reader up to a fifth, so it is
not done otherwise.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import threading
import time
from typing import cast

# The records between two pauses: a quarter of a millisecond of decryption.
RECORDS = 16
# With the kernel's own slack it is 0.1 ms: a process that sleeps is woken in that time.
PAUSE_S = 50e-6

_pause = time.sleep
turns = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 2))


class EventLoop:
    """What the event loop has under way by itself (async_exchange.py)."""

    requests = 0


def receive(sock: ssl.SSLSocket, room: memoryview, limit_s: float | None) -> int:
    """Receive what has come, as far as there is `room`; 0 at the end. Blocks.

    The socket has a time-out of 0: what waits here is this function.

    Raises:
        TimeoutError: no record came for `limit_s` seconds.
        OSError: the connection broke.
    """
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    while True:
        if not sock.pending():
            _wait_readable(sock, deadline)
        if EventLoop.requests:
            with turns:
                count = _decrypt(sock, room, pauses=True)
        else:
            count = _decrypt(sock, room, pauses=False)
        if count is not None:
            return count


def _decrypt(sock: ssl.SSLSocket, room: memoryview, *, pauses: bool) -> int | None:
    """Receive the records that have come; None if not even one has, 0 at the end."""
    filled = records = 0
    while filled < len(room):
        try:
            count = cast(int, sock.read(len(room) - filled, room[filled:]))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return filled or None
        if not count:
            break
        filled += count
        records += 1
        if pauses and records % RECORDS == 0:
            _pause(PAUSE_S)
    return filled


def _wait_readable(sock: socket.socket, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    left_s = max(0.0, deadline - time.monotonic())
    if not poll.poll(None if left_s == math.inf else 1000 * left_s):
        raise TimeoutError("the server sent nothing more")
