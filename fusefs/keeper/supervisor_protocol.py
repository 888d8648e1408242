"""The messages between keepers and the supervisor that starts their daemons elsewhere.

The supervisor (`csi.daemons.supervisor`) listens on a named AF_UNIX, SOCK_SEQPACKET
socket, for root alone. A keeper connects for each daemon that it wants, and the
connection is that daemon's from then on: the keeper signals it there, as its
PID namespace may not reach it, and hears of its end. The connection's end is
the keeper's: the daemon goes on without one, until another adopts it.

The supervisor also is the descriptor store. A FUSE mount lives for as long as any
process holds its /dev/fuse descriptor; the keeper opens it, and once it is mounted
the broker, the daemon and the supervisor have copies. Each next daemon gets it from
a broker, after the supervisor was given it once more; the next keeper gets it from
the supervisor. So the containers of both sides may be replaced, one at a time.

Every message is one `MESSAGE`: version, kind, the mount's number and three
numbers. One of another version is refused.

To the supervisor:

    LAUNCH   a: uid, b: gid, c: 1 if the mount's daemon goes on beside it, else the
             daemons that the mount may have are killed before; + the daemon's
             end of the socket to its keeper, what its standard input and output
             are to be, and a file with its part of the environment, a JSON
             object. Answered by STARTED or REFUSED.
    ADOPT    + the daemon's end of the socket to its new keeper. Answered likewise.
    SIGNAL   a: its number. Only after STARTED; not answered.
    COUNT    how many daemons there are for the mount, or 0 for all; by COUNTED
    END      kill the mount's daemons; COUNTED tells how many are still there, but
             for those that hang in the kernel
    HOLD     a: the number of the mount's connection; + a copy of its descriptor, held
             until DROP, or until the mount is gone. Answered by COUNTED or REFUSED.
    DROP     a: likewise. Answered by COUNTED: 1, or 0 if it was not held.
    NEXT     a: likewise. Answered by HELD for what follows this mount and connection
             in the order of both, or by COUNTED at the end.

From the supervisor:

    STARTED  a: the supervisor's number; + a pidfd
    REFUSED  a: errno
    ENDED    a: the daemon's status from waitpid
    COUNTED  the mount's number, a: how many
    HELD     the mount's number, a: its connection's; + a copy of its descriptor
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Iterator

from fusefs.linux import sockets
from fusefs.linux.processes import pid_behind, send_signal

VERSION = 1

MESSAGE = struct.Struct("<IIQQQQ")

LAUNCH = 1
ADOPT = 2
SIGNAL = 3
COUNT = 4
END = 5
HOLD = 6
DROP = 7
NEXT = 8

STARTED = 32
REFUSED = 33
ENDED = 34
COUNTED = 35
HELD = 36

_DESCRIPTORS = {LAUNCH: 4, ADOPT: 1, STARTED: 1, HOLD: 1, HELD: 1}
_MOST_DESCRIPTORS = 4

# Under this variable a daemon finds the socket on which it hears of another keeper.
ENVIRONMENT = "FUSEFS_SUPERVISOR_FD"
# What of a keeper's environment is a daemon's too. The rest is the container's own.
INHERITED = ("AWS_", "FUSEFS_")

# For the supervisor, which has nothing to wait for but the execution of a program.
ANSWER_S = 5.0


class SupervisorProtocolError(OSError):
    """The other side does not speak as it should; the message says how."""


class SupervisorMessage:
    """One message, and the descriptors that came with it, non-inheritable."""

    def __init__(self, packed: bytes, fds: list[int]) -> None:
        self.version: int
        self.kind: int
        self.mount: int
        self.a: int
        self.b: int
        self.c: int
        self.version, self.kind, self.mount, self.a, self.b, self.c = MESSAGE.unpack(packed)
        self.fds = fds

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def pack(kind: int, mount: int = 0, a: int = 0, b: int = 0, c: int = 0) -> bytes:
    return MESSAGE.pack(VERSION, kind, mount, a, b, c)


def send(sock: socket.socket, packed: bytes, *fds: int) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone, or does not take it.
    """
    sockets.send(sock, packed, fds)


def receive(sock: socket.socket) -> SupervisorMessage | None:
    """One message; None when the other side is gone.

    Raises:
        BlockingIOError, TimeoutError: there is none.
        SupervisorProtocolError: it is something else.
    """
    data, fds, is_cut = sockets.receive(sock, MESSAGE.size + 1, _MOST_DESCRIPTORS)
    if not data and not fds:
        return None
    is_whole = len(data) == MESSAGE.size and not is_cut
    message = SupervisorMessage(data if is_whole else bytes(MESSAGE.size), fds)
    if message.version == VERSION and len(fds) == _DESCRIPTORS.get(message.kind, 0):
        return message
    message.close()
    raise SupervisorProtocolError(
        f"{len(data)} bytes, version {message.version}, kind {message.kind}"
    )


# --- for keepers --------------------------------------------------------------


class ProcessHandle:
    """A daemon's process: a child of this one, or a supervisor's, with the connection to that."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        supervisor: socket.socket | None = None,
        supervisor_number: int = 0,
    ) -> None:
        self.pid = pid  # 0 where it has none in this PID namespace
        self.pidfd = pidfd
        self.supervisor = supervisor
        self.supervisor_number = supervisor_number

    def signal(self, number: int) -> None:
        """Signal it; it may have ended already."""
        if self.supervisor is not None:
            try:
                send(self.supervisor, pack(SIGNAL, a=number))
                return
            except OSError:
                pass  # it may be in reach even so
        send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def poll_end(self) -> int | None:
        """Its status from waitpid, once the supervisor's socket is readable; else None."""
        assert self.supervisor is not None
        try:
            message = receive(self.supervisor)
        except OSError:
            return None
        return message.a if message is not None and message.kind == ENDED else None


def launch(
    path: str,
    mount: int,
    *,
    uid: int,
    gid: int,
    channel: int,
    stdin: int,
    stdout: int,
    is_beside: bool = False,
) -> ProcessHandle:
    """Have the supervisor at `path` start a daemon for the mount of this number.

    It is the mount's only one, unless it is to be beside another, in an upgrade.

    Raises:
        OSError: no process listens there, or it could not be started.
    """
    inherited = {name: text for name, text in os.environ.items() if name.startswith(INHERITED)}
    environment = os.memfd_create("environment")
    try:
        os.write(environment, json.dumps(inherited).encode())
        os.lseek(environment, 0, os.SEEK_SET)
        question = pack(LAUNCH, mount, uid, gid, is_beside)
        return _begin(path, question, channel, stdin, stdout, environment)
    finally:
        os.close(environment)


def adopt(path: str, mount: int, channel: int) -> ProcessHandle:
    """Be the keeper of the mount's daemon, whose own is gone.

    Raises:
        OSError: no process listens there, or there is no such daemon.
    """
    return _begin(path, pack(ADOPT, mount), channel)


def count(path: str, mount: int = 0) -> int:
    """The number of the supervisor's daemons for the mount, or for all mounts.

    Raises:
        OSError: no process listens there.
    """
    with connect(path) as sock:
        return ask(sock, pack(COUNT, mount)).a


def end(path: str, mount: int) -> int:
    """Kill the mount's daemons; tell how many have not gone yet, though they could.

    Raises:
        OSError: no process listens there.
    """
    with connect(path) as sock:
        return ask(sock, pack(END, mount)).a


def hold(path: str, mount: int, connection: int, fd: int) -> None:
    """Have the supervisor hold a copy of a mount's descriptor.

    Raises:
        OSError: it does not.
    """
    with connect(path) as sock:
        ask(sock, pack(HOLD, mount, connection), fd)


def drop(path: str, mount: int, connection: int) -> None:
    """Have a mount's descriptor held no longer.

    Raises:
        OSError: no process listens there.
    """
    with connect(path) as sock:
        ask(sock, pack(DROP, mount, connection))


def held(path: str, mount: int = 0, connection: int = 0) -> Iterator[tuple[int, int, int]]:
    """Copies of what is held behind this mount and connection: both numbers, and a descriptor.

    The descriptors are the caller's to close.

    Raises:
        OSError: no process listens there.
    """
    with connect(path) as sock:
        while (answer := ask(sock, pack(NEXT, mount, connection))).kind == HELD:
            mount, connection = answer.mount, answer.a
            yield mount, connection, answer.fds[0]


def fetch(path: str, mount: int, connection: int) -> int | None:
    """A copy of a mount's descriptor; None if it is not held.

    Raises:
        OSError: no process listens there.
    """
    for found in held(path, mount, connection - 1):
        if found[:2] == (mount, connection):
            return found[2]
        os.close(found[2])
        break
    return None


def connect(path: str) -> socket.socket:
    """A connection to the supervisor that listens on `path`.

    Raises:
        OSError: no process does.
    """
    return sockets.connect(path, ANSWER_S, socket.SOCK_SEQPACKET)


def ask(sock: socket.socket, question: bytes, *fds: int) -> SupervisorMessage:
    """The answer to a question.

    Raises:
        OSError: it is a refusal, or there is none.
    """
    send(sock, question, *fds)
    message = receive(sock)
    if message is None:
        raise ConnectionResetError("the supervisor has ended")
    if message.kind == REFUSED:
        raise OSError(message.a, f"the supervisor refused: {os.strerror(message.a)}")
    return message


def _begin(path: str, question: bytes, *fds: int) -> ProcessHandle:
    sock = connect(path)
    try:
        answer = ask(sock, question, *fds)
        if answer.kind != STARTED:
            answer.close()
            raise SupervisorProtocolError(f"an answer of kind {answer.kind}")
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    [pidfd] = answer.fds
    return ProcessHandle(pid_behind(pidfd), pidfd, sock, answer.a)
