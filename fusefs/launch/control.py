"""Requests to a running daemon: a Unix socket, one JSON line each way.

The daemon serves `status.sock` in the mount's runtime directory (registry.py) with
daemon/control_socket.py; this is the commands' side. A client sends
`{"command": "status"}` and a newline, gets one line back and the connection ends
(keeper/exchange.py). Answers never wait for the mount, so the status of a mount on
which everything hangs can be had.
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
# What reading an answer of another form, or numbers out of range, raises. Daemons of another
# version answer in theirs, and none is trusted by root's commands.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class CommandError(Exception):
    """A command failed; the message is one line for the user."""


def request(path: Path, command: str, timeout_s: float) -> Message:
    """Ask the daemon behind `path`; see `exchange`."""
    return exchange(path, {"command": command}, timeout_s)
