"""The decisions of the keeper: when a daemon is started, replaced or given up.

When a daemon dies, the keeper starts a new one at once, unless the mount is gone, the kernel cannot
resend unanswered requests, or one daemon after the other died by itself within seconds. A kernel
that cannot resend is no obstacle if the last daemon has answered all requests that it read, as in
an upgrade. The death of a daemon that another process killed (the kernel does so when memory is
short) does not count as a quick death, but the pause counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial

from fusefs.keeper import protocol as wire
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.broker import FAILED, MOUNT_MADE, Broker
from fusefs.keeper.control import Client, ControlSocket, Listener, Loop
from fusefs.keeper.exchange import HOPELESS
from fusefs.keeper.processes import ALIVE, DaemonProcess, ProcessTable, describe
from fusefs.keeper.state import (
    NEVER,
    Configuration,
    KeeperState,
    Program,
    abort_own,
    cannot_take_over,
    describe_end,
    log,
    shell_status,
    was_killed,
)
from fusefs.linux import fuse_connection, libc, mountinfo

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

QUIESCE_S = 10.0
MOST_LINGERING = 8

# The death of a daemon that served for less than this is a quick death, unless it was killed.
QUICK_S = 5.0
MOST_QUICK_DEATHS = 10
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0
# The delay after a failed start of a daemon.
RETRY_S = 0.5


class Keeper:
    """The keeper of one mount: starts, replaces and upgrades its daemons until the mount ends."""

    def __init__(
        self, configuration: Configuration, state: KeeperState, listener: Listener | None
    ) -> None:
        self._configuration = configuration
        self._state = state
        self._loop = Loop()
        self._listener = listener
        self._control = ControlSocket(self._loop, listener, self._ask)
        self._processes = ProcessTable(
            configuration,
            state,
            self._loop,
            on_message=self._on_message,
            on_exit=self._on_exit,
            close_in_child=self._close_in_child,
        )
        self._upgrader: Client | None = None
        self._start_at = NEVER
        self._obstacle = ""  # the error of the last failed start
        self._is_terminating = False
        self._exit_code: int | None = None
        self._signals: list[int] = []
        self._wake = self._catch_signals()

    def start(self) -> None:
        """Start a daemon: the first of this mount, or the successor of a dead one.

        Raises:
            OSError: the daemon could not be started.
            BecomeBroker: in the forked child, the daemon's broker.
        """
        task = wire.TAKE_OVER if self._state.has_served else wire.FRESH
        self._processes.start(self._state.program, task)

    def adopt(self, daemon: DaemonProcess, broker: Broker) -> None:
        """Take over another keeper's daemon; its new broker, a child, raises BecomeBroker."""
        if self._state.has_served:
            daemon.served = time.monotonic()
        self._processes.adopt(daemon, broker)

    def run(self) -> int:
        """Run until the mount ends; return the exit status. Forked brokers raise BecomeBroker."""
        while self._exit_code is None:
            soonest = min(
                self._start_at,
                self._control.deadline(),
                self._pause_end(),
                *self._processes.deadlines(),
            )
            self._loop.run_once(None if soonest == NEVER else soonest - time.monotonic())
            self._check_clock(time.monotonic())
        self._clean_up()
        return self._exit_code

    def report_failure(self) -> None:
        """Tell the broker, which counts it, that this keeper ends by a fault, not by a signal."""
        daemon = self._processes.current
        if daemon is not None and daemon.broker is not None:
            daemon.broker.tell(wire.pack(FAILED))

    def _check_clock(self, now: float) -> None:
        self._control.dismiss_late(now)
        self._processes.check_clock(now)
        if now >= self._start_at and self._exit_code is None:
            self._start_again()
        if now >= self._pause_end():
            self._abort(f"no daemon has served it for {self._configuration.max_pause_s:.0f} s")
        if self._processes.count_lingering(now) > MOST_LINGERING:
            self._abort("too many of its processes hang in the kernel")

    def _pause_end(self) -> float:
        since = self._state.pause_since
        return NEVER if since is None else since + self._configuration.max_pause_s

    # --- signals ---

    def _catch_signals(self) -> tuple[int, int]:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, lambda caught, _: self._signals.append(caught))
        # systemd ends a session with SIGTERM and SIGHUP. Daemons and brokers inherit this.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._loop.watch(reader, select.POLLIN, self._handle_signals)
        return reader, writer

    def _handle_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)
        signals, self._signals = self._signals, []
        daemon = self._processes.current
        if daemon is not None and signal.SIGUSR2 in signals:
            daemon.process.signal(signal.SIGUSR2)
        if signal.SIGTERM in signals or signal.SIGINT in signals:
            self._is_terminating = True
            if daemon is None:
                self._end_mount(0)
            else:
                daemon.process.signal(signal.SIGTERM)

    def _close_in_child(self) -> None:
        """Close the descriptors that only the keeper uses. Called in forked children."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        self._configuration.release_claim()
        for fd in self._wake:
            os.close(fd)

    # --- a daemon's messages ---

    def _on_message(self, daemon: DaemonProcess, message: wire.KeeperMessage) -> None:
        kind = message.kind
        if kind == wire.TICK:
            self._state.in_flight = message.a
        elif kind == wire.REGISTERED:
            self._state.files.update(message.pairs)
        elif kind == wire.BACKING_CLOSE:
            self._state.files.pop(message.b, None)
        elif kind == wire.MOUNT:
            self._mount(daemon)
        elif kind == wire.DEPOSIT:
            os.set_blocking(message.fd, False)
            self._state.fuse_fd = message.fd
            self._mounted(daemon)
        elif kind == wire.PREPARED:
            self._prepared(daemon)
        elif kind == wire.SERVING:
            self._serving(daemon, bool(message.a))
        elif kind == wire.UNMOUNT:
            self._processes.run_in_child("unmounting", self._unmount)
        elif kind == wire.ENDING:
            daemon.is_ending = True

    def _mount(self, daemon: DaemonProcess) -> None:
        configuration = self._configuration
        data = f"fd={self._state.fuse_fd},{configuration.mount_data}"
        try:
            libc.mount(
                configuration.source,
                configuration.mount_at,
                mountinfo.FILESYSTEM_TYPE,
                configuration.mount_flags,
                data,
            )
        except OSError as refusal:
            if daemon.broker is not None:
                daemon.broker.tell(wire.pack(MOUNT_MADE, error=refusal.errno or 0))
        else:
            self._mounted(daemon)

    def _mounted(self, daemon: DaemonProcess) -> None:
        state, configuration = self._state, self._configuration
        configuration.release_claim()
        state.connection = mountinfo.connection_at(configuration.mountpoint) or 0
        state.is_ours = True
        if configuration.is_privileged and configuration.read_ahead_kib is not None:
            fuse_connection.raise_read_ahead(state.connection, configuration.read_ahead_kib)
        if daemon.broker is not None:
            daemon.broker.tell(wire.pack(MOUNT_MADE, state.connection))
        self._deposit()

    def _deposit(self) -> None:
        self._ask_descriptor_store(partial(supervisor_protocol.hold, fd=self._state.fuse_fd))

    def _ask_descriptor_store(self, request: Callable[[str, int, int], None]) -> None:
        path, number = self._configuration.supervisor, self._configuration.number
        if path is not None:
            work = partial(request, path, number, self._state.connection)
            self._processes.run_in_child("the descriptor store", work)

    def _unmount(self) -> None:
        if self._is_in_place():
            _unmount(self._configuration.mountpoint)

    def _is_in_place(self) -> bool:
        found = mountinfo.connection_at(self._configuration.mountpoint)
        return found is not None and found == self._state.connection

    def _serving(self, daemon: DaemonProcess, has_resend: bool) -> None:
        pause_s = self._state.serving(has_resend)
        if daemon.served is None:
            daemon.served = time.monotonic()
            log(f"{daemon.name} serves, after a pause of {pause_s:.3f} s", "INFO")
            if self._state.restarts or self._state.upgrades:
                self._deposit()
        self._answer_upgrade({"ok": True, "pid": daemon.pid, "pause_s": pause_s})

    # --- a daemon's end ---

    def _on_exit(self, daemon: DaemonProcess) -> None:
        """React to a daemon's end: end the mount, replace the daemon or fail the upgrade."""
        if self._exit_code is not None:
            return
        end = daemon.reason or describe_end(daemon.status)
        log(f"{daemon.name} is gone: {end}", "INFO" if end == "exited with 0" else "WARNING")
        if daemon.is_incoming:
            refusal = {"error": f"the new daemon is gone: {end}; the old one goes on"}
            if cannot_take_over(daemon.status):
                refusal["code"] = HOPELESS
            self._answer_upgrade(refusal)
        elif self._is_terminating or not self._state.has_served:
            self._end_mount(0 if self._state.has_served else shell_status(daemon.status))
        elif self._is_over(daemon):
            self._exit_code = 0
        elif self._has_made_way(daemon):
            self._promote()
        else:
            self._replace(daemon, end)

    def _is_over(self, daemon: DaemonProcess) -> bool:
        """True if the mount is gone, or detached and its daemon has sent ENDING."""
        if fuse_connection.is_disconnected(self._state.fuse_fd):
            return True
        return daemon.is_ending and not mountinfo.is_connection_mounted(self._state.connection)

    def _has_made_way(self, daemon: DaemonProcess) -> bool:
        """True if the upgrade's new daemon can take over from `daemon`, which has ended.

        A daemon that sent ENDING has answered all requests that it read. A daemon that
        was killed may have left some; then the kernel must be able to resend them.
        """
        if not daemon.is_quiesced or self._processes.incoming is None:
            return False
        self._state.is_all_answered = daemon.is_ending
        return self._state.can_go_on

    def _replace(self, daemon: DaemonProcess, end: str) -> None:
        state = self._state
        now = time.monotonic()
        state.restarts += 1
        state.note_end(end)
        state.is_all_answered = state.is_all_answered or daemon.is_ending
        state.paused(now)
        is_falling_back = state.fallback is not None
        if state.fallback is not None:
            state.program, state.fallback = state.fallback, None
            self._answer_upgrade({"error": f"the new daemon is gone: {end}; the old is started"})
        if self._processes.incoming is not None:
            self._processes.kill(self._processes.incoming, "the daemon before it died meanwhile")
        if not is_falling_back and cannot_take_over(daemon.status):
            self._abort("its daemon cannot take it over")
            return
        if not state.can_go_on:
            self._abort("this kernel cannot send requests again")
            return
        if daemon.served is not None and time.monotonic() - daemon.served >= QUICK_S:
            state.quick_deaths = 0
        elif daemon.is_faulty or not (was_killed(daemon.status) or daemon.is_ending):
            state.quick_deaths += 1
        count = state.quick_deaths
        if count >= MOST_QUICK_DEATHS:
            self._abort(f"{count} daemons in a row did not live")
            return
        delay_s = min(FIRST_DELAY_S * 2 ** (count - 2), LONGEST_DELAY_S) if count > 1 else 0.0
        self._start_at = time.monotonic() + delay_s

    def _start_again(self) -> None:
        self._start_at = NEVER
        if fuse_connection.is_disconnected(self._state.fuse_fd):
            self._exit_code = 0
            return
        try:
            self.start()
            # Deposited at once, as the descriptor store may have died with the last daemon.
            self._deposit()
        except OSError as error:
            # Perhaps memory is short, a file is being replaced, or no supervisor listens.
            if self._obstacle != str(error):
                log(f"no daemon can be started: {error}")
            self._obstacle = str(error)
            self._start_at = time.monotonic() + RETRY_S

    # --- an upgrade ---

    def _upgrade(self, client: Client, program: Program) -> None:
        daemon = self._processes.current
        if daemon is None or daemon.served is None or self._is_terminating:
            client.answer({"error": "there is no daemon that serves at the moment"})
        elif self._upgrader or self._processes.incoming or daemon.is_quiesced:
            client.answer({"error": "an upgrade is under way"})
        else:
            try:
                self._processes.start(program, wire.PREPARE)
                self._upgrader = client
            except OSError as error:
                client.answer({"error": f"the new daemon cannot be started: {error}"})

    def _prepared(self, daemon: DaemonProcess) -> None:
        if daemon.step != ALIVE:
            return  # its end is handled at its deadline
        old = self._processes.current
        daemon.is_prepared = True
        daemon.deadline = NEVER
        if old is not None:
            self._state.paused(time.monotonic())
            # The kernel, if it can, resends requests that are not answered in time.
            limit_s = QUIESCE_S if self._state.has_resend else self._configuration.max_pause_s
            self._processes.quiesce(old, limit_s)

    def _promote(self) -> None:
        daemon, state = self._processes.incoming, self._state
        assert daemon is not None
        state.fallback, state.program = state.program, daemon.program
        state.upgrades += 1
        state.note_end("upgrade")
        self._processes.promote()

    def _answer_upgrade(self, answer: dict[str, Any]) -> None:
        client, self._upgrader = self._upgrader, None
        if client is not None:
            client.answer(answer)

    # --- the end ---

    def _abort(self, why: str) -> None:
        """Abort the connection, but stay mounted: no program shall write to the directory below."""
        if self._exit_code is not None:
            return
        log(f"the mount is given up: {why}", "ERROR")
        self._exit_code = 1
        self._answer_upgrade({"error": f"the mount was given up: {why}"})
        abort_own(self._state)

    def _end_mount(self, exit_code: int) -> None:
        """Detach the mount if it is still there, and set the exit code for `run`."""
        self._exit_code = exit_code
        mountpoint = self._configuration.mountpoint
        if self._is_in_place():
            try:
                _detach(mountpoint)
            except OSError as error:
                log(f"{mountpoint} cannot be unmounted: {error.strerror}")

    def _clean_up(self) -> None:
        if self._state.connection and not fuse_connection.is_disconnected(self._state.fuse_fd):
            self._ask_descriptor_store(supervisor_protocol.drop)
        self._processes.end()
        if self._state.fuse_fd >= 0:
            os.close(self._state.fuse_fd)
        # Closed last: commands that wait for the mount's processes find the keeper by this socket.
        self._control.close()
        if self._listener is not None:
            self._listener.remove()

    # --- the control socket ---

    def _ask(self, client: Client, request: dict[str, Any]) -> None:
        program = self._state.program
        match request["do"]:
            case "status":
                client.answer(describe(self._configuration, self._state, self._processes.current))
            case "settings":
                client.answer({"settings": program.settings, "command": program.command})
            case "upgrade":
                self._upgrade(client, Program(list(request["command"]), str(request["settings"])))
            case "replace" if not self._state.has_resend:
                client.answer({"error": "the mount would end: this kernel cannot resend requests"})
            case "replace" if self._processes.current is not None:
                self._processes.kill(self._processes.current, "was to be replaced")
                client.answer({"ok": True})
            case "deposit" if self._state.connection:
                self._deposit()
                client.answer({"ok": True})
            case "abort":
                abort_own(self._state)
                client.answer({"ok": True})
            case _:
                client.answer({"error": "this cannot be done"})


def _unmount(mountpoint: str) -> None:
    """Unmount; detach a mount that is in use. May wait for open requests, and raise OSError."""
    try:
        libc.umount(mountpoint, libc.UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EPERM):
            raise
        _detach(mountpoint)


def _detach(mountpoint: str) -> None:
    """Detach the mount, by fusermount3 if umount2(2) is not permitted; may raise OSError."""
    try:
        libc.umount(mountpoint, libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
    except PermissionError:
        command = ["fusermount3", "-u", "-z", "-q", "--", mountpoint]
        os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
