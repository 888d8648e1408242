"""Requests to a running daemon: a Unix socket, one JSON line each way.

The daemon (daemon/control_socket.py) serves `status.sock` in the mount's runtime directory
(registry.py); this module is the commands' side. A client sends `{"command": "status"}` and a
newline, gets one line back, and the connection closes (keeper/exchange.py). Answers never wait for
the mount, so even a mount on which all requests hang has a status.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusefs.keeper.exchange import ControlError, NotAnsweringError, exchange, peer

__all__ = [
    "MALFORMED",
    "CommandError",
    "ControlError",
    "Message",
    "NotAnsweringError",
    "exchange",
    "peer",
    "request",
]

Message = dict[str, Any]
# The errors that parsing an unexpected answer may raise. A daemon of another version may answer
# in another form, and root's commands do not trust any daemon.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class CommandError(Exception):
    """A command failed; the message is one line for the user."""


def request(path: Path, command: str, timeout_s: float) -> Message:
    """Send a command to the daemon at `path` and return its answer; raises ControlError."""
    return exchange(path, {"command": command}, timeout_s)
