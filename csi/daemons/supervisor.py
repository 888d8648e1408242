"""Starts the daemons of a node's mounts for their keepers, watches them, and holds descriptors.

The keepers are in another container, which is privileged; this process's only privilege is to set
the users of its children. Keepers send their requests over a named socket
(fusefs/keeper/supervisor_protocol.py). A daemon gets /dev/fuse and its other resources over a
socket to its keeper. A daemon without a keeper continues, until a new keeper adopts it. Daemons are
forked from this process (forking.py), and end with it. The process reads nothing from daemons,
because they may be hostile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from csi.daemons import forking
from csi.daemons.fd_store import FdStore
from fusefs.keeper import supervisor_protocol as wire
from fusefs.keeper.control import Listener, Loop
from fusefs.keeper.protocol import KeeperMessage, ProtocolError, receive
from fusefs.linux.fuse_connection import is_device
from fusefs.linux.processes import Credentials, has_ended
from fusefs.linux.sockets import is_trusted, send

log = logging.getLogger(__name__)

LOOK_S = 1.0
# Time after SIGTERM for daemons whose mounts are ending already, and for their uploads.
LINGER_S = 2.0
# Time to wait for a killed process; one that lives HANGING_S after SIGKILL hangs in the kernel.
GOING_S = 1.0
HANGING_S = 5.0


class Child:
    """A daemon of this supervisor; `keeper` is the connection of its keeper, None without one."""

    def __init__(self, pid: int, mount: int, uid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.mount = mount
        self.uid = uid
        self.channel = channel  # receives the sockets of later keepers
        self.keeper: socket.socket | None = None
        self.doomed: float | None = None  # monotonic time of the first SIGKILL

    def signal(self, number: int) -> None:
        """Send the daemon a signal, as the daemon's user if root may not send it."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except PermissionError:
            _as_user(self.uid, lambda: signal.pidfd_send_signal(self.pidfd, number))


class Supervisor:
    """Starts and watches daemons, which run `serve`; listens at `path`. One per process.

    `held` are the descriptors to begin with, by the numbers of mount and connection. `old` is a
    connection to the previous supervisor, which may still have daemons. If a later supervisor takes
    over the socket and then ends, this one listens again. Without `has_successor_beside` no other
    process takes over the daemons: after SIGTERM this process waits until each mount has a keeper,
    which holds the mount until the next process runs, and then ends together with the daemons.
    Raises OSError if it cannot listen.
    """

    def __init__(
        self,
        path: Path,
        serve: forking.Serve,
        held: Mapping[tuple[int, int], int],
        old: socket.socket | None = None,
        *,
        has_successor_beside: bool = True,
    ) -> None:
        # A number that distinguishes this supervisor from others in keepers' answers.
        self.number = time.time_ns()
        # By a container's init. Elsewhere processes of other programs may have a daemon's uid.
        self._is_in_container = os.getppid() <= 1
        self._path = path
        self._serve = serve
        self._old = old
        self.loop = self._loop = Loop()
        self._store = FdStore(self._loop, held)
        self._children: dict[int, Child] = {}
        self._has_successor_beside = has_successor_beside
        self._is_ending = False
        self._lingers_until = 0.0  # of the monotonic clock
        self._orphans = 0  # the last number that was logged
        self._listen()

    def run(self) -> None:
        """Serve until SIGTERM; then until all daemons have ended or may end with this process."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        while not self._is_over():
            self._loop.run_once(LOOK_S)
            if not self._is_ending:
                self._keep_listening()
        self._listener.remove()

    def _is_over(self) -> bool:
        if not self._is_ending or not self._children:
            return self._is_ending
        if self._has_successor_beside or time.monotonic() < self._lingers_until:
            return False
        # A mount without a keeper would end with its daemon: if the driver's pod, which has the
        # keepers, is replaced at the same time, this process waits for the new keepers.
        orphans = sum(child.keeper is None for child in self._children.values())
        if orphans != self._orphans:
            log.info("%d of the daemons wait for a keeper", orphans)
            self._orphans = orphans
        return not orphans

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        # Clients may still connect, count daemons, and take over descriptors and daemons.
        if not self._is_ending:
            log.info("ending when %d daemons have", len(self._children))
            self._lingers_until = time.monotonic() + LINGER_S
        self._is_ending = True

    # --- connections ---

    def _listen(self) -> None:
        self._listener = Listener(os.fspath(self._path), socket.SOCK_SEQPACKET)
        self._loop.watch(self._listener.socket.fileno(), select.POLLIN, self._accept)

    def _keep_listening(self) -> None:
        """Listen again if another supervisor took over the socket's name and has ended."""
        if self._listener.has_name:
            return
        try:
            wire.connect(os.fspath(self._path)).close()
        except OSError:
            log.info("the process that had taken this one's place is gone")
            self._loop.forget(self._listener.socket.fileno())
            self._listener.socket.close()
            self._listen()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.socket.accept()
        except OSError:
            return
        if not is_trusted(client):
            client.close()
            return
        client.setblocking(False)
        self._loop.watch(client.fileno(), select.POLLIN, lambda: self._hear(client))

    def _hear(self, client: socket.socket) -> None:
        try:
            message = receive(client, wire.KINDS)
        except BlockingIOError:
            return
        except ProtocolError as error:
            log.warning("a request that is none: %s", error)
            _close_all(error.fds)
            _say(client, wire.pack(wire.REFUSED, a=errno.EPROTONOSUPPORT))
            message = None
        if message is None:
            self._loop.forget(client.fileno())
            client.close()
            for child in self._children.values():
                if child.keeper is client:
                    child.keeper = None
            return
        try:
            self._answer(client, message)
        except OSError as error:
            log.warning("a request for mount %016x is refused: %s", message.d, error)
            _say(client, wire.pack(wire.REFUSED, a=error.errno or errno.EIO))
        finally:
            _close_all(message.fds)

    def _answer(self, client: socket.socket, message: KeeperMessage) -> None:
        mount = message.d
        match message.kind:
            case wire.LAUNCH:
                self._begin(client, self._launch(message))
            case wire.ADOPT:
                self._begin(client, self._give(message))
            case wire.SIGNAL:
                for child in self._children.values():
                    if child.keeper is client:
                        child.signal(message.a)
            case wire.COUNT:
                _say(client, _counted(message, len(self._of(mount))))
            case wire.END:
                _say(client, _counted(message, self._retire(mount)))
            case wire.HOLD:
                if not is_device(os.fstat(message.fds[0])):
                    raise OSError(errno.EINVAL, "only a descriptor of /dev/fuse is held")
                self._store.hold((mount, message.a), os.dup(message.fds[0]))
                _say(client, _counted(message, 1))
            case wire.DROP:
                _say(client, _counted(message, self._store.drop((mount, message.a))))
            case wire.NEXT:
                if found := self._store.following((mount, message.a)):
                    _say(client, wire.pack(wire.HELD, *found[0]), found[1])
                else:
                    _say(client, _counted(message, 0))
            case _:
                raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))

    def _of(self, mount: int) -> list[Child]:
        return [child for child in self._children.values() if mount in (0, child.mount)]

    # --- daemons ---

    def _begin(self, client: socket.socket, child: Child) -> None:
        child.keeper = client
        _say(client, wire.pack(wire.STARTED, a=self.number), child.pidfd)

    def _launch(self, message: KeeperMessage) -> Child:
        uid, gid = message.a, message.b
        if self._is_ending:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no more daemons are started here")
        if 0 in (uid, gid):
            raise PermissionError(errno.EPERM, "no daemon is started as root")
        if not message.c and self._retire(message.d):
            raise BlockingIOError(errno.EAGAIN, "its last daemon is still there")
        channel, stdin, stdout, environment = message.fds
        self._end_strays(uid)
        user = Credentials(uid, gid, [])
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            pid = forking.fork(self._serve, user, channel, its.fileno(), stdin, stdout, environment)
        ours.setblocking(False)
        child = self._children[pid] = Child(pid, message.d, uid, ours)
        self._loop.watch(child.pidfd, select.POLLIN, lambda: self._on_exit(child))
        log.info("daemon %d is started for mount %016x as uid %d", pid, message.d, uid)
        return child

    def _give(self, message: KeeperMessage) -> Child:
        """Pass a new keeper's socket to the mount's daemon without a keeper; return that daemon."""
        orphans = [child for child in self._of(message.d) if child.keeper is None]
        if not message.d or not orphans:
            raise ProcessLookupError(errno.ESRCH, "it has none without a keeper")
        send(orphans[0].channel, wire.pack(wire.ADOPT), message.fds)
        log.info("daemon %d has another keeper", orphans[0].pid)
        return orphans[0]

    def _retire(self, mount: int) -> int:
        """Kill a mount's daemons, also the previous supervisor's; return how many may still act.

        As long as one may act, no other daemon may serve the mount.
        """
        if not mount:
            return 0
        now = time.monotonic()
        for child in self._of(mount):
            child.doomed = child.doomed or now
            child.signal(signal.SIGKILL)
        for child in self._of(mount):
            if has_ended(child.pidfd, now + GOING_S - time.monotonic()):
                self._on_exit(child)
        left = sum(now - (child.doomed or now) < HANGING_S for child in self._of(mount))
        if self._old is None:
            return left
        try:
            answer = wire.ask(self._old, wire.pack(wire.END, mount))
            # A late answer to an earlier question, for another mount, may arrive first.
            return left + (answer.a if answer.d == mount else 1)
        except TimeoutError:
            return left + 1
        except OSError:
            self._old = None  # the previous supervisor has ended, and its daemons too
            return left

    def _on_exit(self, child: Child) -> None:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            return
        log.info("daemon %d has ended: %d", child.pid, os.waitstatus_to_exitcode(status))
        del self._children[child.pid]
        self._loop.forget(child.pidfd)
        os.close(child.pidfd)
        child.channel.close()
        if child.keeper is not None:
            _say(child.keeper, wire.pack(wire.ENDED, a=status))
        with contextlib.suppress(OSError):  # `_launch` tries again
            self._end_strays(child.uid)

    def _end_strays(self, uid: int) -> None:
        """Kill what a user's daemons have left behind, unless one of them is to live.

        The uid may be another identity's next. Raises OSError if no process can be forked.
        """
        others = (child for child in self._children.values() if child.doomed is None)
        if self._is_in_container and all(child.uid != uid for child in others):
            # The kernel kills them at one instant, so none can fork meanwhile.
            _as_user(uid, lambda: os.kill(-1, signal.SIGKILL))


def _as_user(uid: int, act: Callable[[], None]) -> None:
    """Call `act` in a process that may signal what the user `uid` may; OSError without a fork."""
    pid = os.fork()
    if pid == 0:
        try:
            # With a real uid that no other process has, as root's processes have to be safe from
            # it, and it from the user's.
            os.setresuid(2**32 - 2, uid, 2**32 - 2)
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _say(client: socket.socket, packed: bytes, *fds: int) -> None:
    with contextlib.suppress(OSError):  # the client is gone, as `_hear` will see
        send(client, packed, fds)


def _counted(message: KeeperMessage, count: int) -> bytes:
    return wire.pack(wire.COUNTED, message.d, count)
