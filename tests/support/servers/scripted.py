"""An HTTP server that answers byte for byte as a test says."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO


@dataclass(frozen=True)
class Received:
    """A request: its first line and headers as they came, and its body."""

    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.lower() == name:
                return value.strip()
        return None


# The pieces of an answer; each is sent before the next is made. The connection is closed
# after an empty one.
Script = Callable[[Received], Iterable[bytes]]
RESET = b"\0reset"  # closes the connection with RST


@dataclass
class ScriptedServer:
    script: Script
    port: int = 0
    scheme: str = "http"
    requests: list[Received] = field(default_factory=list)
    reads_bodies: bool = True
    connections: int = 0

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"


@contextlib.contextmanager
def scripted_server(
    script: Script, context: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """Serve in threads, with TLS if there is a context."""
    server = ScriptedServer(script, scheme="http" if context is None else "https")
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=_accept, args=(listener, server, context), daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """An answer with a Content-Length; underscores in names of headers are hyphens."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _accept(
    listener: socket.socket, server: ScriptedServer, context: ssl.SSLContext | None
) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        server.connections += 1
        arguments = connection, server, context
        threading.Thread(target=_converse, args=arguments, daemon=True).start()


def _converse(plain: socket.socket, server: ScriptedServer, context: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError), plain:
        sock = plain if context is None else context.wrap_socket(plain, server_side=True)
        sock.settimeout(30)
        with sock, sock.makefile("rb") as stream:
            while (request := _read(stream, server)) is not None:
                server.requests.append(request)
                for piece in server.script(request):
                    if piece == RESET:
                        linger = (1).to_bytes(4, "little") + bytes(4)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return
                    if not piece:
                        return
                    sock.sendall(piece)


def _read(stream: IO[bytes], server: ScriptedServer) -> Received | None:
    lines = []
    while (line := stream.readline()) not in (b"\r\n", b""):
        lines.append(line)
    if not line:
        return None
    head = Received(b"".join(lines), b"")
    length = int(head.header("content-length") or 0) if server.reads_bodies else 0
    return Received(head.head, stream.read(length))
