"""The keeper's processes: daemons and their clerks, from start to burial.

How one goes: a daemon that is silent for too long is asked for its stacks,
then killed. Once it is dead, its clerk may still have something to say; when
that has been heard too, the daemon is buried, and what follows is the
master's to decide (`keeper`). Nothing here waits for a process: those that do
not go, because they hang in the kernel, are remembered and left behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from fusefs.keeper import protocol as wire
from fusefs.keeper import system
from fusefs.keeper.broker import CUT_OFF, FROM_CLERK, REGISTERED, Clerk
from fusefs.keeper.control import Loop
from fusefs.keeper.daemon_process import (
    ALIVE,
    DEAD,
    KILLED,
    LEAVING,
    NEVER,
    WARNED,
    Clerkship,
    Daemon,
    start_daemon,
)
from fusefs.keeper.state import Configuration, Ledger, Program, log

DUMP_S = 0.5  # for the stacks of a daemon that hangs
CUT_OFF_S = 1.0  # between a daemon's closed socket and its death
DRAIN_S = 1.0  # for a clerk to say what it still knows
# A process in state D does not go; one with a write under way may come back.
LINGER_S = 5.0
END_S = 2.0

# Messages of a clerk between two looks at everything else.
BATCH = 64


class BecomeClerk(Exception):
    """Raised in a child of the keeper: what it is from now on."""

    def __init__(self, clerk: Clerk, channel: socket.socket) -> None:
        super().__init__()
        self.clerk = clerk
        self.channel = channel


class Household:
    """The processes of one mount.

    `note` gets what a daemon said, `bury` each daemon that is over, and
    `let_go` closes in a child of the keeper what is the keeper's alone.
    """

    def __init__(
        self,
        configuration: Configuration,
        ledger: Ledger,
        loop: Loop,
        *,
        note: Callable[[Daemon, wire.Message], None],
        bury: Callable[[Daemon], None],
        let_go: Callable[[], None],
    ) -> None:
        self._configuration = configuration
        self._ledger = ledger
        self._loop = loop
        self._master_notes = note
        self._master_buries = bury
        self._master_lets_go = let_go
        self.current: Daemon | None = None
        self.incoming: Daemon | None = None  # prepares itself, in an upgrade
        # The clerk of the last daemon, who would succeed us until there is another.
        self._spare: Clerkship | None = None
        self._lingering: list[int] = []  # pidfds
        self._corpses: dict[int, float] = {}  # pids, and since when
        self._aside: dict[str, int] = {}  # pids

    # --- beginning ---

    def start(self, program: Program, state: int, standby: Daemon | None = None) -> Daemon:
        """Start a daemon, unless a standby becomes one, and a clerk for it.

        Raises:
            OSError: its program could not be executed.
            BecomeClerk: in the child.
        """
        daemon = standby or start_daemon(
            program, self._configuration, is_beside=state == wire.PREPARE
        )
        point_to_null(1)  # the first one's alone, so that its end can be seen
        if state == wire.PREPARE:
            daemon.is_incoming = True
            self.incoming = daemon
            daemon.deadline = time.monotonic() + 2 * self._configuration.hang_s
        else:
            self.current = daemon
        if state == wire.TAKE_OVER:
            daemon.deadline = time.monotonic() + self._configuration.hang_s
        self._watch(daemon)
        self._fork_clerk(daemon, self._new_clerk(daemon, state))
        return daemon

    def adopt(self, daemon: Daemon, clerk: Clerk) -> None:
        """Watch a daemon that serves already, and give it a clerk."""
        point_to_null(1)  # nobody waits to hear that it serves
        self.current = daemon
        daemon.is_child = False
        daemon.deadline = time.monotonic() + self._configuration.hang_s
        self._watch(daemon)
        if clerk.is_cut_off:
            self._cut_off(daemon, is_breach=False)
        else:
            self._fork_clerk(daemon, clerk)

    def promote(self) -> None:
        """Let the daemon that has prepared itself take over."""
        daemon = self.incoming
        assert daemon is not None
        self.current, self.incoming = daemon, None
        daemon.is_incoming = False
        self._dismiss(daemon.clerk)
        daemon.clerk = None
        daemon.deadline = time.monotonic() + self._configuration.hang_s
        self._fork_clerk(daemon, self._new_clerk(daemon, wire.TAKE_OVER))

    def _watch(self, daemon: Daemon) -> None:
        supervisor = daemon.process.supervisor
        if supervisor is None:
            self._loop.watch(daemon.pidfd, select.POLLIN, partial(self._die, daemon))
        else:
            self._loop.watch(supervisor.fileno(), select.POLLIN, partial(self._hear_end, daemon))

    def _hear_end(self, daemon: Daemon) -> None:
        """Its supervisor says that it has ended, or is gone itself, which ends it as well."""
        assert daemon.process.supervisor is not None
        daemon.status = daemon.process.hear_end()
        self._loop.forget(daemon.process.supervisor.fileno())
        self._loop.watch(daemon.pidfd, select.POLLIN, partial(self._die, daemon))

    def _new_clerk(self, daemon: Daemon, state: int) -> Clerk:
        is_lingering = any(not system.has_ended(pidfd) for pidfd in self._lingering)
        return Clerk(
            self._configuration, self._ledger, daemon.socket, daemon.process, state, is_lingering
        )

    def _fork_clerk(self, daemon: Daemon, clerk: Clerk) -> None:
        if not daemon.is_incoming:
            # One at a time: two of them would both succeed us.
            self._dismiss(self._spare)
            self._spare = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as error:
            daemon.is_faulty = daemon.is_drained = True
            self.kill(daemon, f"got no clerk: {error.strerror}")
            return
        if pid == 0:
            try:
                ours.close()
                self._let_go(daemon)
                if daemon.is_prepared:
                    clerk.take()
            except OSError:
                os._exit(1)  # anything but a second keeper
            raise BecomeClerk(clerk, theirs)
        theirs.close()
        ours.setblocking(False)
        daemon.clerk = Clerkship(pid, ours)
        self._loop.watch(ours.fileno(), select.POLLIN, partial(self._hear_clerk, daemon))

    def _let_go(self, kept: Daemon | None = None) -> None:
        self._master_lets_go()
        for pidfd in self._lingering:
            os.close(pidfd)
        for daemon in (self.current, self.incoming):
            if daemon is not None and daemon is not kept:
                daemon.close()
            if daemon is not None and daemon.clerk is not None:
                daemon.clerk.channel.close()
        if self._spare is not None:
            self._spare.channel.close()

    def do_aside(self, name: str, work: Callable[[], None]) -> None:
        """Do what may wait in a child, unless it is still at the last work of this name."""
        if self._aside.get(name) in self._corpses:
            return
        try:
            pid = os.fork()
        except OSError as error:
            log(f"{name}: {error.strerror}")
            return
        if pid == 0:
            try:
                self._let_go()
                work()
            except Exception as error:
                log(f"{name}: {error}")
            finally:
                os._exit(0)
        self._aside[name] = pid
        self._corpses[pid] = time.monotonic()

    # --- time ---

    def deadlines(self) -> Iterator[float]:
        """When something has to be done about a process; monotonic seconds."""
        for daemon in (self.current, self.incoming):
            if daemon is not None:
                yield daemon.deadline

    def check_clock(self, now: float) -> None:
        """Do what is due."""
        for pid in list(self._corpses):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._corpses[pid]
        for daemon in (self.current, self.incoming):
            if daemon is not None and now >= daemon.deadline:
                self._overdue(daemon, now)

    def reap(self, pid: int) -> None:
        """Take note of the end of a child that was killed, when it comes."""
        self._corpses[pid] = time.monotonic()

    @property
    def has_successor(self) -> bool:
        """Whether a clerk would go on in our place, though there is no daemon."""
        return self._spare is not None

    def count_lingering(self, now: float) -> int:
        """How many processes hang in the kernel although they were killed."""
        return sum(now - since > LINGER_S for since in self._corpses.values())

    def _overdue(self, daemon: Daemon, now: float) -> None:
        hang_s = self._configuration.hang_s
        if daemon.step == ALIVE and daemon.is_incoming:
            self.kill(daemon, f"not ready within {2 * hang_s:.0f} s")
        elif daemon.step == ALIVE:
            daemon.reason = f"silent for {hang_s:.0f} s"
            log(f"the daemon {daemon.pid} has been {daemon.reason}; its stacks follow")
            self._ledger.paused(daemon.heard)
            daemon.step = WARNED
            daemon.deadline = now + DUMP_S
            daemon.process.signal(signal.SIGUSR1)
        elif daemon.step == WARNED:
            self.kill(daemon, daemon.reason)
        elif daemon.step == LEAVING:
            self.kill(daemon, "did not end when it was told to")
        elif daemon.step == KILLED:
            log(f"the daemon {daemon.pid} does not go away; it is left behind")
            self._lingering.append(os.dup(daemon.pidfd))
            if daemon.is_child:
                self._corpses[daemon.pid] = now
            self._bury(daemon)
        else:
            self._bury(daemon)

    # --- ending ---

    def kill(self, daemon: Daemon, reason: str) -> None:
        """End a daemon; `reason` is what is told about it, unless there is one already."""
        daemon.reason = daemon.reason or reason
        daemon.step = KILLED
        daemon.deadline = time.monotonic() + LINGER_S
        daemon.process.kill()

    def quiesce(self, daemon: Daemon, limit_s: float) -> None:
        """Let a daemon finish what it has begun, and go."""
        daemon.is_quiesced = True
        daemon.step = LEAVING
        daemon.deadline = time.monotonic() + limit_s
        if daemon.clerk is None or not daemon.clerk.tell(wire.pack(wire.QUIESCE)):
            self.kill(daemon, "could not be told to end")

    def end(self) -> None:
        """Kill them all, and wait shortly until they are gone."""
        for daemon in (self.current, self.incoming):
            if daemon is not None:
                daemon.process.kill()
                self._dismiss(daemon.clerk)
                if daemon.is_child and daemon.step != DEAD:
                    self._corpses[daemon.pid] = 0.0
        self._dismiss(self._spare)
        deadline = time.monotonic() + END_S
        self.current = self.incoming = None
        while self._corpses and time.monotonic() < deadline:
            time.sleep(0.005)
            self.check_clock(0.0)

    def _die(self, daemon: Daemon) -> None:
        self._loop.forget(daemon.pidfd)
        if daemon.is_child:
            _, daemon.status = os.waitpid(daemon.pid, 0)
        daemon.step = DEAD
        daemon.deadline = time.monotonic() + DRAIN_S
        if daemon.is_drained:
            self._bury(daemon)

    def _bury(self, daemon: Daemon) -> None:
        daemon.deadline = NEVER
        self._loop.forget(daemon.pidfd)
        if daemon.process.supervisor is not None:
            self._loop.forget(daemon.process.supervisor.fileno())
        daemon.close()
        if daemon.is_incoming:
            self.incoming = None
            self._dismiss(daemon.clerk)
        else:
            self.current = None
            if daemon.is_drained:
                self._spare = daemon.clerk
            else:
                self._abandon(daemon)
        self._master_buries(daemon)

    # --- clerks ---

    def _hear_clerk(self, daemon: Daemon) -> None:
        clerk = daemon.clerk
        assert clerk is not None
        for _ in range(BATCH):
            try:
                message = wire.receive(clerk.channel, FROM_CLERK)
            except BlockingIOError:
                return
            if message is None:
                self._lose_clerk(daemon)
                return
            self._hear(daemon, message)
            if daemon.clerk is not clerk or self._is_buried(daemon):
                return

    def _is_buried(self, daemon: Daemon) -> bool:
        return daemon is not self.current and daemon is not self.incoming

    def _hear(self, daemon: Daemon, message: wire.Message) -> None:
        daemon.heard = time.monotonic()
        if daemon.step == WARNED:
            log(f"the daemon {daemon.pid} is heard of again")
            daemon.step, daemon.reason = ALIVE, ""
            if daemon.served is not None:
                self._ledger.resumed()
        if daemon.step == ALIVE and not daemon.is_incoming:
            daemon.deadline = daemon.heard + self._configuration.hang_s
        if message.kind == CUT_OFF:
            self._cut_off(daemon, is_breach=bool(message.a))
        else:
            self._master_notes(daemon, message)

    def _cut_off(self, daemon: Daemon, is_breach: bool) -> None:
        daemon.is_drained = True
        if daemon.step == DEAD:
            self._bury(daemon)
        elif is_breach:
            daemon.is_faulty = True
            self.kill(daemon, "broke the protocol")
        elif daemon.step != KILLED:
            daemon.step = LEAVING
            daemon.deadline = time.monotonic() + CUT_OFF_S

    def _lose_clerk(self, daemon: Daemon) -> None:
        self._dismiss(daemon.clerk)
        daemon.clerk = None
        daemon.is_drained = True
        if daemon.step == DEAD:
            self._bury(daemon)
        elif daemon.step != KILLED:
            self.kill(daemon, "lost its clerk")

    def _abandon(self, daemon: Daemon) -> None:
        """Take what a clerk has said so far, and no more: it hangs, or still has a peer."""
        clerk, daemon.clerk = daemon.clerk, None
        if clerk is None:
            return
        os.kill(clerk.pid, signal.SIGKILL)
        with contextlib.suppress(BlockingIOError):
            while message := wire.receive(clerk.channel, FROM_CLERK):
                if message.kind in (REGISTERED, wire.BACKING_CLOSE):
                    self._master_notes(daemon, message)
        self._dismiss(clerk)

    def _dismiss(self, clerk: Clerkship | None) -> None:
        if clerk is not None and clerk.pid not in self._corpses:
            # First of all: it would take a closed channel for our death.
            os.kill(clerk.pid, signal.SIGKILL)
            self._loop.forget(clerk.channel.fileno())
            clerk.channel.close()
            self._corpses[clerk.pid] = time.monotonic()


def point_to_null(fd: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)
