"""A template: a process with a daemon's imports done, from which a node's daemons are forked.

A supervisor starts it for the daemons of its mounts (csi/daemons/template.py): as a daemon
is started, but for a variable in the environment and a SOCK_SEQPACKET socket as standard
input:

    from it:  READY, when it can fork; then a pid for each request
    to it:    a user, + a daemon's sockets to keeper and supervisor, its standard input and
              output, and a file with its environment, a JSON object

What is forked is a child of the supervisor: it is forked twice, and the supervisor takes
orphans in meanwhile. It waits for GO from there, so that no daemon serves which the
supervisor does not know. The end of either socket is the process's.

No process of a mount gets anything of another's. The template reads neither settings,
keys nor the environments that it passes on, so there is no secret in the memory that
forked processes share, and it closes the descriptors that it passes on. Of the rights of
a supervisor it keeps the one to change users. A daemon gives that up, and has closed what
is not its own, before it reads anything. What daemons of one template have in common is
where libraries lie in their memory, and the order of hashes.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
from functools import partial

from fusefs.keeper import supervisor_protocol
from fusefs.keeper.protocol import ENVIRONMENT
from fusefs.linux import capabilities, processes
from fusefs.linux.libc import forbid_inspection

TYPE_CHECKING = False  # a daemon does without typing here
if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "FUSEFS_TEMPLATE"
READY = b"ready"
GO = b"go"
PID = struct.Struct("=i")
USER = struct.Struct("=II")  # uid, gid
_DESCRIPTORS = 5


def is_wanted() -> bool:
    """True in a process that is to be a template; False when it is asked again."""
    return os.environ.pop(VARIABLE, "") != ""


def serve() -> None:
    """Be a template; return in a process that is to be a daemon, with its input unread. Blocks."""
    _keep_users_alone()
    try:
        begin = _fork_for_ever()
    except OSError:  # the supervisor is gone, or no process can be forked
        sys.exit()
    begin()


def _keep_users_alone() -> None:
    """Give up all privileges but those that it takes to change the user, if this is root."""
    if os.geteuid() == 0:
        capabilities.keep_only(capabilities.CAP_SETUID, capabilities.CAP_SETGID)


def _fork_for_ever() -> Callable[[], None]:
    """Return what a process begins with, in that which is forked for a request."""
    with socket.socket(fileno=os.dup(0)) as requests:
        requests.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(requests, USER.size, _DESCRIPTORS)
            if len(data) != USER.size or len(fds) != _DESCRIPTORS:
                sys.exit()
            pid = _fork_for_parent()
            if pid == 0:
                return partial(_become_daemon, *USER.unpack(data), *fds)
            for fd in fds:
                os.close(fd)
            requests.send(PID.pack(pid))


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


def _become_daemon(
    uid: int, gid: int, channel: int, supervisor: int, stdin: int, stdout: int, environment: int
) -> None:
    """Give up all rights and what is not this daemon's own, then wait for the supervisor's GO."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    processes.close_all_but(channel, supervisor, environment)
    processes.become_in_place(processes.Credentials(uid, gid, []))
    forbid_inspection()  # a change of the user may have allowed it
    if os.read(supervisor, len(GO)) != GO:
        os._exit(0)
    with open(environment, "rb") as file:
        variables = json.load(file)
    os.environ.clear()
    os.environ.update(variables)
    os.environ[ENVIRONMENT] = str(channel)
    os.environ[supervisor_protocol.ENVIRONMENT] = str(supervisor)
