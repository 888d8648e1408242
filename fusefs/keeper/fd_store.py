"""The descriptor store: a process that holds mounts for others (`fusefs keeper --socket PATH`).

A FUSE mount lives for as long as any process holds its /dev/fuse descriptor. A
keeper whose configuration names a `descriptor_store` leaves a copy there, so that
the mount outlives keeper, broker and daemon all at once, as when the container
that they run in is replaced. A process that mounts there again fetches the copy.

Each descriptor is held by a helper process of its own, which also receives it
and hands out copies: should anything hang, it is the helper. The service only
looks at requests, and passes the connection on. A helper ends when its
descriptor is dropped, when the mount is gone, and when the service is ordered
to end. If the service dies instead, the helper gives its descriptor to the next
service at PATH, unless the process that had started the dead service is gone
too, and its container with it.

When each process gets the descriptor: the keeper opens it, and its broker is
forked with it; once it is mounted, the daemon and this store get it, each within
moments. The next daemon gets it from a broker, after this store has been given
it once more; the next keeper gets it from here. So each of the three may die,
and be replaced, while the other two have it.

Requests and answers are those of exchange.py, each in one message:

    {"do": "hold", "name": …} + the descriptor   keep it, instead of one of that name
    {"do": "fetch", "name": …}                   answered with a copy
    {"do": "drop", "name": …}
    {"do": "list"}                               answered with the names
    {"do": "complete"}                           see below

A service that takes the place of another is first brought what that one holds. Until it
is `complete`, or `filling_s` have passed, it answers no list: a mount that is not on it
counts as lost.

Only root, or the user that runs the service, is answered.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from types import FrameType

from fusefs.keeper import control, exchange
from fusefs.keeper.control import Loop
from fusefs.keeper.exchange import ControlError
from fusefs.keeper.state import NEVER, log
from fusefs.linux import sockets
from fusefs.linux.fuse_connection import is_device, is_disconnected
from fusefs.linux.processes import close_all_but

TYPE_CHECKING = False  # the keeper imports this module, and does without typing
if TYPE_CHECKING:
    from typing import Any

MAX_REQUEST = 8192
MOST_CLIENTS = 64
REQUEST_S = 5.0
ANSWER_S = 1.0
CLIENT_S = 5.0
# For another service to come in the place of one that was killed.
NEXT_SERVICE_S = 60.0
RETRY_MS = 100

# From the service to a helper.
CLIENT = b"\n"  # + the connection of a client that fetches or drops
LET_GO = b"."

OK = exchange.encode({"ok": True})


def name_of(mountpoint: str, connection: int) -> str:
    """What a mount's descriptor is held as."""
    return f"{mountpoint}#{connection}"


# --- for its clients --------------------------------------------------------------


def hold(path: str, name: str, fd: int) -> None:
    """Have the service at `path` hold a copy of the descriptor.

    Raises:
        ControlError: it does not.
    """
    exchange.exchange_fds(path, {"do": "hold", "name": name}, CLIENT_S, [fd])


def fetch(path: str, name: str) -> int:
    """A copy of what is held under the name; non-inheritable.

    Raises:
        ControlError: nothing is, or the service does not answer.
    """
    _, fds = exchange.exchange_fds(path, {"do": "fetch", "name": name}, CLIENT_S)
    if not fds:
        raise ControlError("no descriptor came")
    return fds[0]


def drop(path: str, name: str) -> None:
    """Have it held no longer.

    Raises:
        ControlError: nothing is, or the service does not answer.
    """
    exchange.exchange(path, {"do": "drop", "name": name}, CLIENT_S)


def complete(path: str) -> None:
    """It has been brought what the service before it held, and may answer lists.

    Raises:
        ControlError: it does not answer.
    """
    exchange.exchange(path, {"do": "complete"}, CLIENT_S)


# --- the service --------------------------------------------------------------------


class FdStore:
    """The socket that listens on `path`, and which process holds what.

    `parent` is a pidfd of whoever has started this process.
    """

    def __init__(
        self, listener: socket.socket, path: str, parent: int, filling_s: float = 0.0
    ) -> None:
        self._listener = listener
        self._path = path
        self._parent = parent
        self._lists_from = time.monotonic() + filling_s
        self._loop = Loop()
        self._loop.watch(listener.fileno(), select.POLLIN, self._accept)
        self._clients: dict[socket.socket, float] = {}  # deadlines
        self._helpers: dict[str, socket.socket] = {}

    def run(self) -> None:
        """Serve until the process is ended."""
        while True:
            soonest = min(self._clients.values(), default=NEVER)
            self._loop.run_once(None if soonest == NEVER else soonest - time.monotonic())
            now = time.monotonic()
            for client, deadline in list(self._clients.items()):
                if now >= deadline:
                    self._close_client(client)

    def end(self) -> None:
        """Hold nothing any more."""
        for helper in list(self._helpers.values()):
            self._dismiss(helper)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= MOST_CLIENTS or not sockets.is_trusted(client):
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = time.monotonic() + REQUEST_S
        self._loop.watch(client.fileno(), select.POLLIN, lambda: self._on_request(client))

    def _close_client(self, client: socket.socket) -> None:
        del self._clients[client]
        self._loop.forget(client.fileno())
        client.close()

    def _on_request(self, client: socket.socket) -> None:
        try:
            # Only a look: what comes with it is for the process that shall hold it.
            line = client.recv(MAX_REQUEST, socket.MSG_PEEK)
        except OSError:
            line = b""
        try:
            self._handle(exchange.parse(line), client)
        except ControlError as error:
            self._answer(client, {"error": str(error)})
        self._close_client(client)

    def _handle(self, request: dict[str, Any], client: socket.socket) -> None:
        exchange.check_version(request)
        name = str(request.get("name", ""))
        match request.get("do"):
            case "hold" if name:
                self._hold(name, client)
            case "fetch" | "drop" if name in self._helpers:
                self._pass_on(name, client)
            case "fetch" | "drop":
                raise ControlError(f"nothing is held as {name}")
            case "complete":
                self._lists_from = 0.0
                self._answer(client, {"ok": True})
            case "list" if time.monotonic() < self._lists_from:
                raise ControlError("it has not yet what the service before it holds")
            case "list":
                self._answer(client, {"ok": True, "names": sorted(self._helpers)})
            case _:
                raise ControlError("not a request")

    def _answer(self, client: socket.socket, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            client.settimeout(ANSWER_S)
            sockets.send(client, exchange.encode(answer))

    def _pass_on(self, name: str, client: socket.socket) -> None:
        try:
            sockets.send(self._helpers[name], CLIENT, [client.fileno()])
        except OSError:
            self._answer(client, {"error": f"the process that holds {name} does not answer"})

    def _hold(self, name: str, client: socket.socket) -> None:
        try:
            ours, its = socket.socketpair()
            is_child = os.fork() == 0
        except OSError as error:
            raise ControlError(f"{name} can't be held: {error.strerror}") from error
        if is_child:
            try:
                # A copy of another helper's socket would keep the service's end from it.
                close_all_but(client.fileno(), its.fileno(), self._parent)
                held = _run_helper(client, its)
                if held is not None:
                    _hand_to_next_service(held, self._path, name, self._parent)
            except Exception as error:
                log(f"{name} is not held: {error}")
            finally:
                os._exit(0)
        its.close()
        ours.setblocking(False)
        self._loop.watch(ours.fileno(), select.POLLIN, lambda: self._on_helper_message(name, ours))

    def _on_helper_message(self, name: str, helper: socket.socket) -> None:
        """It holds what it was to hold, or it has ended."""
        try:
            has_ended = not helper.recv(1)
        except BlockingIOError:
            return
        except OSError:
            has_ended = True
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


def _run_helper(client: socket.socket, service: socket.socket) -> int | None:
    """Hold one descriptor, from the client that brings it until it is to be let go.

    Returns it if the service dies instead.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the service decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    client.settimeout(ANSWER_S)
    _, fds, _ = sockets.receive(client, MAX_REQUEST, 1)
    if len(fds) != 1 or not is_device(os.fstat(fds[0])):
        refusal = {"error": "only a descriptor of /dev/fuse is held"}
        sockets.send(client, exchange.encode(refusal))
        return None
    service.send(b"\n")
    with contextlib.suppress(OSError):  # a client that is killed now had it held before
        sockets.send(client, OK)
    client.close()
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
    with socket.socket(fileno=connections[0]) as client, contextlib.suppress(OSError, ControlError):
        client.settimeout(ANSWER_S)
        request = exchange.parse(client.recv(MAX_REQUEST))
        if request.get("do") == "drop":
            sockets.send(client, OK)
            return False
        sockets.send(client, OK, [fd])
    return True


def _hand_to_next_service(fd: int, path: str, name: str, parent: int) -> None:
    """Have the next service hold what a dead one's process held.

    Where the whole container has ended, the process that started the service is gone too,
    and nothing is held any more.
    """
    deadline = time.monotonic() + NEXT_SERVICE_S
    ends = select.poll()
    ends.register(parent, select.POLLIN)
    ends.register(fd, 0)
    while time.monotonic() < deadline and not ends.poll(RETRY_MS):
        with contextlib.suppress(ControlError):
            hold(path, name, fd)
            return


def main(socket_path: str | os.PathLike[str], filling_s: float = 0.0) -> int:
    """Be the service until SIGTERM; return the exit status."""
    path = os.path.abspath(socket_path)
    parent = os.pidfd_open(os.getppid() or os.getpid())  # 0 in another PID namespace
    listener = control.listen(path)
    if listener is None:
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    service = FdStore(listener.socket, path, parent, filling_s)
    try:
        service.run()
    except SystemExit:
        service.end()
        raise
    finally:
        listener.remove()
    return 0
