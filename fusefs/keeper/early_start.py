"""Keeper and daemon of a new mount, started before it is known what they are to mount.

Most of the time of a mount's start goes into the imports of its daemon. So `fusefs mount`
starts the keeper before it reads its command line (launch/early_keeper.py), and that starts
the daemon at once, unless it was forked from the command (launch/forked_keeper.py); both import
meanwhile. Their standard input is a SOCK_SEQPACKET socket, over which each gets one packet: a
JSON object, and two descriptors that become its standard input and its standard error. What
follows is as without an early start. The end of the socket is the end of the process: there
will be no mount, or not by this process.
The daemon writes one byte when it has its imports, and gets its packet after that.

The daemon is its keeper's child, and has the keeper's user until the packet says whom it is to
be. It gives up all rights before it reads anything but the program and this packet, which has
no secret. An early daemon that fails in its imports, or is of another program, is replaced by
one that is started as ever, whose standard error is the log. Its own is nowhere until then.

The next daemon imports as its user. So that a file which only root may read shows in the first
one already, that executes its program anew, as this user, if there is any among its modules.
"""

from __future__ import annotations

import os
import sys

# A daemon waits for what is imported here; all else is imported where it is needed.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from fusefs.linux.processes import Credentials

VARIABLE = "FUSEFS_EARLY"
# Of the number that a daemon's socket to its keeper has; see protocol.py.
CHANNEL_VARIABLE = "FUSEFS_KEEPER_FD"
# -P keeps the working directory, which is "/", out of the module path.
DAEMON = [sys.executable, "-P", "-m", "fusefs.daemon"]
# More than a packet can have; there may be thousands of groups in it.
_PACKET_SIZE = 1 << 20
_READY = b"\0"


class EarlyDaemon:
    """A daemon that waits for its packet, as the keeper's child, until it is taken or ended.

    `sock` is the other end of its standard input, and `channel` of its socket to the keeper.
    """

    def __init__(self, pid: int, sock: int, channel: int) -> None:
        self._pid = pid  # 0 once it is taken, or has ended
        self._pidfd = os.pidfd_open(pid)
        self._fds = sock, channel

    def take(
        self, command: list[str], settings: int, credentials: Credentials
    ) -> tuple[int, int, socket.socket] | None:
        """Have it go on as this user. Blocks until it has its imports.

        Returns its pid, pidfd and channel, which are the caller's then; None if it is another
        program, or dead.
        """
        import socket

        from fusefs.linux.processes import has_ended

        if command != DAEMON:
            return None
        given = {
            "uid": credentials.uid,
            "gid": credentials.gid,
            "groups": credentials.groups,
        }
        stdin, channel = self._fds
        with socket.socket(fileno=os.dup(stdin)) as sock:
            try:
                if not sock.recv(len(_READY)):
                    return None
                give(sock, given, settings, 2)
            except OSError:
                return None
        if has_ended(self._pidfd):
            return None
        os.close(stdin)
        os.set_blocking(channel, False)
        pid, self._pid = self._pid, 0
        return pid, self._pidfd, socket.socket(fileno=channel)

    def end(self) -> None:
        """Kill it, and wait until it is gone, unless it was taken."""
        from signal import SIGKILL

        if not self._pid:
            return
        os.kill(self._pid, SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = 0
        for fd in (self._pidfd, *self._fds):
            os.close(fd)


def start() -> EarlyDaemon | None:
    """Start a daemon early; None if that is not possible. For a keeper that has no input yet.

    The arguments of the keeper's program are the numbers of four descriptors: those that a
    daemon's standard input and its channel are to be, each behind the other end of its socket.
    The pid of a daemon that was forked already (launch/forked_keeper.py) may follow.
    """
    os.chdir("/")
    ours, stdin, channel, its_channel, *forked = map(int, sys.argv[1:])
    for fd in (ours, stdin, channel):
        os.set_inheritable(fd, False)
    try:
        if forked:
            return EarlyDaemon(forked[0], ours, channel)
        actions = [
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        pid = os.posix_spawn(DAEMON[0], DAEMON, os.environ, file_actions=actions)
    except OSError:
        os.close(ours)
        os.close(channel)
        return None
    finally:
        os.close(stdin)
        os.close(its_channel)
    return EarlyDaemon(pid, ours, channel)


def wait_for_packet() -> None:
    """Wait, in a keeper, until there is a packet, or will be none. Blocks.

    Its imports come after this: the command and the daemon leave no processor to it before.
    """
    import select

    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.poll()


def forget_variables() -> None:
    """Remove from a keeper's environment what was for its early daemon."""
    for name in (VARIABLE, CHANNEL_VARIABLE):
        os.environ.pop(name, None)


def was_early() -> bool:
    """Whether this process is a daemon that was started early; False when looked at again."""
    return os.environ.pop(VARIABLE, "") != ""


def wait() -> None:
    """Wait, in an early daemon, until it is to go on as the packet says. Blocks.

    Exits if it is not needed; executes the program anew if its user can't import all of it.

    Raises:
        OSError: that user can't execute it.
    """
    from fusefs.linux.libc import forbid_inspection
    from fusefs.linux.processes import Credentials, become_in_place

    _tell_ready()
    given = receive()
    if given is None:
        sys.exit()
    is_another = given["uid"] != os.geteuid()
    become_in_place(Credentials(given["uid"], given["gid"], given["groups"]))
    forbid_inspection()  # a change of the user may have allowed it
    if is_another and (path := _find_unreadable()):
        print(f"fusefs: user {given['uid']} cannot read {path}", file=sys.stderr, flush=True)
        os.execv(DAEMON[0], DAEMON)


def _tell_ready() -> None:
    import contextlib
    import socket

    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as keeper:
        keeper.send(_READY)


def _find_unreadable() -> str:
    """A path of what is imported that this user could not import it from; "" if there is none."""
    from importlib.machinery import ExtensionFileLoader, SourceFileLoader

    directories = set()
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        if spec is None or not isinstance(spec.loader, SourceFileLoader | ExtensionFileLoader):
            continue
        path = spec.origin or ""
        # Where the cached bytecode is valid, the source is not read.
        if not os.access(path, os.R_OK) and not os.access(spec.cached or path, os.R_OK):
            return path
        directories.add(os.path.dirname(path))
    # The import system lists them.
    closed = (path for path in directories if not os.access(path, os.R_OK | os.X_OK))
    return next(closed, "")


def give(sock: socket.socket, given: dict[str, Any], stdin: int, stderr: int) -> None:
    """Send the packet.

    Raises:
        OSError: the process is gone, or the packet is too large.
    """
    import json
    import socket

    socket.send_fds(sock, [json.dumps(given).encode()], [stdin, stderr])


def receive() -> dict[str, Any] | None:
    """Wait for the packet, and use its descriptors; None if there is none to come. Blocks."""
    import json
    import socket

    with socket.socket(fileno=os.dup(0)) as sock:
        try:
            data, fds, _, _ = socket.recv_fds(sock, _PACKET_SIZE, 2)
        except OSError:
            return None
    if len(fds) != 2:
        return None
    for number, fd in zip((0, 2), fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return dict(json.loads(data))
