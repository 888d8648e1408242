"""HTTP servers of this process, on loopback: one method answers, a thread serves a connection."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs

# A status, headers and a body.
Answer = tuple[int, dict[str, str], bytes]
Headers = http.client.HTTPMessage


class InProcessServer:
    """A context manager that serves until its end, or until `stop`."""

    def __init__(self) -> None:
        owner = self

        class Handler(_Handler):
            server_object = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket.listen(128)  # its own 5 lose connections that come together
        self.is_stopped = False

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Answer nothing more, and refuse connections; may be called twice."""
        self.is_stopped = True
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """The answer to a request, of which a HEAD gets no body."""
        raise NotImplementedError

    def now(self) -> float:
        """The time that its answers tell, in seconds since the epoch."""
        return time.time()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_object: InProcessServer

    def _serve(self) -> None:
        owner = self.server_object
        if owner.is_stopped:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, headers, data = owner.answer(self.command, self.path, self.headers, body)
        self.send_response_only(status)
        self.send_header("Date", self.date_time_string(owner.now()))
        for name, value in headers.items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def single_values(query: str) -> dict[str, str]:
    """The first value of each parameter."""
    return {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
