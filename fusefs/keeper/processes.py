"""The keeper's processes: daemons and their brokers, from start to end.

If a daemon is silent for too long, the keeper sends it SIGUSR1, so that it logs its stacks, and
then kills it. Messages that the broker has read before may arrive after the daemon's death; when
these are handled too, policy.py decides about the daemon's successor. Nothing here waits for a
process: a process that does not end because it hangs in the kernel is remembered and left behind.
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
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.broker import CUT_OFF, FROM_BROKER, Broker
from fusefs.keeper.control import Loop
from fusefs.keeper.state import NEVER, Configuration, KeeperState, Program, log
from fusefs.keeper.supervisor_protocol import ProcessHandle
from fusefs.linux.processes import spawn

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

DUMP_S = 0.5  # time in which a hanging daemon writes its stacks
CUT_OFF_S = 1.0  # time that a daemon has to end after it has closed its socket
DRAIN_S = 1.0  # time in which a broker sends its last messages
# A killed process that still exists after this time hangs in the kernel (state D); it may end later
# if it waits for a write.
LINGER_S = 5.0
END_S = 2.0

# Messages of a broker that are handled in a row before the loop goes on.
BATCH = 64

# The steps of a daemon's end.
ALIVE = 0
WARNED = 1  # silent for too long; writing its stacks to the log
LEAVING = 2  # sent QUIESCE, or its socket is closed
KILLED = 3
DEAD = 4  # its broker may still send messages


class BrokerHandle:
    """A broker's process, and the keeper's non-blocking end of the socket to it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    def tell(self, packed: bytes) -> bool:
        """Send a message; False if the broker is dead or its socket is full."""
        try:
            wire.send(self.channel, packed)
        except OSError:
            return False
        return True


class DaemonProcess:
    """A daemon, from its start until its last message is handled. Times are monotonic seconds.

    `socket` is the keeper's end of the channel to the daemon. The broker reads it; the
    keeper holds it too, so that the daemon sees it closed only when both are dead.
    At `deadline` the keeper has to act on this daemon.
    """

    def __init__(self, process: ProcessHandle, channel: socket.socket, program: Program) -> None:
        self.process = process
        self.pid = process.pid
        self.pidfd = process.pidfd
        self.socket = channel
        self.program = program
        self.is_child = process.supervisor is None
        self.broker: BrokerHandle | None = None
        self.step = ALIVE
        self.deadline = NEVER
        self.heard = time.monotonic()
        self.served: float | None = None
        self.is_incoming = False  # it is to take over from another daemon
        self.is_prepared = False
        self.is_quiesced = False
        self.is_ending = False  # it has sent ENDING
        self.is_drained = False  # all its messages are handled
        self.is_faulty = False  # killed for its own fault, so its death counts as a crash
        self.reason = ""
        self.status: int | None = None

    @property
    def name(self) -> str:
        """The daemon's name in the log. A daemon of another PID namespace has no pid here."""
        return f"the daemon {self.pid}" if self.pid else "the daemon in the other container"

    def take_step(self, step: int, limit_s: float) -> bool:
        """Note the next step, and its deadline in `limit_s`; False if the daemon is dead."""
        if self.step == DEAD:
            return False
        self.step, self.deadline = step, time.monotonic() + limit_s
        return True

    def close(self) -> None:
        """Close the keeper's descriptors of this daemon."""
        os.close(self.pidfd)
        self.socket.close()
        if self.process.supervisor is not None:
            self.process.supervisor.close()


def start_daemon(
    program: Program, configuration: Configuration, *, is_beside: bool
) -> DaemonProcess:
    """Start a daemon; `is_beside` lets the old daemon live, as in an upgrade. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # The daemon reads this file in memory like a pipe, and the keeper never waits for the daemon.
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
    return DaemonProcess(process, ours, program)


def _start(
    command: list[str], configuration: Configuration, channel: int, stdin: int, *, is_beside: bool
) -> ProcessHandle:
    credentials = configuration.credentials
    if configuration.supervisor is not None:
        try:
            return supervisor_protocol.launch(
                configuration.supervisor,
                configuration.number,
                uid=credentials.uid,
                gid=credentials.gid,
                channel=channel,
                stdin=stdin,
                stdout=1,
                is_beside=is_beside,
            )
        except (FileNotFoundError, ConnectionRefusedError):
            if configuration.is_supervisor_needed:
                raise
    pid = spawn(
        command,
        stdin=stdin,
        kept=[channel],
        environment={**os.environ, wire.ENVIRONMENT: str(channel)},
        credentials=credentials,
    )
    return ProcessHandle(pid, os.pidfd_open(pid))


class BecomeBroker(Exception):
    """Raised in a forked child of the keeper: the child must run `broker` from now on."""

    def __init__(self, broker: Broker, channel: socket.socket) -> None:
        super().__init__()
        self.broker = broker
        self.channel = channel


class ProcessTable:
    """The processes of one mount: its daemon, an upgrade's new daemon, and their brokers.

    `on_message` gets each message of a daemon, `on_exit` each daemon that has ended or is
    left behind; `close_in_child` closes, in a forked child, the keeper's own descriptors.
    """

    def __init__(
        self,
        configuration: Configuration,
        state: KeeperState,
        loop: Loop,
        *,
        on_message: Callable[[DaemonProcess, wire.KeeperMessage], None],
        on_exit: Callable[[DaemonProcess], None],
        close_in_child: Callable[[], None],
    ) -> None:
        self._configuration = configuration
        self._state = state
        self._loop = loop
        self._report_message = on_message
        self._report_exit = on_exit
        self._close_keepers_own = close_in_child
        self.current: DaemonProcess | None = None
        self.incoming: DaemonProcess | None = None  # prepares itself, in an upgrade
        # The broker of the last daemon: it succeeds the keeper until the next broker is forked.
        self._spare: BrokerHandle | None = None
        self._unreaped: dict[int, float] = {}  # pid to the time of its start or kill
        self._tasks: dict[str, int] = {}  # name to pid
        self._next_tasks: dict[str, Callable[[], None]] = {}

    # --- beginning ---

    def start(self, program: Program, task: int) -> None:
        """Start a daemon, and a broker for it; `task` is FRESH, TAKE_OVER or PREPARE (protocol.py).

        Raises:
            OSError: the program could not be executed.
            BecomeBroker: in the forked child, the broker.
        """
        daemon = start_daemon(program, self._configuration, is_beside=task == wire.PREPARE)
        point_to_null(1)  # only the first daemon has stdout, so the launcher sees EOF at its end
        if task == wire.PREPARE:
            daemon.is_incoming = True
            self.incoming = daemon
            daemon.deadline = time.monotonic() + 2 * self._configuration.hang_s
        else:
            self.current = daemon
        if task == wire.TAKE_OVER:
            daemon.deadline = time.monotonic() + self._configuration.hang_s
        self._watch(daemon)
        self._fork_broker(daemon, self._new_broker(daemon, task))

    def adopt(self, daemon: DaemonProcess, broker: Broker) -> None:
        """Watch a daemon that serves already; its new broker, a child, raises BecomeBroker."""
        point_to_null(1)  # no launcher waits for a daemon that was taken over
        self.current = daemon
        daemon.is_child = False
        daemon.deadline = time.monotonic() + self._configuration.hang_s
        self._watch(daemon)
        if broker.is_cut_off:
            self._cut_off(daemon, is_breach=False)
        else:
            self._fork_broker(daemon, broker)

    def promote(self) -> None:
        """Give the mount to the upgrade's daemon; its new broker, a child, raises BecomeBroker."""
        daemon = self.incoming
        assert daemon is not None
        self.current, self.incoming = daemon, None
        daemon.is_incoming = False
        self._dismiss(daemon.broker)
        daemon.broker = None
        daemon.take_step(daemon.step, self._configuration.hang_s)
        self._fork_broker(daemon, self._new_broker(daemon, wire.TAKE_OVER))

    def _watch(self, daemon: DaemonProcess) -> None:
        supervisor = daemon.process.supervisor
        if supervisor is None:
            self._loop.watch(daemon.pidfd, select.POLLIN, partial(self._die, daemon))
        else:
            self._loop.watch(
                supervisor.fileno(), select.POLLIN, partial(self._on_supervisor_message, daemon)
            )

    def _on_supervisor_message(self, daemon: DaemonProcess) -> None:
        """Handle a daemon's end: the supervisor has reported it, or has ended with its daemons."""
        assert daemon.process.supervisor is not None
        daemon.status = daemon.process.poll_end()
        self._loop.forget(daemon.process.supervisor.fileno())
        self._loop.watch(daemon.pidfd, select.POLLIN, partial(self._die, daemon))

    def _new_broker(self, daemon: DaemonProcess, task: int) -> Broker:
        return Broker(self._configuration, self._state, daemon.socket, daemon.process, task)

    def _fork_broker(self, daemon: DaemonProcess, broker: Broker) -> None:
        if not daemon.is_incoming:
            # One broker at a time: two would both become the keeper.
            self._dismiss(self._spare)
            self._spare = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as error:
            daemon.is_faulty = daemon.is_drained = True
            self.kill(daemon, f"got no broker: {error.strerror}")
            return
        if pid == 0:
            try:
                ours.close()
                self._close_in_child(daemon)
                if daemon.is_prepared:
                    broker.take()
            except Exception as error:  # the daemon may be gone; this child must not run the loop
                log(f"the broker of {daemon.name} has not begun: {error}")
                os._exit(1)
            raise BecomeBroker(broker, theirs)
        theirs.close()
        ours.setblocking(False)
        daemon.broker = BrokerHandle(pid, ours)
        self._loop.watch(ours.fileno(), select.POLLIN, partial(self._on_broker_message, daemon))

    def _close_in_child(self, kept: DaemonProcess | None = None) -> None:
        self._close_keepers_own()
        for daemon in (self.current, self.incoming):
            if daemon is not None and daemon is not kept:
                daemon.close()
            if daemon is not None and daemon.broker is not None:
                daemon.broker.channel.close()
        if self._spare is not None:
            self._spare.channel.close()

    def run_in_child(self, name: str, work: Callable[[], None]) -> None:
        """Run `work`, which may block, in a forked child, after the last child for `name` ended."""
        if self._tasks.get(name) in self._unreaped:
            self._next_tasks[name] = work
            return
        try:
            pid = os.fork()
        except OSError as error:
            log(f"{name}: {error.strerror}")
            return
        if pid == 0:
            try:
                self._close_in_child()
                work()
            except Exception as error:
                log(f"{name}: {error}")
            finally:
                os._exit(0)
        self._tasks[name] = pid
        self._unreaped[pid] = time.monotonic()

    # --- time ---

    def deadlines(self) -> Iterator[float]:
        """Yield the deadlines of the daemon and an upgrade's new daemon, in monotonic seconds."""
        for daemon in (self.current, self.incoming):
            if daemon is not None:
                yield daemon.deadline

    def check_clock(self, now: float) -> None:
        """Reap ended children; warn, kill or leave behind daemons whose deadline is over."""
        for pid in list(self._unreaped):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._unreaped[pid]
        for name in [name for name in self._next_tasks if self._tasks[name] not in self._unreaped]:
            self.run_in_child(name, self._next_tasks.pop(name))
        for daemon in (self.current, self.incoming):
            if daemon is not None and now >= daemon.deadline:
                self._overdue(daemon, now)

    def count_lingering(self, now: float) -> int:
        """Return the number of processes that hang in the kernel although they were killed."""
        return sum(now - since > LINGER_S for since in self._unreaped.values())

    def _overdue(self, daemon: DaemonProcess, now: float) -> None:
        hang_s = self._configuration.hang_s
        if daemon.step == ALIVE and daemon.is_incoming:
            self.kill(daemon, f"not ready within {2 * hang_s:.0f} s")
        elif daemon.step == ALIVE:
            daemon.reason = f"silent for {hang_s:.0f} s"
            log(f"{daemon.name} has been {daemon.reason}; its stacks follow")
            self._state.paused(daemon.heard)
            daemon.step = WARNED
            daemon.deadline = now + DUMP_S
            daemon.process.signal(signal.SIGUSR1)
        elif daemon.step == WARNED:
            self.kill(daemon, daemon.reason)
        elif daemon.step == LEAVING:
            self.kill(daemon, "did not end in time")
        elif daemon.step == KILLED:
            log(f"{daemon.name} does not go away; it is left behind")
            if daemon.is_child:
                self._unreaped[daemon.pid] = now
            self._on_exit(daemon)
        else:
            self._on_exit(daemon)

    # --- ending ---

    def kill(self, daemon: DaemonProcess, reason: str) -> None:
        """Kill a daemon; `reason` goes to the log, unless the daemon has a reason already."""
        daemon.reason = daemon.reason or reason
        if daemon.take_step(KILLED, LINGER_S):
            daemon.process.kill()

    def quiesce(self, daemon: DaemonProcess, limit_s: float) -> None:
        """Ask a daemon to answer the requests that it has read and exit within `limit_s`."""
        daemon.is_quiesced = True
        if not daemon.take_step(LEAVING, limit_s):
            return
        if daemon.broker is None or not daemon.broker.tell(wire.pack(wire.QUIESCE)):
            self.kill(daemon, "could not be sent the order to end")

    def end(self) -> None:
        """Kill all processes, and wait up to `END_S` until they are gone."""
        for daemon in (self.current, self.incoming):
            if daemon is not None:
                daemon.process.kill()
                self._dismiss(daemon.broker)
                if daemon.is_child and daemon.step != DEAD:
                    self._unreaped[daemon.pid] = 0.0
        self._dismiss(self._spare)
        deadline = time.monotonic() + END_S
        self.current = self.incoming = None
        while self._unreaped and time.monotonic() < deadline:
            time.sleep(0.005)
            self.check_clock(0.0)

    def _die(self, daemon: DaemonProcess) -> None:
        self._loop.forget(daemon.pidfd)
        if daemon.is_child:
            _, daemon.status = os.waitpid(daemon.pid, 0)
        daemon.step = DEAD
        daemon.deadline = time.monotonic() + DRAIN_S
        if daemon.is_drained:
            self._on_exit(daemon)

    def _on_exit(self, daemon: DaemonProcess) -> None:
        daemon.deadline = NEVER
        self._loop.forget(daemon.pidfd)
        if daemon.process.supervisor is not None:
            self._loop.forget(daemon.process.supervisor.fileno())
        daemon.close()
        if daemon.is_incoming:
            self.incoming = None
            self._dismiss(daemon.broker)
        else:
            self.current = None
            if daemon.is_drained:
                self._spare = daemon.broker
            else:
                self._abandon(daemon)
        self._report_exit(daemon)

    # --- brokers ---

    def _on_broker_message(self, daemon: DaemonProcess) -> None:
        broker = daemon.broker
        assert broker is not None
        for _ in range(BATCH):
            try:
                message = wire.receive(broker.channel, FROM_BROKER)
            except BlockingIOError:
                return
            if message is None:
                self._on_broker_lost(daemon)
                return
            self._hear(daemon, message)
            if daemon.broker is not broker or self._is_over(daemon):
                return

    def _is_over(self, daemon: DaemonProcess) -> bool:
        return daemon is not self.current and daemon is not self.incoming

    def _hear(self, daemon: DaemonProcess, message: wire.KeeperMessage) -> None:
        daemon.heard = time.monotonic()
        if daemon.step == WARNED:
            log(f"{daemon.name} is heard of again", "INFO")
            daemon.step, daemon.reason = ALIVE, ""
            if daemon.served is not None:
                self._state.resumed()
        if daemon.step == ALIVE and not daemon.is_incoming:
            daemon.deadline = daemon.heard + self._configuration.hang_s
        if message.kind == CUT_OFF:
            self._cut_off(daemon, is_breach=bool(message.a))
        else:
            self._report_message(daemon, message)

    def _cut_off(self, daemon: DaemonProcess, is_breach: bool) -> None:
        daemon.is_drained = True
        if daemon.step == DEAD:
            self._on_exit(daemon)
        elif is_breach:
            daemon.is_faulty = True
            self.kill(daemon, "broke the protocol")
        elif daemon.step != KILLED:
            daemon.take_step(LEAVING, CUT_OFF_S)

    def _on_broker_lost(self, daemon: DaemonProcess) -> None:
        self._dismiss(daemon.broker)
        if self._spare is daemon.broker:
            self._spare = None
        daemon.broker = None
        if self._is_over(daemon):
            return
        daemon.is_drained = True
        if daemon.step == DEAD:
            self._on_exit(daemon)
        elif daemon.step != KILLED:
            self.kill(daemon, "lost its broker")

    def _abandon(self, daemon: DaemonProcess) -> None:
        """Kill an ended daemon's hanging broker; handle only its messages on registered files."""
        broker, daemon.broker = daemon.broker, None
        if broker is None:
            return
        os.kill(broker.pid, signal.SIGKILL)
        with contextlib.suppress(BlockingIOError):
            while message := wire.receive(broker.channel, FROM_BROKER):
                if message.kind in (wire.REGISTERED, wire.BACKING_CLOSE):
                    self._report_message(daemon, message)
        self._dismiss(broker)

    def _dismiss(self, broker: BrokerHandle | None) -> None:
        if broker is not None and broker.pid not in self._unreaped:
            # The broker is killed first: it would take a closed channel for the keeper's death.
            os.kill(broker.pid, signal.SIGKILL)
            self._loop.forget(broker.channel.fileno())
            broker.channel.close()
            self._unreaped[broker.pid] = time.monotonic()


def describe(
    configuration: Configuration, state: KeeperState, daemon: DaemonProcess | None
) -> dict[str, Any]:
    """Return the status of a keeper, its daemon and its mount, as plain JSON data."""
    since = state.pause_since
    return {
        "pid": os.getpid(),
        "daemon": daemon.pid if daemon is not None else None,
        "supervisor": daemon.process.supervisor_number if daemon is not None else 0,
        "broker": daemon.broker.pid if daemon is not None and daemon.broker is not None else None,
        "is_serving": daemon is not None and daemon.served is not None and since is None,
        "restarts": state.restarts,
        "upgrades": state.upgrades,
        "last_death_ns": state.last_death_ns,
        "last_reason": state.last_reason,
        "pause_s": 0.0 if since is None else time.monotonic() - since,
        "longest_pause_s": state.longest_pause_s,
        "pauses_s": state.pauses_s,
        "backing_ids": len(state.files),
        "in_flight": state.in_flight,
        "mountpoint": configuration.mountpoint,
        "connection": state.connection,
    }


def point_to_null(fd: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)
