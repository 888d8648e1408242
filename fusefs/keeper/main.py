"""The keeper: a process that lets a mount outlive its daemon.

It holds the /dev/fuse descriptor, starts the daemon (or has a supervisor in another container start
it, see supervisor_protocol.py), and starts it again when it dies; requests wait meanwhile. It is
the only privileged part: it mounts, and has files registered for passthrough. It also limits every
pause: a daemon that sends nothing for `hang_s` is replaced, and a mount that no daemon serves for
`max_pause_s`, or whose daemons die one after the other, is aborted, so that programs get an error.

It is one loop over descriptors and deadlines, and touches nothing that could wait: what comes from
a daemon goes through a broker (broker.py), a child that takes the keeper's place if that is killed.

It is started by `python -I -S -c`, calls `main`, and is configured by one JSON object on standard
input (`Configuration` and `begin`). Standard output belongs to the first daemon, or says that there
is none; standard error is the log. Few modules are imported, so that it stays small.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys

from fusefs.keeper import protocol as wire
from fusefs.keeper.broker import Broker
from fusefs.keeper.control import Listener, listen
from fusefs.keeper.policy import Keeper
from fusefs.keeper.processes import BecomeBroker, DaemonProcess, point_to_null
from fusefs.keeper.state import Configuration, KeeperState, Program, abort_own, log
from fusefs.keeper.supervisor_protocol import adopt
from fusefs.linux import fuse_connection, mountinfo
from fusefs.linux.process_title import set_title

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import Any

# In the whole life of a mount.
MOST_FAILURES = 10


def begin(given: dict[str, Any], configuration: Configuration, listener: Listener | None) -> Keeper:
    """Make a keeper that has started its first daemon, or goes on with one that serves already.

    With `fuse_fd` the mount is there already, and perhaps a supervisor's daemon that has lost
    its keeper. Where there is none it is started, unless a daemon `goes_on` elsewhere.

    Raises:
        OSError: there is no daemon.
        BecomeBroker: in the child.
    """
    state = KeeperState(Program(given["command"], given["settings"]))
    if "fuse_fd" in given:
        state.fuse_fd = given["fuse_fd"]
        os.set_inheritable(state.fuse_fd, False)
        state.connection = (
            fuse_connection.number_of(state.fuse_fd)
            or mountinfo.connection_at(configuration.mountpoint)
            or 0
        )
        state.has_served = state.has_resend = True
    elif configuration.is_privileged:
        state.fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    keeper = Keeper(configuration, state, listener)
    daemon = _find_daemon(configuration, state.program) if "fuse_fd" in given else None
    if daemon is not None:
        broker = Broker(configuration, state, daemon.socket, daemon.process, wire.TAKE_OVER)
        broker.attach()
        log(f"{daemon.name} is adopted", "INFO")
        os.write(1, b'{"ready": true}\n')
        keeper.adopt(daemon, broker)
    elif given.get("goes_on"):
        raise ProcessLookupError(errno.ESRCH, "one goes on without a keeper")
    else:
        keeper.start()
    return keeper


def _find_daemon(configuration: Configuration, program: Program) -> DaemonProcess | None:
    """The mount's daemon that has lost its keeper; raises OSError if there may be one."""
    if configuration.supervisor is None:
        return None
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        try:
            process = adopt(configuration.supervisor, configuration.number, its.fileno())
        except (ProcessLookupError, FileNotFoundError, ConnectionRefusedError):
            ours.close()
            return None
    ours.setblocking(False)
    return DaemonProcess(process, ours, program)


def succeed(broker: Broker, listener: Listener | None) -> Keeper | int:
    """The keeper that a broker becomes, or an exit status; raises BecomeBroker in the child."""
    if broker.state.keeper_failures >= MOST_FAILURES:
        log("the mount is given up: its keepers fail one after the other", "ERROR")
        broker.process.kill()
        with contextlib.suppress(OSError):
            abort_own(broker.state)
        return 1
    log("the keeper is dead; its broker goes on in its place")
    keeper = Keeper(broker.configuration, broker.state, listener)
    daemon = DaemonProcess(broker.process, broker.daemon, broker.state.program)
    keeper.adopt(daemon, broker)
    return keeper


Role = Keeper | BecomeBroker | int


def main() -> int:
    """Be the keeper, and in its children what they become; return the exit status."""
    with open(0, "rb", closefd=False) as stdin:
        text = stdin.read()
    if not text:  # whoever started us did not come further
        return 1
    given = json.loads(text)
    point_to_null(0)
    os.chdir("/")
    try:
        configuration = Configuration(given)
        _set_title("keeper", configuration)
        listener = listen(configuration.control)
        role: Role = begin(given, configuration, listener)
    except OSError as error:
        os.write(1, json.dumps({"error": f"no daemon can be started: {error}"}).encode() + b"\n")
        return 1
    except BecomeBroker as fork:
        role = fork
    while not isinstance(role, int):
        role = _play(role, listener)
    return role


def _set_title(role: str, configuration: Configuration) -> None:
    # What is behind the program is of whoever has started it.
    spared = sum(len(os.fsencode(argument)) + 1 for argument in sys.argv[1:])
    set_title(role, configuration.source, configuration.mountpoint, spared=spared)


def _play(role: Role, listener: Listener | None) -> Role:
    """Be a keeper or a broker until there is something else to be, or an exit status."""
    try:
        if isinstance(role, Keeper):
            return role.run()
        if isinstance(role, BecomeBroker):
            _set_title("keeper-broker", role.broker.configuration)
            if not role.broker.serve(role.channel):
                return 0
            _set_title("keeper", role.broker.configuration)
            return succeed(role.broker, listener)
    except BecomeBroker as fork:
        return fork
    except Exception:
        if isinstance(role, Keeper):
            role.report_failure()
        raise
    return 0
