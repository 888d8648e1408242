"""The keeper's standby: a process that becomes the next daemon when the present one dies.

Most of the time between a daemon's death and the first answer of the next one
goes into imports. After quick deaths (`KeeperState.note_death`) the keeper has them
done beforehand, once: it starts a *template* (template.py), which imports what a
daemon needs, and has a standby forked from that. When the standby is to take over,
the keeper sends it a daemon's standard input, and has another one forked afterwards.

Neither of them has a mount, a file of the cache, settings, or more of the
environment than an interpreter needs, for there may be keys in it.

A standby is no daemon yet: its death, or the template's, does not count as a
daemon's, and neither is started again before a daemon dies. If they do not come up,
as with the program of an earlier version, the daemon is started without them.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable

from fusefs.keeper import protocol as wire
from fusefs.keeper import template
from fusefs.keeper.control import Loop
from fusefs.keeper.processes import DaemonProcess
from fusefs.keeper.state import NEVER, Configuration, KeeperState, Program, log
from fusefs.keeper.supervisor_protocol import ProcessHandle
from fusefs.linux import processes

# For the imports, or a fork: while a mount waits for it, and by itself.
WAIT_S = 10.0
READY_S = 60.0
# What the interpreter and its libraries read before there is an input.
INITIAL_VARIABLES = (
    "PATH",
    "HOME",
    "TZ",
    "TMPDIR",
    "LANG",
    "LC_",
    "LD_",
    "PYTHON",
    "MALLOC_",
    "GLIBC_",
    "OPENSSL_CONF",
    "VIRTUAL_ENV",
)


class _Waiting:
    """The template, or a standby; `socket` is our end of its standard input."""

    __slots__ = ("channel", "pid", "pidfd", "program", "socket")

    def __init__(self, program: Program, sock: socket.socket, channel: socket.socket | None):
        self.program = program
        self.socket = sock
        # Of a standby: our end of what will be a daemon's socket.
        self.channel = channel
        self.pid = 0
        self.pidfd = -1

    def is_at(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def close(self) -> None:
        self.socket.close()
        if self.channel is not None:
            self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Standby:
    """At most one template and one standby, from their start until they are used or end.

    `on_change` is called when the standby has become ready, or will not; `reap`
    gets the pid of a child that has been killed.
    """

    def __init__(
        self,
        configuration: Configuration,
        state: KeeperState,
        loop: Loop,
        *,
        on_change: Callable[[], None],
        reap: Callable[[int], None],
    ) -> None:
        self._configuration = configuration
        self._state = state
        self._loop = loop
        self._on_change = on_change
        self._reap = reap
        self._template: _Waiting | None = None
        self._is_template_ready = False
        self._standby: _Waiting | None = None  # without a pid until it is forked
        self._ready_by = self._late_at = NEVER
        self._is_late = False
        # Whether one has ended since the last daemon died.
        self._has_failed = False

    def describe(self) -> dict[str, int | None]:
        """The pids of the processes that there are."""
        return {
            "standby": self._standby.pid if self._standby is not None and self.is_ready else None,
            "template": self._template.pid if self._template is not None else None,
        }

    @property
    def is_ready(self) -> bool:
        return self._standby is not None and self._standby.pid > 0

    @property
    def is_soon_ready(self) -> bool:
        """Whether one is coming, and a mount without a daemon should wait for it."""
        return self._ready_by < NEVER and not self._is_late

    def prepare(self) -> None:
        """Have a standby of the present program, if that may be."""
        program = self._state.program
        for one in (self._standby, self._template):
            if one is not None and one.program is not program:
                self.dismiss("it is of another version")
        if self._standby is not None or not self._is_wanted(program):
            return
        try:
            if self._template is None:
                self._start_template(program)
            elif self._is_template_ready:
                self._fork_standby(self._template)
        except OSError as error:
            self._fail(f"cannot be started: {error}")

    def _is_wanted(self, program: Program) -> bool:
        if self._configuration.launcher is not None:
            return False  # a supervisor knows its daemons by their mounts, of which each has one
        may_help = self._state.has_resend and not (self._has_failed or program.is_unready)
        return may_help and self._state.expects_deaths(time.monotonic())

    def _start_template(self, program: Program) -> None:
        ours, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = _Waiting(program, ours, None)
        with stdin:
            try:
                pid = processes.spawn(
                    program.command,
                    stdin=stdin.fileno(),
                    stdout=1,
                    kept=[],
                    environment={
                        **_environment(INITIAL_VARIABLES),
                        template.VARIABLE: template.FOR_STANDBYS,
                    },
                    credentials=self._configuration.credentials,
                    yields_memory=_may_order_by_memory(),
                )
            except OSError:
                started.close()
                raise
        ours.setblocking(False)
        started.is_at(pid)
        self._template = started
        self._is_template_ready = False
        self._expect(time.monotonic())
        self._loop.watch(started.pidfd, select.POLLIN, self._on_template_exit)
        self._loop.watch(ours.fileno(), select.POLLIN, self._on_template_message)

    def _fork_standby(self, origin: _Waiting) -> None:
        ours, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours_too, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, ours_too):
            sock.setblocking(False)
        self._standby = _Waiting(origin.program, ours_too, ours)
        self._expect(time.monotonic())
        processes.adopt_orphans(True)
        with channel, stdin:
            fds = [channel.fileno(), stdin.fileno()]
            socket.send_fds(origin.socket, [template.FORK], fds)

    def _on_template_message(self) -> None:
        assert self._template is not None
        try:
            packet = self._template.socket.recv(64)
        except OSError:
            packet = b""
        if not packet:  # it has ended, or does so
            self._loop.forget(self._template.socket.fileno())
            return
        try:
            if packet == template.READY and not self._is_template_ready:
                self._is_template_ready = True
                self._fork_standby(self._template)
            elif len(packet) == template.PID.size and self._standby is not None:
                self._on_standby_forked(self._standby, *template.PID.unpack(packet))
            else:
                raise OSError("it sent what no template sends")
        except OSError as error:
            self._fail(f"does not come up: {error}")
            self._on_change()

    def _on_standby_forked(self, standby: _Waiting, pid: int) -> None:
        # Nothing else of ours may be taken for it, and it is there until it is waited for.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        processes.adopt_orphans(False)
        standby.is_at(pid)
        self._expect(NEVER)
        self._loop.watch(standby.pidfd, select.POLLIN, self._on_standby_exit)
        self._on_change()

    # --- their end ---

    def take(self) -> DaemonProcess | None:
        """Make the standby the daemon; None if there is none. The caller watches it."""
        standby = self._standby
        if standby is None or not standby.pid or standby.program is not self._state.program:
            return None
        assert standby.channel is not None
        self._standby = None
        self._loop.forget(standby.pidfd)
        try:
            given = json.loads(standby.program.settings) | {"environment": _environment(("",))}
            text = json.dumps(given).encode()
            has_got_it = not processes.has_ended(standby.pidfd) and (
                standby.socket.send(text) == len(text)
            )
        except (OSError, ValueError, TypeError):
            has_got_it = False
        if not has_got_it:
            self._end(standby, "could not take over")
            return None
        standby.socket.close()
        if _may_order_by_memory():
            processes.copy_memory_order(standby.pid)
        return DaemonProcess(
            ProcessHandle(standby.pid, standby.pidfd), standby.channel, standby.program
        )

    def dismiss(self, why: str) -> None:
        """End them, if they are there."""
        standby, self._standby = self._standby, None
        origin, self._template = self._template, None
        self._is_template_ready = False
        self._expect(NEVER)
        if standby is not None:
            self._end(standby, why)
        if origin is not None:
            self._end(origin, why)

    def _fail(self, why: str) -> None:
        self._has_failed = True
        self.dismiss(why)

    def _end(self, one: _Waiting, why: str) -> None:
        self._loop.forget(one.socket.fileno())
        if one.pid:
            log(f"the standby process {one.pid} is ended: {why}")
            self._loop.forget(one.pidfd)
            ProcessHandle(one.pid, one.pidfd).kill()
            self._reap(one.pid)
        else:
            processes.adopt_orphans(False)
        one.close()

    def _on_template_exit(self) -> None:
        """It goes; a standby that it has forked stays."""
        assert self._template is not None
        origin, self._template = self._template, None
        self._is_template_ready = False
        self._has_failed = True
        self._end(origin, "it has ended")
        if self._standby is not None and not self._standby.pid:
            self._fail("it was not forked")
        self._expect(NEVER)
        self._on_change()

    def _on_standby_exit(self) -> None:
        assert self._standby is not None
        standby, self._standby = self._standby, None
        self._has_failed = True
        self._end(standby, "it has ended")
        self._on_change()

    def close_in_child(self) -> None:
        """In a child of the keeper: close what would keep them waiting after the keeper's end."""
        for one in (self._template, self._standby):
            if one is not None:
                one.close()

    # --- time ---

    def daemon_died(self) -> None:
        """Others may do better than the last."""
        self._has_failed = False

    def deadline(self) -> float:
        """When they have waited for long enough, or are late; monotonic seconds."""
        if self._template is None and self._standby is None:
            return NEVER
        return min(self._late_at, self._ready_by, self._state.expects_deaths_until)

    def _expect(self, since: float) -> None:
        """Something is to become ready, from now on; nothing is, with NEVER."""
        self._late_at, self._ready_by = since + WAIT_S, since + READY_S
        self._is_late = False

    def check_clock(self, now: float) -> None:
        """End them if they are late, or have not been needed for long."""
        if now < self.deadline():
            return
        if self._late_at <= now < self._ready_by:
            self._late_at = NEVER
            self._is_late = True
        elif now >= self._ready_by:
            if self._template is not None:
                self._template.program.is_unready = True
            self._fail(f"not ready within {READY_S:.0f} s")
        else:
            self.dismiss("no daemon has died for long")
        self._on_change()


def _may_order_by_memory() -> bool:
    """Whether this process may have others end first where memory is short, and undo that."""
    return os.geteuid() == 0


def _environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """This process's, as far as it begins with one of these."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(prefixes) and name not in (wire.ENVIRONMENT, template.VARIABLE)
    }
