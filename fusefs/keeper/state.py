"""The state of a keeper's mount, which outlives daemons and keepers.

Each broker is forked with a copy of the keeper's state and keeps it up to date from
the messages that it passes on, so that it can become the keeper. Keeper and broker
change their states through the same few methods.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time

from fusefs.keeper.protocol import CANNOT_TAKE_OVER
from fusefs.linux import fuse_connection, log_line
from fusefs.linux.libc import MS_RDONLY
from fusefs.linux.processes import Credentials

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

NEVER = math.inf


def log(sentence: str, level: str = "WARNING") -> None:
    """Write one line to the log (standard error), or drop it if the write would block."""
    line = log_line.line(level, "fusefs.keeper", sentence) + "\n"
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    # A full disk, or a pipe without a reader, must not end or hang a mount.
    with contextlib.suppress(OSError):
        if poll.poll(0):
            os.write(2, line.encode(errors="surrogateescape"))


class Configuration:
    """The constants of a keeper, from the JSON object on its standard input."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.mountpoint: str = given["mountpoint"]
        # The descriptor that locks the mountpoint, held until the mount is made: if the launcher
        # is killed before, no other command mounts on the same directory.
        self.claim: int | None = given.get("claim")
        # The path for mount(2). The mountpoint's owner may put a symbolic link in its place
        # meanwhile, and an automounter lets access by the path wait for this mount.
        self.mount_at = self.mountpoint if self.claim is None else f"/proc/self/fd/{self.claim}"
        self.source: str = given["source"]
        # The options of mount(2) except fd=, and its MS_ flags.
        self.mount_data: str = given["mount_data"]
        self.mount_flags: int = given["mount_flags"]
        self.is_read_only = bool(self.mount_flags & MS_RDONLY)
        self.is_privileged: bool = given["privileged"]
        self.credentials = Credentials(given["uid"], given["gid"], given["groups"])
        self.cache_device = os.stat(given["cache_dir"]).st_dev
        self.control: str = given["control"]
        self.most_backing_ids: int = given["most_backing_ids"]
        self.hang_s = float(given["hang_s"])
        self.max_pause_s = float(given["max_pause_s"])
        # The kernel's read-ahead, set after mounting; None leaves it as it is.
        self.read_ahead_kib: int | None = given.get("read_ahead_kib")
        # The socket of the supervisor that starts the daemons and holds a copy of the descriptor,
        # and the mount's number there. Without a socket the keeper starts daemons itself; also if
        # no process listens there, unless `is_supervisor_needed`.
        self.supervisor: str | None = given.get("supervisor")
        self.number: int = given.get("number", 0)
        self.is_supervisor_needed: bool = given.get("is_supervisor_needed", False)

    def release_claim(self) -> None:
        """Release the launcher's lock on the mountpoint."""
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None


class Program:
    """A daemon's command line, and the `settings` that go to its standard input."""

    def __init__(self, command: list[str], settings: str) -> None:
        self.command = command
        self.settings = settings


class KeeperState:
    """The state of a mount, its registered files and its history. Times are monotonic seconds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        # The old program, which is started again if an upgrade's program ends before it serves.
        self.fallback: Program | None = None
        self.fuse_fd = -1
        self.connection = 0  # 0: not mounted yet
        # True if the mount was made in the keeper's PID namespace, so that the pids in requests
        # are valid there. False for a mount that was taken over: unknown.
        self.is_ours = False
        self.has_served = False
        self.has_resend = False
        # True if all requests that were read are answered: the last daemon has
        # finished, and no other has served since.
        self.is_all_answered = False
        # Registered files: backing id to st_ino. They are all on one device.
        self.files: dict[int, int] = {}
        self.in_flight = 0
        self.restarts = 0  # after a death
        self.upgrades = 0
        self.quick_deaths = 0
        self.last_death_ns = 0
        self.last_reason = ""
        self.keeper_failures = 0
        self.pause_since: float | None = None
        self.longest_pause_s = 0.0
        self.pauses_s = 0.0  # the sum of all pauses

    def paused(self, since: float) -> None:
        """Begin a pause (no daemon answers requests) at `since`, if none has begun already."""
        if self.pause_since is None:
            self.pause_since = since

    def serving(self, has_resend: bool) -> float:
        """Record that a daemon serves now; return the length of the pause before, in seconds."""
        self.has_served = True
        self.has_resend = has_resend
        self.is_all_answered = False
        self.fallback = None
        return self.resumed()

    def resumed(self) -> float:
        """End the pause and return its length in seconds, 0 if there was none."""
        if self.pause_since is None:
            return 0.0
        pause_s = time.monotonic() - self.pause_since
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
        self.pauses_s += pause_s
        self.pause_since = None
        return pause_s

    @property
    def can_go_on(self) -> bool:
        """True if another daemon would get all requests that are still unanswered."""
        return self.has_resend or self.is_all_answered

    def note_end(self, reason: str) -> None:
        """Record the time and the reason of a daemon's end; no request is in flight any more."""
        self.last_death_ns = time.time_ns()
        self.last_reason = reason
        self.in_flight = 0


def abort_own(state: KeeperState) -> None:
    """Abort the mount's connection, unless it has ended: another mount may have its number then."""
    if state.fuse_fd >= 0 and fuse_connection.is_disconnected(state.fuse_fd):
        return
    try:
        fuse_connection.abort(state.connection)
    except OSError as error:
        # The connection ends in any case when its last descriptor is closed.
        log(f"its connection cannot be aborted: {error.strerror}")


def describe_end(status: int | None) -> str:
    """Describe a process's end for the log; `status` is waitpid's, or None if it is unknown."""
    if status is None:
        return "ended while somebody else watched it"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"


def was_killed(status: int | None) -> bool:
    """True if the process was killed with SIGKILL, or if its status is unknown (None)."""
    return status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def cannot_take_over(status: int | None) -> bool:
    """True if a daemon's exit status says that another daemon would fail as well."""
    return status is not None and os.waitstatus_to_exitcode(status) == CANNOT_TAKE_OVER


def shell_status(status: int | None) -> int:
    """Return the exit status that shells give for waitpid's `status`; 1 for None."""
    code = os.waitstatus_to_exitcode(status) if status is not None else 1
    return 128 - code if code < 0 else code
