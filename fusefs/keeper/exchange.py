"""One request and its answer over a Unix socket, each a JSON object in one line.

Commands talk in this way to keepers (control.py) and daemons (daemon/control_socket.py).
"""

from __future__ import annotations

import json
import os
import time

from fusefs.linux import sockets

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    import socket
    from typing import Any

MAX_ANSWER = 4 << 20
PEER_TIMEOUT_S = 5.0


# The `code` of a refused upgrade whose new daemon can't read the old daemon's state.
HOPELESS = "cannot-take-over"


class ControlError(Exception):
    """The peer refused the request, with an error `code` or "", or its answer is malformed."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code


class NotAnsweringError(ControlError):
    """No answer came in time, or no process listens on the socket."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Parse one line as a JSON object; raises ControlError if the line is something else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ControlError("not a JSON object")
    return message


def peer(path: str | os.PathLike[str]) -> int | None:
    """Return the pid of the listener on `path`, even if it hangs; None if no process listens."""
    try:
        with sockets.connect(path, PEER_TIMEOUT_S) as sock:
            return sockets.peer_of(sock)[0]
    except OSError:
        return None


def exchange(
    path: str | os.PathLike[str], request: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Send one request to the process that listens on `path`; return the answer.

    Raises:
        NotAnsweringError: there was no answer within `timeout_s`.
        ControlError: the process refused the request, or its answer is malformed.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with sockets.connect(path, timeout_s) as sock:
            if os.geteuid() and not sockets.is_trusted(sock):  # requests may have secrets
                raise NotAnsweringError("only the owner and root are asked")
            sock.sendall(encode(request))
            answer = parse(_read_line(sock, deadline))
    except OSError as error:
        raise NotAnsweringError(error.strerror or str(error)) from error
    if "error" in answer:
        raise ControlError(str(answer["error"]), str(answer.get("code", "")))
    return answer


def _read_line(sock: socket.socket, deadline: float) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(remaining_s)
        chunk = sock.recv(1 << 16)
        line += chunk
        if not chunk or len(line) > MAX_ANSWER:
            raise NotAnsweringError("the answer is cut off or too long")
    return bytes(line)
