"""One daemon and its clerk, as the keeper sees them."""

from __future__ import annotations

import os
import socket
import time

from fusefs.keeper import protocol as wire
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.state import Configuration, Ledger, Program
from fusefs.keeper.supervisor_protocol import Process
from fusefs.keeper.system import spawn

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

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
        "process",
        "program",
        "reason",
        "served",
        "socket",
        "status",
        "step",
    )

    def __init__(self, process: Process, channel: socket.socket, program: Program) -> None:
        self.process = process
        self.pid = process.pid
        self.pidfd = process.pidfd
        self.socket = channel
        self.program = program
        self.is_child = process.supervisor is None
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

    def close(self) -> None:
        """Close what we have of it."""
        os.close(self.pidfd)
        self.socket.close()
        if self.process.supervisor is not None:
            self.process.supervisor.close()


def start_daemon(program: Program, configuration: Configuration, *, is_beside: bool) -> Daemon:
    """Start a daemon, or have it started: with settings on its standard input, and our output.

    It is the mount's only one, unless it is to be beside another, in an upgrade.

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
        channel = theirs.fileno()
        process = _start(program.command, configuration, channel, settings, is_beside=is_beside)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(settings)
    return Daemon(process, ours, program)


def _start(
    command: list[str], configuration: Configuration, channel: int, stdin: int, *, is_beside: bool
) -> Process:
    credentials, launcher = configuration.credentials, configuration.launcher
    if launcher is not None:
        try:
            return supervisor_protocol.launch(
                launcher.socket, launcher.mount, uid=credentials.uid, gid=credentials.gid,
                channel=channel, stdin=stdin, stdout=1, is_beside=is_beside,
            )  # fmt: skip
        except (FileNotFoundError, ConnectionRefusedError):
            if launcher.is_needed:
                raise
    pid = spawn(
        command,
        stdin=stdin,
        stdout=1,
        kept=[channel],
        environment={**os.environ, wire.ENVIRONMENT: str(channel)},
        credentials=credentials,
    )
    return Process(pid, os.pidfd_open(pid))


def describe(configuration: Configuration, ledger: Ledger, daemon: Daemon | None) -> dict[str, Any]:
    """What a keeper tells about itself, its daemon and its mount."""
    since = ledger.pause_since
    return {
        "pid": os.getpid(),
        "daemon": daemon.pid if daemon is not None else None,
        "supervisor": daemon.process.supervisor_number if daemon is not None else 0,
        "clerk": daemon.clerk.pid if daemon is not None and daemon.clerk is not None else None,
        "is_serving": daemon is not None and daemon.served is not None and since is None,
        "restarts": ledger.restarts,
        "last_death_ns": ledger.last_death_ns,
        "last_reason": ledger.last_reason,
        "pause_s": 0.0 if since is None else time.monotonic() - since,
        "longest_pause_s": ledger.longest_pause_s,
        "backing_ids": len(ledger.files),
        "in_flight": ledger.in_flight,
        "mountpoint": configuration.mountpoint,
        "connection": ledger.connection,
        "is_privileged": configuration.is_privileged,
    }
