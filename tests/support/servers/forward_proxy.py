"""A forward proxy on loopback, as HTTPS_PROXY names one: it notes what goes through it."""

import base64
import contextlib
import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.servers.relay import PIECE, relay


@dataclass
class ForwardProxy:
    """`tunnels` are the targets of CONNECT, `urls` those of requests without TLS.

    With a `password` (`user:word`) all others are refused with status 407; with `refusal`
    every tunnel is refused with that status. `wanted` are the targets of all requests.
    """

    password: str | None = None
    refusal: int | None = None
    tunnels: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    refused: int = 0
    url: str = ""

    def allows(self, headers: http.client.HTTPMessage) -> bool:
        if self.password is None:
            return True
        wanted = f"Basic {base64.b64encode(self.password.encode()).decode()}"
        return headers.get("proxy-authorization") == wanted


@contextlib.contextmanager
def forward_proxy(
    *, password: str | None = None, refusal: int | None = None
) -> Iterator[ForwardProxy]:
    proxy = ForwardProxy(password, refusal)

    class Connection(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                _serve(proxy, self)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def _serve(proxy: ForwardProxy, client: socketserver.StreamRequestHandler) -> None:
    line = client.rfile.readline(PIECE)
    if not line:
        return
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers = http.client.parse_headers(client.rfile)
    proxy.wanted.append(target)
    status = 407 if not proxy.allows(headers) else proxy.refusal
    if status is not None:
        proxy.refused += 1
        answer = f"HTTP/1.1 {status} {http.client.responses[status]}\r\ncontent-length: 0\r\n"
        client.wfile.write(f"{answer}connection: close\r\n\r\n".encode())
        return
    if method == "CONNECT":
        proxy.tunnels.append(target)
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            client.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            relay(client.connection, upstream)
        return
    proxy.urls.append(target)
    _forward(client, method, target, headers)


def _forward(
    client: socketserver.StreamRequestHandler,
    method: str,
    target: str,
    headers: http.client.HTTPMessage,
) -> None:
    """One request without TLS, and the end of the connection."""
    parts = urlsplit(target)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    body = client.rfile.read(int(headers.get("content-length", 0)))
    upstream = http.client.HTTPConnection(parts.netloc, timeout=30)
    with contextlib.closing(upstream):
        upstream.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if not name.lower().startswith("proxy-"):
                upstream.putheader(name, value)
        upstream.endheaders(body or None)
        answer = upstream.getresponse()
        content = answer.read()
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        lines += [
            f"{name}: {value}"
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "content-length")
        ]
        length = answer.getheader("content-length") if method == "HEAD" else len(content)
        lines += [f"content-length: {length}", "connection: close"]
        client.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + content)
