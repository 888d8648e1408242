"""A second descriptor store of mounts: `fusefs keeper --socket PATH`.

A FUSE mount lives for as long as anybody holds its /dev/fuse descriptor. A
keeper that is told to (`descriptor store` in its configuration) leaves a copy here, so
that the mount outlives keeper, broker and daemon all at once, as when the
container that they run in is replaced. Whoever mounts there again fetches it.

Each descriptor is held by a process of its own, which also receives and
answers for it: should anything hang, it is that one. The service only looks at
requests, and gives the connection on. A holding process ends when its
descriptor is dropped, when the mount is gone, and when the service is told to.
If that dies instead, the process gives what it holds to the next service at
PATH, unless whoever had started the dead one, and its container, is gone too.

Who gets it when: the keeper opens it, and its broker is forked with it; once
mounted, the daemon and this service get it, each within moments. A daemon that
follows gets it from a broker, when this service has been given it once more; a
keeper that follows gets it from here. So each of the three may die, and be
replaced, while the other two have it.

A request is one JSON line in one message, and so is its answer:

    {"do": "hold", "name": …} + the descriptor   keep it, instead of one of that name
    {"do": "fetch", "name": …}                   answered with a copy
    {"do": "drop", "name": …}
    {"do": "list"}                               answered with the names

Each has a `version`; without one it is 1, which had none. A request is answered
in its own version. Only root, or the user that runs the service, is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import time
from types import FrameType

from fusefs.keeper import control
from fusefs.keeper.control import Loop
from fusefs.keeper.state import NEVER
from fusefs.linux import sockets
from fusefs.linux.fuse_connection import FUSE_DEVICE, is_disconnected

TYPE_CHECKING = False  # the keeper imports this module, and does without typing
if TYPE_CHECKING:
    from typing import Any

VERSION = 2
SPOKEN = (1, 2)

MAX_REQUEST = 8192
MAX_ANSWER = 1 << 20
MOST_VISITORS = 64
VISITOR_S = 5.0
ANSWER_S = 1.0
CLIENT_S = 5.0
# For another service to come in the place of one that was killed.
LOOKING_S = 60.0
LOOK_MS = 100

# What a service says to a process that holds something.
VISITOR = b"\n"  # + the connection of one who asks for it
LET_GO = b"."


class FdStoreError(Exception):
    """The descriptor store can't be reached, or refused; the message says why."""


def name_of(mountpoint: str, connection: int) -> str:
    """What a mount's descriptor is held as."""
    return f"{mountpoint}#{connection}"


# --- for its clients --------------------------------------------------------------


def hold(path: str, name: str, fd: int) -> None:
    """Have the service at `path` hold a copy of the descriptor.

    Raises:
        FdStoreError: it does not.
    """
    _exchange(path, {"do": "hold", "name": name}, fd)


def fetch(path: str, name: str) -> int:
    """A copy of what is held under the name; non-inheritable.

    Raises:
        FdStoreError: nothing is, or nobody answers.
    """
    fd = _exchange(path, {"do": "fetch", "name": name})
    if fd < 0:
        raise FdStoreError("no descriptor came")
    return fd


def drop(path: str, name: str) -> None:
    """Have it held no longer.

    Raises:
        FdStoreError: nothing is, or nobody answers.
    """
    _exchange(path, {"do": "drop", "name": name})


def _exchange(path: str, request: dict[str, Any], fd: int = -1) -> int:
    try:
        with sockets.connect(path, CLIENT_S) as sock:
            _send(sock, {**request, "version": VERSION}, fd)
            answer, descriptors = _receive(sock, MAX_ANSWER)
    except OSError as error:
        raise FdStoreError(f"{path}: {error.strerror or error}") from error
    if "ok" not in answer:
        raise FdStoreError(str(answer.get("error", "no answer")))
    return descriptors[0] if descriptors else -1


def _send(sock: socket.socket, message: dict[str, Any], fd: int = -1) -> None:
    sockets.send(sock, json.dumps(message).encode() + b"\n", [fd] if fd >= 0 else [])


def _receive(sock: socket.socket, size: int) -> tuple[dict[str, Any], list[int]]:
    data, fds, _ = sockets.receive(sock, size, 1)
    return _parse(data), fds


def _parse(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {}


# --- the service --------------------------------------------------------------------


class Service:
    """The socket that listens on `path`, and which process holds what.

    `parent` is a pidfd of whoever has started this process.
    """

    def __init__(self, listener: socket.socket, path: str, parent: int) -> None:
        self._listener = listener
        self._path = path
        self._parent = parent
        self._loop = Loop()
        self._loop.watch(listener.fileno(), select.POLLIN, self._accept)
        self._visitors: dict[socket.socket, float] = {}  # deadlines
        self._helpers: dict[str, socket.socket] = {}

    def run(self) -> None:
        """Serve until the process is ended."""
        while True:
            soonest = min(self._visitors.values(), default=NEVER)
            self._loop.run_once(None if soonest == NEVER else soonest - time.monotonic())
            now = time.monotonic()
            for visitor, deadline in list(self._visitors.items()):
                if now >= deadline:
                    self._see_off(visitor)

    def end(self) -> None:
        """Hold nothing any more."""
        for helper in list(self._helpers.values()):
            self._dismiss(helper)

    def _accept(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError:
            return
        if len(self._visitors) >= MOST_VISITORS or not sockets.is_trusted(visitor):
            visitor.close()
            return
        visitor.setblocking(False)
        self._visitors[visitor] = time.monotonic() + VISITOR_S
        self._loop.watch(visitor.fileno(), select.POLLIN, lambda: self._hear(visitor))

    def _see_off(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._loop.forget(visitor.fileno())
        visitor.close()

    def _hear(self, visitor: socket.socket) -> None:
        try:
            # Only a look: what comes with it is for the process that shall hold it.
            line = visitor.recv(MAX_REQUEST, socket.MSG_PEEK)
        except OSError:
            line = b""
        request = _parse(line)
        version = request.get("version", 1)
        name = str(request.get("name", ""))
        match request.get("do"):
            case _ if version not in SPOKEN:
                why = f"version {version} is not spoken here"
                self._answer(visitor, {"error": why, "version": VERSION})
            case "hold" if name:
                self._hold(name, visitor)
            case "fetch" | "drop" if name in self._helpers:
                self._pass_on(name, visitor)
            case "fetch" | "drop":
                self._answer(visitor, _in(version, {"error": f"nothing is held as {name}"}))
            case "list":
                names = {"ok": True, "names": sorted(self._helpers)}
                self._answer(visitor, _in(version, names))
            case _:
                self._answer(visitor, _in(version, {"error": "not a request"}))
        self._see_off(visitor)

    def _answer(self, visitor: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            visitor.settimeout(ANSWER_S)
            _send(visitor, answer)

    def _pass_on(self, name: str, visitor: socket.socket) -> None:
        try:
            sockets.send(self._helpers[name], VISITOR, [visitor.fileno()])
        except OSError:
            self._answer(visitor, {"error": f"who holds {name} does not answer"})

    def _hold(self, name: str, visitor: socket.socket) -> None:
        ours, its = socket.socketpair()
        if os.fork() == 0:
            try:
                for other in (ours, self._listener, *self._helpers.values(), *self._visitors):
                    if other is not visitor:
                        other.close()
                held = _be_helper(visitor, its)
                if held is not None:
                    _take_elsewhere(held, self._path, name, self._parent)
            finally:
                os._exit(0)
        its.close()
        ours.setblocking(False)
        self._loop.watch(ours.fileno(), select.POLLIN, lambda: self._hear_helper(name, ours))

    def _hear_helper(self, name: str, helper: socket.socket) -> None:
        """It holds what it was to hold, or it has ended."""
        has_ended = True
        with contextlib.suppress(OSError):
            has_ended = not helper.recv(1)
        if has_ended:
            if self._helpers.get(name) is helper:
                del self._helpers[name]
            self._dismiss(helper)
            return
        before = self._helpers.get(name)
        self._helpers[name] = helper
        if before is not None:
            self._dismiss(before)

    def _dismiss(self, helper: socket.socket) -> None:
        self._loop.forget(helper.fileno())
        with contextlib.suppress(OSError):  # it has ended
            helper.send(LET_GO, socket.MSG_NOSIGNAL)
        helper.close()


def _be_helper(visitor: socket.socket, service: socket.socket) -> int | None:
    """Hold one descriptor, from the visitor that brings it until it is to be let go.

    Returns it if the service dies instead.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the service decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    visitor.settimeout(ANSWER_S)
    request, fds = _receive(visitor, MAX_REQUEST)
    version = request.get("version", 1)
    if len(fds) != 1 or not _is_fuse(fds[0]):
        _send(visitor, _in(version, {"error": "only a descriptor of /dev/fuse is held"}))
        return None
    service.send(b"\n")
    _send(visitor, _in(version, {"ok": True}))
    visitor.close()
    poll = select.poll()
    poll.register(service, select.POLLIN)
    poll.register(fds[0], 0)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if fds[0] in ready and is_disconnected(fds[0]):
            return None
        if service.fileno() not in ready:
            continue
        command, connections, _ = sockets.receive(service, 1, 1)
        if not command:
            return fds[0]
        if command == LET_GO or not _answer(connections, fds[0]):
            return None


def _answer(connections: list[int], fd: int) -> bool:
    """Answer one client that the service has passed on; False when it has dropped what is held."""
    with socket.socket(fileno=connections[0]) as visitor, contextlib.suppress(OSError):
        visitor.settimeout(ANSWER_S)
        request, _ = _receive(visitor, MAX_REQUEST)
        answer = _in(request.get("version", 1), {"ok": True})
        if request.get("do") == "drop":
            _send(visitor, answer)
            return False
        _send(visitor, answer, fd)
    return True


def _take_elsewhere(fd: int, path: str, name: str, parent: int) -> None:
    """Have the next service hold what a dead one's process held.

    Who has gone with the whole container leaves nothing, as its namespace would.
    """
    deadline = time.monotonic() + LOOKING_S
    ends = select.poll()
    ends.register(parent, select.POLLIN)
    ends.register(fd, 0)
    while time.monotonic() < deadline and not ends.poll(LOOK_MS):
        with contextlib.suppress(FdStoreError):
            hold(path, name, fd)
            return


def _in(version: int, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as that version has it."""
    return answer if version == 1 else {**answer, "version": version}


def _is_fuse(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == FUSE_DEVICE


def main(socket_path: str | os.PathLike[str]) -> int:
    """Be the service until SIGTERM; return the exit status."""
    path = os.path.abspath(socket_path)
    parent = os.pidfd_open(os.getppid() or os.getpid())  # 0 in another PID namespace
    listener = control.listen(path)
    if listener is None:
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children need no burial

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    service = Service(listener.socket, path, parent)
    try:
        service.run()
    except SystemExit:
        service.end()
        raise
    finally:
        listener.remove()
    return 0
