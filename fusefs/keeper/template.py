"""A template: a process with a daemon's imports done, from which standbys are forked.

The keeper starts it (standby.py) as it starts a daemon, but for a variable
in the environment and a SOCK_SEQPACKET socket as standard input:

    template to keeper:  READY, when it can fork; then a pid for each FORK
    keeper to template:  FORK, + what a daemon's socket and standard input are to be

A standby is the keeper's child: it is forked twice, and the keeper takes orphans
in meanwhile. Its standard input is a socket as well, over which it gets what a
daemon reads once it is to be one. The end of either socket is the process's.

Neither has read anything before that, so neither has a secret. What is
installed may change while they wait: a template then ends, and a standby starts
its program again before it reads, so that no daemon is made of two versions.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable

from fusefs.keeper.protocol import ENVIRONMENT

VARIABLE = "FUSEFS_TEMPLATE"
READY = b"ready"
FORK = b"fork"
PID = struct.Struct("=i")


def is_template() -> bool:
    """Whether this process was started as one; true once."""
    return os.environ.pop(VARIABLE, None) is not None


def serve(has_changed: Callable[[], bool]) -> None:
    """Be a template; return in a standby that is to be a daemon, with its input unread. Blocks.

    `has_changed` tells whether another program is installed by now.
    """
    try:
        fds = _fork_for_ever(has_changed)
    except OSError:  # the keeper is gone
        sys.exit()
    _stand_by(*fds)
    if has_changed():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _fork_for_ever(has_changed: Callable[[], bool]) -> list[int]:
    """Return the descriptors that come with a FORK, in the process that is made for it."""
    with socket.socket(fileno=os.dup(0)) as keeper:
        keeper.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(keeper, len(FORK), 2)
            if data != FORK or len(fds) != 2 or has_changed():
                sys.exit()
            pid = _fork_for_parent()
            if pid == 0:
                return fds
            for fd in fds:
                os.close(fd)
            keeper.send(PID.pack(pid))


def _fork_for_parent() -> int:
    """Fork a process that is no child of this one; return its pid, or 0 in it."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(writer, PID.pack(pid))
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    packed = os.read(reader, PID.size)
    os.close(reader)
    os.waitpid(middle, 0)
    return int(PID.unpack(packed)[0])


def _stand_by(channel: int, stdin: int) -> None:
    """Wait for the input, as who will have `channel` to the keeper; end with the keeper."""
    os.setsid()
    os.dup2(stdin, 0)
    os.close(stdin)
    os.set_inheritable(channel, True)
    os.environ[ENVIRONMENT] = str(channel)
    with socket.socket(fileno=os.dup(0)) as keeper:
        try:
            is_needed = bool(keeper.recv(1, socket.MSG_PEEK))
        except OSError:
            is_needed = False
    if not is_needed:
        os._exit(0)
