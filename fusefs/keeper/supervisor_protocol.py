"""The messages between keepers and the supervisor that starts their daemons elsewhere.

The supervisor (`csi.daemons.supervisor`) listens on a named AF_UNIX, SOCK_SEQPACKET
socket that only root can connect to. A keeper makes one connection for each daemon
that it starts. Over it the keeper sends signals to the daemon, which may be in another
PID namespace, and learns when the daemon ends. When the connection closes, the keeper
is gone: the daemon goes on without a keeper, until a new keeper sends ADOPT.

The supervisor is also the descriptor store. A FUSE mount lives for as long as any process holds its
/dev/fuse descriptor. The keeper opens it; after mounting, the broker, the daemon and the supervisor
have copies. A daemon's successor gets the descriptor from a broker, after the keeper has sent the
supervisor a new copy; a keeper's successor gets it from the supervisor. So both sides' containers
may be replaced, one at a time.

Messages have the form of protocol.py; d is the mount's number. Messages of another
version have kinds that are unknown here, and are refused.

To the supervisor:

    LAUNCH   start a daemon; a: uid, b: gid, c: 0 to kill the mount's other daemons
             first, 1 to leave them; + the daemon's end of the socket to its keeper,
             its standard input, its standard output, and a file with a JSON object
             of environment variables. Answered by STARTED or REFUSED.
    ADOPT    become the keeper of the mount's daemon; + the daemon's end of the
             socket to this keeper. Answered by STARTED or REFUSED.
    SIGNAL   a: number of the signal for the daemon. Only after STARTED; not answered.
    COUNT    count the daemons of the mount, or of all (d: 0). Answered by COUNTED.
    END      kill the mount's daemons. COUNTED: those that still exist, without those
             that hang in the kernel.
    HOLD     a: the number of the mount's connection; + a copy of its descriptor, held
             until DROP, or until the mount is gone. Answered by COUNTED or REFUSED.
    DROP     a: as in HOLD. Answered by COUNTED: 1, or 0 if no descriptor was held.
    NEXT     a: as in HOLD. Answered by HELD for the next held descriptor after this
             one, ordered by mount and connection, or by COUNTED after the last.

From the supervisor:

    STARTED  a: the supervisor's number; + a pidfd
    REFUSED  a: errno
    ENDED    a: the daemon's status from waitpid
    COUNTED  a: the count
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
from fusefs.linux.files import closing
from fusefs.linux.processes import pid_behind, send_signal

# The second byte of each kind is the protocol's version.
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

# The kinds, with their numbers of descriptors.
KINDS = {LAUNCH: 4} | dict.fromkeys((ADOPT, STARTED, HOLD, HELD), 1)
KINDS |= dict.fromkeys((SIGNAL, COUNT, END, DROP, NEXT, REFUSED, ENDED, COUNTED), 0)

# The variable with the number of the socket from which a daemon receives new keepers.
ENVIRONMENT = "FUSEFS_SUPERVISOR_FD"
# Prefixes of the variables that a keeper passes on to its daemons.
INHERITED = ("AWS_", "FUSEFS_")

# The supervisor answers soon: it waits for nothing but the execution of a program.
ANSWER_S = 5.0


def pack(kind: int, mount: int = 0, a: int = 0, b: int = 0, c: int = 0) -> bytes:
    return wire.pack(kind, a, b, c, mount)


# --- for keepers --------------------------------------------------------------


class ProcessHandle:
    """A daemon's process: a child of this keeper, or of the peer of the socket `supervisor`."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        supervisor: socket.socket | None = None,
        supervisor_number: int = 0,
    ) -> None:
        self.pid = pid  # 0 if the process has no pid in this PID namespace
        self.pidfd = pidfd
        self.supervisor = supervisor
        self.supervisor_number = supervisor_number

    def signal(self, number: int) -> None:
        """Send a signal to the process, which may have ended already."""
        if self.supervisor is not None:
            try:
                wire.send(self.supervisor, pack(SIGNAL, a=number))
                return
            except OSError:
                pass  # the pidfd may still reach it
        send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def poll_end(self) -> int | None:
        """Read the daemon's waitpid status from the supervisor's report; None without a report."""
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
    """Ask the supervisor at `path` to start a daemon for the mount of this number.

    `channel` is the daemon's end of the socket to this keeper. The mount's other daemons are killed
    first, unless `is_beside`, as in an upgrade.

    Raises:
        OSError: no process listens there, or the daemon could not be started.
    """
    inherited = {name: text for name, text in os.environ.items() if name.startswith(INHERITED)}
    with closing(os.memfd_create("environment")) as environment:
        os.write(environment, json.dumps(inherited).encode())
        os.lseek(environment, 0, os.SEEK_SET)
        question = pack(LAUNCH, mount, uid, gid, is_beside)
        return _begin(path, question, channel, stdin, stdout, environment)


def adopt(path: str, mount: int, channel: int) -> ProcessHandle:
    """Become the keeper of the mount's daemon, which gets `channel`; OSError if there is none."""
    return _begin(path, pack(ADOPT, mount), channel)


def count(path: str, mount: int = 0) -> int:
    """Count the daemons of a mount (0: of all); raises OSError if no process listens."""
    with connect(path) as sock:
        return ask(sock, pack(COUNT, mount)).a


def end(path: str, mount: int) -> int:
    """Kill a mount's daemons; return how many remain. Raises OSError if no process listens."""
    with connect(path) as sock:
        return ask(sock, pack(END, mount)).a


def hold(path: str, mount: int, connection: int, fd: int) -> None:
    """Give the supervisor a copy of a mount's descriptor to hold; raises OSError if it refuses."""
    with connect(path) as sock:
        ask(sock, pack(HOLD, mount, connection), fd)


def drop(path: str, mount: int, connection: int) -> None:
    """Ask the supervisor to close a held descriptor; raises OSError if no process listens."""
    with connect(path) as sock:
        ask(sock, pack(DROP, mount, connection))


def held(path: str, mount: int = 0, connection: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield (mount, connection, copy) for each descriptor that the supervisor holds.

    Ordered by these numbers, beginning after the given ones. The caller closes the copies.

    Raises:
        OSError: no process listens on `path`.
    """
    with connect(path) as sock:
        while (answer := ask(sock, pack(NEXT, mount, connection))).kind == HELD:
            mount, connection = answer.d, answer.a
            yield mount, connection, answer.fds[0]


def fetch(path: str, mount: int, connection: int) -> int | None:
    """Return a copy of a mount's held descriptor, or None; raises OSError if no process listens."""
    for found in held(path, mount, connection - 1):
        if found[:2] == (mount, connection):
            return found[2]
        os.close(found[2])
        break
    return None


def connect(path: str) -> socket.socket:
    """Connect to the supervisor at `path`; raises OSError if no process listens."""
    return sockets.connect(path, ANSWER_S, socket.SOCK_SEQPACKET)


def ask(sock: socket.socket, question: bytes, *fds: int) -> wire.KeeperMessage:
    """Send a question and return the answer; raises OSError if it is REFUSED or missing."""
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
