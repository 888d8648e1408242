"""Unix sockets: paths of any length, the peer's identity, and messages with descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence

from fusefs.linux import files

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

_PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_INT_SIZE = array.array("i").itemsize


@contextlib.contextmanager
def short_name(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a short name of `path` that fits into the 107 bytes of sockaddr_un."""
    parent, name = os.path.split(path)
    with files.closing(os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        yield f"/proc/self/fd/{directory}/{name}"


def connect(
    path: str | os.PathLike[str], timeout_s: float, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    """Connect to `path`; each call on the socket has this timeout. Raises OSError on failure."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.settimeout(timeout_s)
        with short_name(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def inherited(variable: str) -> socket.socket | None:
    """Return the socket whose number is in an environment variable, or None without the variable.

    The variable is removed. The socket becomes non-blocking, and no started program inherits it.
    """
    number = os.environ.pop(variable, None)
    if number is None:
        return None
    os.set_inheritable(int(number), False)
    found = socket.socket(fileno=int(number))
    found.setblocking(False)
    return found


def peer_of(sock: Any) -> tuple[int, int]:
    """Return the pid and uid of the peer process, at the time when it called connect or listen."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(packed)
    return pid, uid


def is_trusted(sock: Any) -> bool:
    """True if the peer is root, or the user that this process runs as."""
    return peer_of(sock)[1] in (0, os.geteuid())


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> int:
    """Send data, with descriptors if any are given; return the number of bytes sent.

    Raises:
        BlockingIOError: the socket is non-blocking and full; nothing was sent.
        OSError: the peer is gone.
    """
    if not fds:
        return sock.send(data, socket.MSG_NOSIGNAL)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    return sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, size: int, most_fds: int) -> tuple[bytes, list[int], bool]:
    """Receive data and non-inheritable descriptors, and a flag: True if some of these were cut off.

    On a closed connection, data and descriptors are empty. One descriptor more than `most_fds`
    may arrive, because the kernel pads the buffer; further ones are cut off.

    Raises:
        BlockingIOError, TimeoutError: there is nothing to receive.
        OSError: the socket cannot be used.
    """
    room = socket.CMSG_SPACE(most_fds * _INT_SIZE)
    try:
        data, ancillary, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", [], False
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % _INT_SIZE])
    return data, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
