"""One daemon and its clerk, as the keeper sees them."""

from __future__ import annotations

import os
import socket
import time

from fusefs.kernel import keeper_wire as wire
from fusefs.kernel.keeper_ledger import Program
from fusefs.kernel.keeper_system import Credentials, spawn

NEVER = float("inf")

# How far a daemon is on its way out.
ALIVE = 0
WARNED = 1  # silent for too long; writing its stacks to the log
LEAVING = 2  # told to go, or its socket is closed
KILLED = 3
DEAD = 4  # its clerk may still have something to say


class Clerkship:
    """A clerk's process, and the keeper's non-blocking end of the socket to it."""

    __slots__ = ("channel", "pid")

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    def tell(self, packed: bytes) -> bool:
        """Send a message; False if the clerk is dead or does not listen."""
        try:
            wire.send(self.channel, packed)
        except OSError:
            return False
        return True


class Daemon:
    """A daemon from its start to its burial. Times are monotonic seconds.

    `socket` is our end of its channel. Clerks read it; we hold it, so that the
    daemon sees it closed only when clerk and keeper are both dead.
    `deadline` is when the keeper has to do something about it.
    """

    __slots__ = (
        "clerk",
        "deadline",
        "heard",
        "is_child",
        "is_drained",
        "is_ending",
        "is_faulty",
        "is_incoming",
        "is_prepared",
        "is_quiesced",
        "pid",
        "pidfd",
        "program",
        "reason",
        "served",
        "socket",
        "status",
        "step",
    )

    def __init__(self, pid: int, pidfd: int, channel: socket.socket, program: Program) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.socket = channel
        self.program = program
        self.is_child = True
        self.clerk: Clerkship | None = None
        self.step = ALIVE
        self.deadline = NEVER
        self.heard = time.monotonic()
        self.served: float | None = None
        self.is_incoming = False  # it is to take over from another one
        self.is_prepared = False
        self.is_quiesced = False
        self.is_ending = False  # it said so
        self.is_drained = False  # whatever it said has been heard
        self.is_faulty = False  # killed for what it did, so its death counts as a crash
        self.reason = ""
        self.status: int | None = None


def start_daemon(program: Program, credentials: Credentials) -> Daemon:
    """Start a daemon: settings on its standard input, our standard output and error.

    Raises:
        OSError: its program could not be executed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # Like a pipe to the reader, but nobody waits for one who does not read.
    settings = os.memfd_create("settings")
    try:
        os.write(settings, program.settings.encode())
        os.lseek(settings, 0, os.SEEK_SET)
        pid = spawn(
            program.command,
            stdin=settings,
            stdout=1,
            kept=theirs.fileno(),
            environment={**os.environ, wire.ENVIRONMENT: str(theirs.fileno())},
            credentials=credentials,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(settings)
    return Daemon(pid, os.pidfd_open(pid), ours, program)
