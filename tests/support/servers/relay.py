"""Passes the bytes of two connections on to each other, for servers that stand in between."""

import contextlib
import socket
import threading

PIECE = 1 << 16
# For the other direction, once one has ended.
END_LIMIT_S = 60


def relay(one: socket.socket, other: socket.socket) -> None:
    """Pass on until both have ended, one thread for each direction."""
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join(END_LIMIT_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
