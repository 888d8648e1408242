"""The keeper's named socket: requests and answers of one JSON line each (exchange.py).

The socket belongs to the keeper's user alone, and the peer's credentials are checked as well. No
client can hold the keeper up: sockets do not block, and a client that does not send its request, or
does not take its answer, within `CLIENT_S` is disconnected.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

from fusefs.keeper import exchange
from fusefs.keeper.exchange import ControlError
from fusefs.keeper.state import log
from fusefs.linux import sockets

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

MAX_REQUEST = 1 << 20  # settings and a command are a few KiB
MOST_CLIENTS = 64
CLIENT_S = 5.0
# poll(2) takes no more than 2^31 ms; to wake up now and then costs nothing.
LONGEST_WAIT_S = 86_400.0


class Loop:
    """A poll loop that calls the handlers of descriptors that are ready."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def run_once(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` seconds (None: for ever); call handlers of ready descriptors."""
        timeout_ms = None
        if timeout_s is not None:
            timeout_ms = int(1000 * min(max(0.0, timeout_s), LONGEST_WAIT_S)) + 1
        for fd, _ in self._poll.poll(timeout_ms):
            handler = self._handlers.get(fd)  # None if an earlier handler called `forget`
            if handler is not None:
                handler()


class Listener:
    """A listening Unix socket to which only this user can connect; making it may raise OSError."""

    def __init__(self, path: str, kind: int = socket.SOCK_STREAM) -> None:
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, kind)
        self.socket.setblocking(False)
        with sockets.short_name(path) as name:
            # Bound under another name first, so that under its own name it always listens.
            unfinished = f"{os.path.dirname(name)}/.{os.getpid()}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            self.socket.bind(unfinished)
            os.chmod(unfinished, 0o600)
            self.socket.listen()
            os.rename(unfinished, name)
        self._identity = self._find_identity()

    def _find_identity(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    @property
    def has_name(self) -> bool:
        """True if the path still leads to this socket, and not to another process's."""
        try:
            return self._find_identity() == self._identity
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the socket's path, unless it belongs to another process's socket by now."""
        if self.has_name:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def listen(path: str) -> Listener | None:
    """Make a listener; if that fails, log the error and return None."""
    try:
        return Listener(path)
    except OSError as error:
        log(f"the socket {path} can't be made: {error.strerror}")
        return None


class Client:
    """A command's connection to the keeper: one request and, at once or later, its answer."""

    def __init__(self, control: ControlSocket, connection: socket.socket) -> None:
        self._control = control
        self.connection = connection
        self.deadline = time.monotonic() + CLIENT_S
        self._request = b""
        self._answer = b""

    def read(self) -> None:
        """Read more of the request, and handle it when it is complete."""
        try:
            chunk = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._request += chunk
        if not chunk or len(self._request) > MAX_REQUEST:
            self._control.dismiss(self)
        elif b"\n" in chunk:
            self._control.loop.forget(self.connection.fileno())
            self.deadline = float("inf")
            self._control.ask(self, self._request)

    def answer(self, answer: dict[str, Any]) -> None:
        """Send the answer, then close the connection."""
        self._answer = exchange.encode(answer)
        self.deadline = time.monotonic() + CLIENT_S
        self._write()

    def _write(self) -> None:
        try:
            sent = self.connection.send(self._answer, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self._answer)
        self._answer = self._answer[sent:]
        if self._answer:
            self._control.loop.watch(self.connection.fileno(), select.POLLOUT, self._write)
        else:
            self._control.dismiss(self)


class ControlSocket:
    """The keeper's named socket; `ask` calls `Client.answer` for each request, at once or later."""

    def __init__(
        self, loop: Loop, listener: Listener | None, ask: Callable[[Client, dict[str, Any]], None]
    ) -> None:
        self.loop = loop
        self._ask = ask
        self._listener = listener
        self._clients: list[Client] = []
        if listener is not None:
            loop.watch(listener.socket.fileno(), select.POLLIN, self._accept)

    def deadline(self) -> float:
        """Return the earliest deadline of a client, in monotonic seconds; inf without clients."""
        return min((client.deadline for client in self._clients), default=float("inf"))

    def dismiss_late(self, now: float) -> None:
        """Close the connections of clients whose deadline is over at `now` (monotonic seconds)."""
        for client in list(self._clients):
            if now >= client.deadline:
                self.dismiss(client)

    def dismiss(self, client: Client) -> None:
        """Close a client's connection, if it is still open."""
        if client in self._clients:
            self._clients.remove(client)
            self.loop.forget(client.connection.fileno())
            client.connection.close()

    def close(self) -> None:
        """Close all connections; the listening socket stays open for the keeper's successor."""
        for client in list(self._clients):
            self.dismiss(client)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.socket.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self._clients) >= MOST_CLIENTS or not sockets.is_trusted(connection):
            connection.close()
            return
        client = Client(self, connection)
        self._clients.append(client)
        self.loop.watch(connection.fileno(), select.POLLIN, client.read)

    def ask(self, client: Client, line: bytes) -> None:
        try:
            self._ask(client, exchange.parse(line))
        except ControlError as error:
            client.answer({"error": str(error)})
        except (ValueError, TypeError, KeyError) as error:
            client.answer({"error": f"not a request: {error}"})
