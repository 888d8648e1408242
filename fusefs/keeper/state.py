"""The state of a keeper's mount: the part that outlives daemons and keepers.

The keeper has one state; each broker is forked with a copy and keeps it up to
date from the messages that it passes on, so that it can go on as the keeper. Both
change it through the same few methods.
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
    """Write one line to the log, which is standard error, if that takes it at once."""
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
        # Another name of the mountpoint, which mount(2) takes where an automounter waits.
        self.mount_at: str = given.get("mount_at", self.mountpoint)
        # The launcher's lock on the mountpoint, held until it is mounted: if the launcher is killed
        # meanwhile, no second mount is made over this one.
        self.claim: int | None = given.get("claim")
        self.source: str = given["source"]
        # The options of mount(2) but fd=, and its MS_ flags.
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
        # What the kernel reads ahead of a sequential reader; set after mounting.
        self.read_ahead_kib: int | None = given.get("read_ahead_kib")
        # The socket of the supervisor that starts the daemons and holds a copy of the descriptor,
        # and the mount's number there. Without one the keeper starts daemons itself, also where
        # none listens, unless `is_supervisor_needed`.
        self.supervisor: str | None = given.get("supervisor")
        self.number: int = given.get("number", 0)
        self.is_supervisor_needed: bool = given.get("is_supervisor_needed", False)

    def release_claim(self) -> None:
        """Let others mount on the mountpoint, or what is mounted there by now."""
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None


class Program:
    """A daemon's command line, and the `settings` that go to its standard input."""

    def __init__(self, command: list[str], settings: str) -> None:
        self.command = command
        self.settings = settings


class KeeperState:
    """The mount, its registered files and its history. Times are monotonic seconds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        # What to return to while the program of an upgrade has not served yet.
        self.fallback: Program | None = None
        self.fuse_fd = -1
        self.connection = 0  # 0: not mounted yet
        # Whether it was mounted from the keeper's PID namespace, so that requests have the
        # numbers that processes have there. Of a mount that is adopted that is not known.
        self.is_ours = False
        self.has_served = False
        self.has_resend = False
        # Whether all requests that were read are answered: the last daemon has
        # finished, and none has served since.
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
        self.pauses_s = 0.0  # all of them

    def paused(self, since: float) -> None:
        """No daemon answers requests any more, since this time unless it was so before."""
        if self.pause_since is None:
            self.pause_since = since

    def serving(self, has_resend: bool) -> float:
        """A daemon answers requests; returns how long none did, in seconds."""
        self.has_served = True
        self.has_resend = has_resend
        self.is_all_answered = False
        self.fallback = None
        return self.resumed()

    def resumed(self) -> float:
        """The pause is over; returns how long it was, in seconds."""
        if self.pause_since is None:
            return 0.0
        pause_s = time.monotonic() - self.pause_since
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
        self.pauses_s += pause_s
        self.pause_since = None
        return pause_s

    @property
    def can_go_on(self) -> bool:
        """True if another daemon could answer all requests that are unanswered."""
        return self.has_resend or self.is_all_answered

    def died(self, reason: str) -> None:
        """Count a restart: the daemon has died, for this reason."""
        self.restarts += 1
        self._was_replaced(reason)

    def upgraded(self) -> None:
        """Count an upgrade: another daemon has taken the mount over."""
        self.upgrades += 1
        self._was_replaced("upgrade")

    def _was_replaced(self, reason: str) -> None:
        self.last_death_ns = time.time_ns()
        self.last_reason = reason
        self.in_flight = 0


def abort_own(state: KeeperState) -> None:
    """Abort the connection, unless it has ended: the number may be another's. Raises OSError."""
    if state.fuse_fd < 0 or not fuse_connection.is_disconnected(state.fuse_fd):
        fuse_connection.abort(state.connection)


def describe_end(status: int | None) -> str:
    """The end of a process, from waitpid's status; None where it was not our child."""
    if status is None:
        return "ended while somebody else watched it"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"


def was_killed(status: int | None) -> bool:
    """True if it was killed by another process: SIGKILL, or unknown."""
    return status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def cannot_take_over(status: int | None) -> bool:
    """True if it reported that another daemon would fail as well."""
    return status is not None and os.waitstatus_to_exitcode(status) == CANNOT_TAKE_OVER


def shell_status(status: int | None) -> int:
    """An exit status for our own end."""
    code = os.waitstatus_to_exitcode(status) if status is not None else 1
    return 128 - code if code < 0 else code
