"""A template: a process with a daemon's imports done, from which others are forked.

A keeper starts it for its standbys (standby.py), a supervisor for the daemons of its
mounts (csi/daemons/template.py). It is started as a daemon is, but for a variable in the
environment and a SOCK_SEQPACKET socket as standard input:

    from it:  READY, when it can fork; then a pid for each request
    to it:    FORK, + what a standby's socket and standard input are to be
              LAUNCH and a user, + a daemon's sockets to keeper and supervisor, its
              standard input and output, and a file with its environment, a JSON object

What is forked is a child of who requests it: it is forked twice, and the other side takes
orphans in meanwhile. A standby waits for its standard input, over which it gets what a
daemon reads once it is to be one. A daemon waits for GO from its supervisor, so that none
serves which the supervisor does not know. The end of either socket is the process's.

No process of a mount gets anything of another's. The template reads neither settings,
keys nor the environments that it passes on, so there is no secret in the memory that
forked processes share, and it closes the descriptors that it passes on. Of the rights of
a supervisor it keeps the one to change users. A daemon gives that up, and has closed what
is not its own, before it reads anything. What daemons of one template have in common is
where libraries lie in their memory, and the order of hashes.

What is installed may change meanwhile: a template then ends, and a standby starts
its program again before it reads, so that no daemon is made of two versions.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial

from fusefs.keeper import supervisor_protocol
from fusefs.keeper.protocol import ENVIRONMENT
from fusefs.linux import capabilities, processes
from fusefs.linux.libc import forbid_inspection

VARIABLE = "FUSEFS_TEMPLATE"
# Its values: what is forked is for one mount alone, or for any of a supervisor's.
FOR_STANDBYS, FOR_DAEMONS = "standbys", "daemons"
READY = b"ready"
FORK = b"fork"
LAUNCH = b"launch"
GO = b"go"
PID = struct.Struct("=i")
USER = struct.Struct("=II")  # uid, gid


def purpose() -> str:
    """What this process is a template for; "" if it is none, and when it was looked at before."""
    return os.environ.pop(VARIABLE, "")


def serve(has_changed: Callable[[], bool]) -> None:
    """Be a template; return in a process that is to be a daemon, with its input unread. Blocks.

    `has_changed` tells whether another program is installed by now.
    """
    try:
        begin = _fork_for_ever(has_changed)
    except OSError:  # whoever has started it is gone, or it can't fork
        sys.exit()
    begin()


def _fork_for_ever(has_changed: Callable[[], bool]) -> Callable[[], None]:
    """Return what a process begins with, in that which is forked for a request."""
    with socket.socket(fileno=os.dup(0)) as requests:
        requests.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(requests, len(LAUNCH) + USER.size, 5)
            begin = _beginning(data, fds, has_changed)
            if begin is None or has_changed():
                sys.exit()
            pid = _fork_for_parent()
            if pid == 0:
                return begin
            for fd in fds:
                os.close(fd)
            requests.send(PID.pack(pid))


def _beginning(
    data: bytes, fds: list[int], has_changed: Callable[[], bool]
) -> Callable[[], None] | None:
    """What a request is for; None if it makes no sense, or is the end."""
    if data == FORK and len(fds) == 2:
        return partial(_stand_by, has_changed, *fds)
    if data.startswith(LAUNCH) and len(data) == len(LAUNCH) + USER.size and len(fds) == 5:
        uid, gid = USER.unpack_from(data, len(LAUNCH))
        return partial(_become_daemon, processes.Credentials(uid, gid, []), *fds)
    return None


def _fork_for_parent() -> int:
    """Fork a process that is no child of this one; return its pid, or 0 in it."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
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
    if not packed:
        raise OSError(errno.EAGAIN, "no process can be forked")
    return int(PID.unpack(packed)[0])


def _stand_by(has_changed: Callable[[], bool], channel: int, stdin: int) -> None:
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
    if has_changed():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _become_daemon(
    credentials: processes.Credentials,
    channel: int,
    supervisor: int,
    stdin: int,
    stdout: int,
    environment: int,
) -> None:
    """Give up all rights and what is not this daemon's own, then wait for the supervisor's GO."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    processes.close_all_but(channel, supervisor, environment)
    processes.become_in_place(credentials)
    forbid_inspection()  # a change of the user may have allowed it
    if os.read(supervisor, len(GO)) != GO:
        os._exit(0)
    with open(environment, "rb") as file:
        variables = json.load(file)
    os.environ.clear()
    os.environ.update(variables)
    os.environ[ENVIRONMENT] = str(channel)
    os.environ[supervisor_protocol.ENVIRONMENT] = str(supervisor)


def keep_users_alone() -> None:
    """Give up all privileges but those that it takes to change the user, if this is root."""
    if os.geteuid() == 0:
        capabilities.keep_only(capabilities.CAP_SETUID, capabilities.CAP_SETGID)
