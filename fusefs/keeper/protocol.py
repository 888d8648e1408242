"""The messages between the keeper and a daemon, over one inherited socket.

The daemon's end of a connected AF_UNIX, SOCK_SEQPACKET pair is the descriptor whose
number is in the environment variable `FUSEFS_KEEPER_FD`. Every message is one
`MESSAGE`: kind, error (0 or a positive errno) and four numbers a, b, c, d. Only the
kinds marked "+" below carry descriptors, exactly one unless stated otherwise, and
only the kinds that mention pairs carry `PAIR`s of numbers. Any other message ends the
session, and the daemon is killed, because an attacker may have taken it over.

Daemon to keeper, in the order in which they come:

    HELLO         a: VERSION; b: 1. The first message.
    PREPARED      ready to take over; only after a WELCOME with PREPARE
    MOUNT         once, only after FRESH; answered by MOUNTED
    DEPOSIT       + the /dev/fuse descriptor of a mount that the daemon made;
                  once, only after FRESH, and only where d of WELCOME is 0
    SERVING       the daemon answers requests from now on; a: 1 if the kernel can resend
                  requests. Answered by ABLE.
    BACKING_OPEN  a: the daemon's number for the first file (the others are numbered
                  consecutively), b: the number of files, at most MOST_FILES; + their
                  descriptors. Answered by BACKING_OPENED.
    BACKING_CLOSE a: the daemon's number for this request, b: id. Answered by BACKING_CLOSED.
    TICK          a: requests in flight. The event loop sends it each second, or less often
                  while the mount is idle.
    UNMOUNT       unmount, or detach the mount if it is in use. Not answered: the
                  daemon serves until the kernel reports that the mount is gone.
    ENDING        the daemon ends on purpose: unmounted, by SIGTERM, or quiesced
    KNOWN         b: id, c: st_ino of a file that the last keeper had registered. Sent to
                  a new keeper, before SERVING.
    LOOK          a: the daemon's number for this request, b: a thread's pid, from a FUSE
                  request, c: 0, or the st_ino of a file; only after ABLE. Answered by LOOKED.

Keeper to daemon:

    WELCOME        a: FRESH, TAKE_OVER or PREPARE; b: restarts so far; c: when the
                   last daemon died, in ns since the epoch, or 0; d: 1 if the
                   keeper mounts and registers files, plus twice the number of the
                   mount's connection, if that is known. Answers HELLO.
    MOUNTED        error, or + the /dev/fuse descriptor
    TAKE           + the /dev/fuse descriptor; a: how many ENTRY follow; b: 1 if all
                   requests that were read are answered, so that none has to be resent.
                   Sent at once after TAKE_OVER; after PREPARE, when the old daemon is gone.
    ENTRY          a: id, b: st_dev, c: st_ino of a registered file
    BACKING_OPENED a, b: as in the request; for each file a pair of its id and an errno,
                   of which one is 0
    BACKING_CLOSED error; a: as in the request
    ABLE           b: the PID namespace of the pids in requests, if the keeper is in it
                   and can look them up, else 0. Answers SERVING.
    LOOKED         a: as in the request, b: the fate of the process, or with an st_ino
                   HOLDS, HOLDS_NOT or UNKNOWN, as in linux/callers.py
    QUIESCE        read no more requests, answer those in flight, send ENDING, exit 0

After a daemon that exits with CANNOT_TAKE_OVER the keeper starts no other.

If the socket closes before TAKE or MOUNTED, this daemon is no longer needed; if it
closes later, keeper and broker are dead and the mount needs a new keeper.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from fusefs.linux import sockets

ENVIRONMENT = "FUSEFS_KEEPER_FD"
VERSION = 1

MESSAGE = struct.Struct("<IiQQQQ")
PAIR = struct.Struct("<QQ")
# The maximum number of files in a BACKING_OPEN, and so of pairs in a message.
MOST_FILES = 16

HELLO = 1
PREPARED = 2
MOUNT = 3
DEPOSIT = 4
SERVING = 5
BACKING_OPEN = 6
BACKING_CLOSE = 7
TICK = 8
ENDING = 9
UNMOUNT = 10
KNOWN = 11
LOOK = 12

WELCOME = 32
MOUNTED = 33
TAKE = 34
ENTRY = 35
BACKING_OPENED = 36
BACKING_CLOSED = 37
QUIESCE = 38
ABLE = 39
LOOKED = 40

# The values of a in WELCOME: the daemon's task.
FRESH = 0
TAKE_OVER = 1
PREPARE = 2

# The exit status of a daemon that cannot use the mount's state.
CANNOT_TAKE_OVER = 3

# The kinds of each direction, with their numbers of descriptors; AS_MANY: b is the number.
AS_MANY = -1
FROM_DAEMON = dict.fromkeys(range(HELLO, LOOK + 1), 0) | {DEPOSIT: 1, BACKING_OPEN: AS_MANY}
FROM_KEEPER = dict.fromkeys(range(WELCOME, LOOKED + 1), 0) | {MOUNTED: 1, TAKE: 1}
# Sent by a broker to its keeper only: the files that were registered (b: how many; a pair of id
# and st_ino for each).
REGISTERED = 64
_WITH_PAIRS = frozenset((BACKING_OPENED, REGISTERED))
_LONGEST = MESSAGE.size + MOST_FILES * PAIR.size


class ProtocolError(OSError):
    """The peer sent a message that breaks the protocol.

    The message's descriptors `fds` stay open, because closing a hostile peer's descriptor may block
    for ever. They are closed when the process ends, or by a caller that trusts the peer.
    """

    def __init__(self, sentence: str, fds: Sequence[int] = ()) -> None:
        super().__init__(sentence)
        self.fds = fds


class KeeperMessage:
    """One message; `fds` are its descriptors, non-inheritable; `fd` is the first one, or -1."""

    def __init__(self, packed: bytes, fds: Sequence[int] = ()) -> None:
        numbers: tuple[int, ...] = MESSAGE.unpack_from(packed)
        self.kind, self.error, self.a, self.b, self.c, self.d = numbers
        self.pairs = list(PAIR.iter_unpack(packed[MESSAGE.size :]))
        self.fds = fds
        self.fd = fds[0] if fds else -1


def pack(kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, *, error: int = 0) -> bytes:
    return MESSAGE.pack(kind, error, a, b, c, d)


def with_pairs(message: bytes, pairs: Iterable[tuple[int, int]]) -> bytes:
    """Append pairs to a packed message, whose field b must be the number of pairs."""
    return message + b"".join(PAIR.pack(*pair) for pair in pairs)


def send(sock: socket.socket, message: bytes, fd: int = -1) -> None:
    """Send one packed message, with the descriptor `fd` unless that is negative.

    Raises:
        BlockingIOError: the socket is non-blocking and full; nothing was sent.
        OSError: the peer is gone.
    """
    sockets.send(sock, message, [fd] if fd >= 0 else [])


def receive(sock: socket.socket, kinds: Mapping[int, int]) -> KeeperMessage | None:
    """Receive a message of `kinds` (kind: number of descriptors); None if the socket is closed.

    Raises:
        BlockingIOError, TimeoutError: there is no message.
        ProtocolError: the message is malformed or of another kind.
    """
    data, fds, is_cut = sockets.receive(sock, _LONGEST + 1, MOST_FILES)
    if not data and not fds:
        return None
    if is_cut or len(data) < MESSAGE.size or (len(data) - MESSAGE.size) % PAIR.size:
        raise ProtocolError(f"a message of {len(data)} bytes, with {len(fds)} descriptors", fds)
    message = KeeperMessage(data, fds)
    if message.kind not in kinds:
        raise ProtocolError(f"a message of kind {message.kind}", fds)
    count = len(message.pairs)
    if count != (message.b if message.kind in _WITH_PAIRS else 0):
        raise ProtocolError(f"{count} pairs with a message of kind {message.kind}", fds)
    due = kinds[message.kind]
    if due == AS_MANY:
        due = message.b or AS_MANY
    elif message.kind == MOUNTED and message.error:
        due = 0
    if len(fds) != due:
        raise ProtocolError(f"{len(fds)} descriptors with a message of kind {message.kind}", fds)
    return message
