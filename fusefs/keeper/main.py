"""The keeper: a process that lets a mount outlive its daemon.

The keeper holds the /dev/fuse descriptor, starts the daemon (or asks a supervisor in another
container to start it, see supervisor_protocol.py), and starts a new daemon when that one dies;
requests wait meanwhile. Only keeper and broker are privileged: they mount, and register files for
passthrough. The keeper limits pauses: it replaces a daemon that is silent for `hang_s`, and aborts
a mount (programs get errors) that has no daemon for `max_pause_s`, or whose daemons keep dying.

The keeper is one loop over descriptors and deadlines, and makes no call that could block. A broker
(broker.py), its child, reads the daemon's messages, and becomes the keeper if the keeper is killed.

`python -I -S -c` calls `main`, which reads one JSON object from standard input (`Configuration` and
`begin` read its fields). The first daemon inherits standard output; if no daemon can start, the
keeper writes the error there. Standard error is the log. Few modules are imported, to save memory.
"""

from __future__ import annotations

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

# Keepers that may end by their own errors, in a mount's whole life, before the mount is given up.
MOST_FAILURES = 10


def begin(given: dict[str, Any], configuration: Configuration, listener: Listener | None) -> Keeper:
    """Make the keeper; take over a daemon that serves already, or start a new daemon.

    With `fuse_fd` in `given`, the launcher's JSON object, the mount exists, and its daemon is taken
    over if the supervisor has one. Otherwise a daemon is started, unless `goes_on` in `given` is
    true: the old daemon still serves, without a keeper.

    Raises:
        OSError: no daemon was taken over, and none was started.
        BecomeBroker: in the forked child, the daemon's broker.
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
    """Adopt the mount's daemon from the supervisor; None without one, OSError if it can't tell."""
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
    """Return the keeper that `broker` becomes; its new broker, a child, raises BecomeBroker.

    After `MOST_FAILURES` failed keepers the mount is given up, and exit status 1 is returned.
    """
    if broker.state.keeper_failures >= MOST_FAILURES:
        log("the mount is given up: its keepers fail one after the other", "ERROR")
        broker.process.kill()
        abort_own(broker.state)
        return 1
    log("the keeper is dead; its broker goes on in its place")
    keeper = Keeper(broker.configuration, broker.state, listener)
    keeper.adopt(DaemonProcess(broker.process, broker.daemon, broker.state.program), broker)
    return keeper


Role = Keeper | BecomeBroker | int


def main() -> int:
    """Run the keeper, and in forked children the broker; return the exit status."""
    with open(0, "rb", closefd=False) as stdin:
        text = stdin.read()
    if not text:  # the launcher died before it wrote the configuration
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
    # The arguments after the program, given by the caller, stay as they are.
    spared = sum(len(os.fsencode(argument)) + 1 for argument in sys.argv[1:])
    set_title(role, configuration.source, configuration.mountpoint, spared=spared)


def _play(role: Role, listener: Listener | None) -> Role:
    """Run a keeper or a broker to its end; return this process's next role, or an exit status."""
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
