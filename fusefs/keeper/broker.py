"""The broker: a process that reads the daemon's messages in place of the keeper.

An attacker may have taken over the daemon, and a descriptor that it sends can hang the process that
uses it: fstat or close of a descriptor waits for ever if the file is on a mount whose daemon does
not answer. So the keeper forks one broker for each daemon. The broker reads the daemon's messages,
checks the descriptors and asks the kernel to register them. The keeper only gets numbers, over a
private socket, and if a broker hangs, the keeper replaces it together with its daemon.

A broker has the daemon's file-system ids, and CAP_SYS_ADMIN is its only effective capability,
because the kernel reads a registered file with the credentials of its registration. Its other
capabilities stay permitted and its real uid is root's, so that the daemon can neither signal nor
trace it. When the keeper dies, the broker becomes the keeper: it has the mount's descriptor, the
socket to the daemon, and a copy of the state.

The broker passes the daemon's messages on to the keeper with their kinds unchanged, and adds the
few kinds below.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Sequence

from fusefs.keeper import protocol as wire
from fusefs.keeper.state import Configuration, KeeperState, log
from fusefs.keeper.supervisor_protocol import ProcessHandle
from fusefs.linux import callers
from fusefs.linux.capabilities import lower_privileges, raise_privileges
from fusefs.linux.fuse_connection import is_device

# Sent to the keeper, besides REGISTERED: the daemon is cut off (a: 1 if the daemon
# broke the protocol, 0 if it closed its socket).
CUT_OFF = 65
FROM_BROKER = wire.FROM_DAEMON | {wire.REGISTERED: 0, CUT_OFF: 0}
# Sent by the keeper, besides QUIESCE: the result of mounting (a: the connection's
# number; or error), and the message that the keeper ends by a fault of its own.
MOUNT_MADE = 66
FAILED = 67
TO_BROKER = {MOUNT_MADE: 0, FAILED: 0, wire.QUIESCE: 0}

# TICKs are passed on to the keeper at most once in this time.
TICK_INTERVAL_S = 0.2

# ioctls on /dev/fuse: _IOW(229, 1, struct fuse_backing_map), _IOW(229, 2, uint32_t)
DEV_IOC_BACKING_OPEN = 0x4010E501
DEV_IOC_BACKING_CLOSE = 0x4004E502
BACKING_MAP = struct.Struct("=iIQ")

# The kinds of messages that a daemon may send, by the state of its session.
_ALWAYS = frozenset((wire.TICK, wire.ENDING))
NEW = frozenset((wire.HELLO,))
UNMOUNTED = _ALWAYS | {wire.MOUNT, wire.DEPOSIT}
PREPARING = _ALWAYS | {wire.PREPARED}
ATTACHED = _ALWAYS | {wire.SERVING, wire.BACKING_OPEN, wire.BACKING_CLOSE, wire.UNMOUNT, wire.LOOK}


class Broker:
    """One daemon's session over the socket `daemon`; `task` is FRESH, TAKE_OVER or PREPARE."""

    def __init__(
        self,
        configuration: Configuration,
        state: KeeperState,
        daemon: socket.socket,
        process: ProcessHandle,
        task: int,
    ) -> None:
        self.configuration = configuration
        self.state = state
        self.daemon = daemon
        self.process = process
        self.task = task
        self.is_cut_off = False
        self._keeper: socket.socket
        self._allowed = NEW
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._next_tick = 0.0
        self._handlers = {
            wire.HELLO: self._hello,
            wire.PREPARED: self._prepared,
            wire.MOUNT: self._mount,
            wire.DEPOSIT: self._deposit,
            wire.SERVING: self._serving,
            wire.BACKING_OPEN: self._backing_open,
            wire.BACKING_CLOSE: self._backing_close,
            wire.TICK: self._tick,
            wire.ENDING: self._report,
            wire.UNMOUNT: self._report,
            wire.KNOWN: self._known,
            wire.LOOK: self._look,
        }

    def attach(self) -> None:
        """Begin the session with a daemon that serves already and sends no HELLO."""
        self._allowed = ATTACHED | {wire.KNOWN}

    def take(self) -> None:
        """Send the daemon the mount: its descriptor (TAKE) and its registered files (ENTRY)."""
        self.task = wire.TAKE_OVER
        self._allowed = ATTACHED
        take = wire.pack(wire.TAKE, len(self.state.files), int(self.state.is_all_answered))
        self._post(take, self.state.fuse_fd)
        device = self.configuration.cache_device
        for backing_id, inode in self.state.files.items():
            self._post(wire.pack(wire.ENTRY, backing_id, device, inode))

    def serve(self, keeper: socket.socket) -> bool:
        """Handle messages of daemon and keeper until the keeper dies.

        Returns True if this broker must become the keeper. With PREPARE it kills the new daemon and
        returns False, because the old daemon's broker becomes the keeper.
        """
        self._keeper = keeper
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if self.configuration.is_privileged:
            self._lower_privileges()
        while True:
            poll = select.poll()
            poll.register(keeper, select.POLLIN)
            if not self.is_cut_off and self._allowed:
                # Nothing is read before all answers are sent, so the outbox of a
                # daemon that does not read its socket can't grow without limit.
                poll.register(self.daemon, select.POLLOUT if self._outbox else select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            if keeper.fileno() in ready and not self._hear_keeper():
                break
            if self.daemon.fileno() in ready:
                self._hear_daemon()
        keeper.close()
        if self.configuration.is_privileged:
            raise_privileges()
        if self.task == wire.PREPARE:
            # The old daemon's broker succeeds the keeper, and does not know of the upgrade.
            self.process.kill()
            return False
        return True

    # --- the keeper ---

    def _hear_keeper(self) -> bool:
        message = wire.receive(self._keeper, TO_BROKER)
        if message is None:
            return False
        if message.kind == wire.QUIESCE:
            self._post(wire.pack(wire.QUIESCE))
            return True
        if message.kind == FAILED:
            self.state.keeper_failures += 1
            return True
        if not message.error:
            self.state.connection = message.a
            self.state.is_ours = True
            self._allowed = ATTACHED
        if self.configuration.is_privileged:
            answer = wire.pack(wire.MOUNTED, error=message.error)
            self._post(answer, -1 if message.error else self.state.fuse_fd)
        return True

    def _report(self, message: wire.KeeperMessage) -> None:
        self._tell(wire.pack(message.kind, message.a, message.b))

    def _tell(self, packed: bytes, fd: int = -1) -> None:
        try:
            wire.send(self._keeper, packed, fd)
        except OSError:  # the keeper is dead, as the next poll shows
            return

    # --- the daemon ---

    def _hear_daemon(self) -> None:
        try:
            if self._outbox:
                self._flush()
                return
            message = wire.receive(self.daemon, wire.FROM_DAEMON)
            if message is None:
                self._cut_off(is_breach=False)
                return
            if message.kind not in self._allowed:
                raise wire.ProtocolError(f"a message of kind {message.kind} at the wrong time")
            self._handlers[message.kind](message)
        except BlockingIOError:
            return
        except wire.ProtocolError as error:
            log(f"the daemon broke the protocol: {error}")
            self._cut_off(is_breach=True)

    def _cut_off(self, is_breach: bool) -> None:
        self.is_cut_off = True
        self._tell(wire.pack(CUT_OFF, int(is_breach)))
        self.daemon.close()

    def _post(self, packed: bytes, fd: int = -1) -> None:
        self._outbox.append((packed, fd))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and not self.is_cut_off:
            try:
                wire.send(self.daemon, *self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                self._cut_off(is_breach=False)
                return
            self._outbox.popleft()

    def _hello(self, message: wire.KeeperMessage) -> None:
        if message.a != wire.VERSION:
            raise wire.ProtocolError(f"version {message.a}")
        self._report(message)
        state = self.state
        about = int(self.configuration.is_privileged) | state.connection << 1
        packed = wire.pack(wire.WELCOME, self.task, state.restarts, state.last_death_ns, about)
        self._allowed = UNMOUNTED if self.task == wire.FRESH else PREPARING
        self._post(packed)
        if self.task == wire.TAKE_OVER:
            self.take()

    def _prepared(self, message: wire.KeeperMessage) -> None:
        # The keeper now forks another broker for this daemon, with the current state.
        self._allowed = frozenset()
        self._report(message)

    def _mount(self, message: wire.KeeperMessage) -> None:
        if not self.configuration.is_privileged:
            raise wire.ProtocolError("MOUNT, which this keeper may not")
        self._allowed = _ALWAYS
        self._report(message)

    def _deposit(self, message: wire.KeeperMessage) -> None:
        if self.configuration.is_privileged:
            raise wire.ProtocolError("DEPOSIT with a keeper that mounts itself")
        if not is_device(os.fstat(message.fd)):
            raise wire.ProtocolError("DEPOSIT of something else than /dev/fuse")
        self._allowed = ATTACHED
        self.state.fuse_fd = message.fd
        self._tell(wire.pack(wire.DEPOSIT), message.fd)

    def _known(self, message: wire.KeeperMessage) -> None:
        if len(self.state.files) >= self.configuration.most_backing_ids:
            raise wire.ProtocolError("KNOWN, too often")
        if not 0 < message.b < 1 << 31:
            raise wire.ProtocolError("KNOWN of no id")
        self.state.files[message.b] = message.c
        self._tell_registered([(message.b, message.c)])

    def _serving(self, message: wire.KeeperMessage) -> None:
        self._allowed = ATTACHED
        self.state.serving(bool(message.a))
        self._report(message)
        self._post(wire.pack(wire.ABLE, 0, callers.namespace() if self.state.is_ours else 0))

    def _look(self, message: wire.KeeperMessage) -> None:
        is_privileged = self.configuration.is_privileged
        if is_privileged:
            raise_privileges()  # /proc may hide other users' processes
        try:
            fate = callers.UNKNOWN
            if self.state.is_ours:
                pid, ino = message.b, message.c
                fate = callers.holding(pid, ino) if ino else callers.fate(pid)
        finally:
            if is_privileged:
                self._lower_privileges()
        self._post(wire.pack(wire.LOOKED, message.a, fate))

    def _lower_privileges(self) -> None:
        credentials = self.configuration.credentials
        lower_privileges(credentials.uid, credentials.gid)

    def _tick(self, message: wire.KeeperMessage) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_INTERVAL_S
            self._report(message)

    # --- backing files ---

    def _backing_open(self, message: wire.KeeperMessage) -> None:
        results = self._register_all(message.fds)
        answer = wire.pack(wire.BACKING_OPENED, message.a, len(results))
        self._post(wire.with_pairs(answer, results))
        for fd in message.fds:
            _close(fd)  # may hang, so the answers are sent first

    def _register_all(self, fds: Sequence[int]) -> list[tuple[int, int]]:
        """Register files with the kernel and report them; return (id, 0) or (0, errno) for each."""
        results, registered = [], []
        for fd in fds:
            backing_id, error = 0, 0
            try:
                inode = self._check(fd)
                # A mutable buffer: with an immutable one Python loses the return value.
                request = bytearray(BACKING_MAP.pack(fd, 0, 0))
                backing_id = fcntl.ioctl(self.state.fuse_fd, DEV_IOC_BACKING_OPEN, request)
            except OSError as refusal:
                error = refusal.errno or errno.EIO
            else:
                self.state.files[backing_id] = inode
                registered.append((backing_id, inode))
            results.append((backing_id, error))
        self._tell_registered(registered)
        return results

    def _tell_registered(self, files: list[tuple[int, int]]) -> None:
        if files:
            self._tell(wire.with_pairs(wire.pack(wire.REGISTERED, 0, len(files)), files))

    def _check(self, fd: int) -> int:
        """Return the file's inode number; raise OSError if the file must not be registered.

        The kernel opens the file again without checking permissions, so it could
        also write to a file whose descriptor is open for reading only.
        """
        configuration = self.configuration
        if not configuration.is_privileged:
            raise OSError(errno.EPERM, "the keeper is not privileged")
        if len(self.state.files) >= configuration.most_backing_ids:
            raise OSError(errno.ENOSPC, "too many files are registered")
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        is_readable = flags & os.O_ACCMODE == os.O_RDONLY and configuration.is_read_only
        if flags & os.O_PATH or not (flags & os.O_ACCMODE == os.O_RDWR or is_readable):
            raise OSError(errno.EBADF, "not open for reading and writing")
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_uid != configuration.credentials.uid:
            raise OSError(errno.EPERM, "somebody else's file")
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, "a file with further names")
        if status.st_dev != configuration.cache_device:
            raise OSError(errno.EXDEV, "not on the cache's device")
        return status.st_ino

    def _backing_close(self, message: wire.KeeperMessage) -> None:
        error = 0
        # The keeper is told before the kernel closes the id: a lost id is better than a wrong one.
        if self.state.files.pop(message.b, None) is not None:
            self._report(message)
            self._close_id(message.b)
        else:
            error = errno.ENOENT
        self._post(wire.pack(wire.BACKING_CLOSED, message.a, error=error))

    def _close_id(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self.state.fuse_fd, DEV_IOC_BACKING_CLOSE, struct.pack("=I", backing_id))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                log(f"backing id {backing_id} could not be closed: {error.strerror}")


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # close reports errors of earlier writes
        os.close(fd)
