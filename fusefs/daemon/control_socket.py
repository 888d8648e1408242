"""The daemon's end of its control socket (launch/control.py has the commands' end).

Requests are bounded in size and time, so that no client can block the daemon. Only the
mount's owner can access the socket and its directory. The client's credentials are checked
as well: the daemon answers only the owner and root.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from fusefs.keeper.control import Listener
from fusefs.keeper.exchange import ControlError, parse
from fusefs.launch.control import Message
from fusefs.linux import sockets
from fusefs.telemetry.activity import ACTIVITY

log = logging.getLogger(__name__)

Answer = Callable[[Message], Message | Awaitable[Message]]

# The maximum size: the longest request is a piece of a list of paths, with JSON's escapes.
MAX_REQUEST = 256 << 10
CLIENT_TIMEOUT_S = 5.0


async def serve(
    path: Path, answer: Answer, *, task_status: trio.TaskStatus[None] | None = None
) -> None:
    """Listen on `path`, report to `task_status`, answer requests by `answer`, until cancelled."""
    listener = Listener(os.fspath(path))
    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener.socket))
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, partial(_serve_client, answer), [listening])
            if task_status is not None:
                task_status.started()
    finally:
        listener.remove()
        listener.socket.close()


async def _serve_client(answer: Answer, stream: trio.SocketStream) -> None:
    with trio.move_on_after(CLIENT_TIMEOUT_S):
        try:
            async with stream:
                await stream.send_all(await _reply(stream, answer) + b"\n")
        except trio.BrokenResourceError:
            log.debug("a client of the status socket went away")


async def _reply(stream: trio.SocketStream, answer: Answer) -> bytes:
    """Read a request and return its answer as JSON, `{"error": …}` for any error."""
    try:
        message = await _receive(stream)  # before a refusal, which a sending client would miss
        if not sockets.is_trusted(stream.socket):
            raise ControlError("only the mount's owner and root are answered")
        ACTIVITY.note()
        result = answer(message)
        reply = await result if inspect.isawaitable(result) else result
        return json.dumps(reply).encode()
    except ControlError as error:
        return json.dumps({"error": str(error)}).encode()
    except Exception as error:
        log.exception("the status socket could not answer")
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


async def _receive(stream: trio.SocketStream) -> Message:
    line = b""
    while b"\n" not in line:
        chunk = await stream.receive_some(MAX_REQUEST + 1 - len(line))
        line += chunk
        if not chunk or len(line) > MAX_REQUEST:
            raise ControlError(f"a request is one JSON line of at most {MAX_REQUEST} bytes")
    return parse(line)
