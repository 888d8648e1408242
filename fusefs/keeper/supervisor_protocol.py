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

Messages are those of protocol.py; d is the mount's number. One of another version is
of no kind that is known here, and refused.

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
    COUNTED  a: how many
    HELD     a: the number of the mount's connection; + a copy of its descriptor
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator

from fusefs.keeper import protocol as wire
from fusefs.linux import sockets
from fusefs.linux.processes import pid_behind, send_signal

# Their second byte is the protocol's version.
LAUNCH = 0x101
ADOPT = 0x102
SIGNAL = 0x103
COUNT = 0x104
END = 0x105
HOLD = 0x106
DROP = 0x107
NEXT = 0x108

STARTED = 0x120
REFUSED = 0x121
ENDED = 0x122
COUNTED = 0x123
HELD = 0x124

# With their numbers of descriptors.
KINDS = {LAUNCH: 4} | dict.fromkeys((ADOPT, STARTED, HOLD, HELD), 1)
KINDS |= dict.fromkeys((SIGNAL, COUNT, END, DROP, NEXT, REFUSED, ENDED, COUNTED), 0)

# Under this variable a daemon finds the socket on which it hears of another keeper.
ENVIRONMENT = "FUSEFS_SUPERVISOR_FD"
# What of a keeper's environment is a daemon's too. The rest is the container's own.
INHERITED = ("AWS_", "FUSEFS_")

# For the supervisor, which has nothing to wait for but the execution of a program.
ANSWER_S = 5.0


def pack(kind: int, mount: int = 0, a: int = 0, b: int = 0, c: int = 0) -> bytes:
    return wire.pack(kind, a, b, c, mount)


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
                wire.send(self.supervisor, pack(SIGNAL, a=number))
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
            message = wire.receive(self.supervisor, KINDS)
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
    """Be the keeper of the mount's daemon that has none; raises OSError if there is none."""
    return _begin(path, pack(ADOPT, mount), channel)


def count(path: str, mount: int = 0) -> int:
    """The number of daemons for a mount, or all; raises OSError if no process listens."""
    with connect(path) as sock:
        return ask(sock, pack(COUNT, mount)).a


def end(path: str, mount: int) -> int:
    """Kill a mount's daemons; tell how many could go and have not. Raises OSError as `count`."""
    with connect(path) as sock:
        return ask(sock, pack(END, mount)).a


def hold(path: str, mount: int, connection: int, fd: int) -> None:
    """Have the supervisor hold a copy of a mount's descriptor; raises OSError if it does not."""
    with connect(path) as sock:
        ask(sock, pack(HOLD, mount, connection), fd)


def drop(path: str, mount: int, connection: int) -> None:
    """Have a descriptor held no longer; raises OSError if no process listens there."""
    with connect(path) as sock:
        ask(sock, pack(DROP, mount, connection))


def held(path: str, mount: int = 0, connection: int = 0) -> Iterator[tuple[int, int, int]]:
    """Held descriptors behind this mount and connection: both numbers, and a copy of each.

    Raises:
        OSError: no process listens there.
    """
    with connect(path) as sock:
        while (answer := ask(sock, pack(NEXT, mount, connection))).kind == HELD:
            mount, connection = answer.d, answer.a
            yield mount, connection, answer.fds[0]


def fetch(path: str, mount: int, connection: int) -> int | None:
    """A copy of a mount's descriptor; None if it is not held. Raises OSError as `held`."""
    for found in held(path, mount, connection - 1):
        if found[:2] == (mount, connection):
            return found[2]
        os.close(found[2])
        break
    return None


def connect(path: str) -> socket.socket:
    """A connection to the supervisor at `path`; raises OSError if no process listens."""
    return sockets.connect(path, ANSWER_S, socket.SOCK_SEQPACKET)


def ask(sock: socket.socket, question: bytes, *fds: int) -> wire.KeeperMessage:
    """The answer to a question; raises OSError for a refusal, or if there is no answer."""
    sockets.send(sock, question, fds)
    message = wire.receive(sock, KINDS)
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
            raise wire.ProtocolError(f"an answer of kind {answer.kind}", answer.fds)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    [pidfd] = answer.fds
    return ProcessHandle(pid_behind(pidfd), pidfd, sock, answer.a)
