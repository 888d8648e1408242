"""`fusefs-csi daemons`: runs the daemons of the node's mounts, without privilege.

`fusefs-csi node` mounts and runs the keepers; this process starts the daemons (supervisor.py), in a
pod of their own, so that either pod may die or be replaced without the other. This process is also
the descriptor store (fd_store.py): a mount lives as long as this process, its keeper or its daemon
has its /dev/fuse open.

A process that starts beside an earlier one takes over its descriptors, socket and daemons
(migration.py), and then is ready. After SIGTERM the earlier process ends with its last daemon; if
the new process ends first, the earlier one listens again. With `--successor=after` the next process
starts when this one has ended, and finds the mounts through their keepers.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from csi.daemons import forking
from csi.daemons.migration import Migration
from csi.daemons.supervisor import Supervisor
from csi.node.config import CACHE, SUPERVISOR, add_host_path_flag, check_disk
from fusefs.keeper import supervisor_protocol as wire
from fusefs.keeper.control import Loop
from fusefs.linux.descriptors import raise_limit
from fusefs.linux.processes import close_all_but, die_with_parent

# Time limit for the previous supervisor's answer.
HELD_S = 30.0

log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fusefs-csi daemons`."""
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="a file that is there while the node's mounts are served here",
    )
    parser.add_argument(
        "--successor",
        choices=("beside", "after"),
        default="beside",
        help="when the next pod starts in a roll-out: beside this one, which hands its daemons"
        " over; or after this one, which ends with them as soon as each mount has a keeper"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=CACHE,
        metavar="DIR",
        help="directory for cached objects, as of the driver (default: %(default)s)",
    )
    add_host_path_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Supervise daemons until SIGTERM, and then until their end; return the exit status.

    Raises:
        OSError: the directory of the sockets cannot be used.
        FailedPreconditionError: the cache would be on the system's disk.
    """
    raise_limit()  # of each mount this process has several descriptors
    if arguments.cache_host_path is not None:
        check_disk(arguments.cache_dir, arguments.cache_host_path)
    _forget_variables()
    state: Path = arguments.state_dir
    ready: Path | None = arguments.ready_file
    state.mkdir(mode=0o711, parents=True, exist_ok=True)
    if ready is not None:
        ready.unlink(missing_ok=True)  # of a killed container of the same pod
    path = state / SUPERVISOR
    old = running(path)
    supervisor = Supervisor(
        path,
        forking.prepare(),
        held_before(path),
        running(path),
        has_successor_beside=arguments.successor == "beside",
    )
    _fork_mover(supervisor.loop, old, lambda: _move(old, state, supervisor.number, ready))
    if old is not None:
        old.close()
    try:
        supervisor.run()
    finally:
        if ready is not None:
            ready.unlink(missing_ok=True)
    return 0


def _forget_variables() -> None:
    """Start this program again without the variables that daemons get from their keepers.

    Otherwise their values, which may be secrets, would be in the memory of each forked daemon.
    """
    own = {name: text for name, text in os.environ.items() if not name.startswith(wire.INHERITED)}
    if own != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], own)


def running(path: Path) -> socket.socket | None:
    """Connect to the supervisor that already listens on `path`; None if there is none."""
    try:
        return wire.connect(os.fspath(path))
    except OSError:
        return None


def _move(old: socket.socket | None, state: Path, number: int, ready: Path | None) -> None:
    if old is not None:
        Migration(old, state / "fusefs", number).run()
    log.info("ready")
    if ready is not None:
        ready.write_text("")


def held_before(path: Path) -> dict[tuple[int, int], int]:
    """Fetch the previous supervisor's descriptors, by mount and connection, within `HELD_S`."""
    held: dict[tuple[int, int], int] = {}
    deadline = time.monotonic() + HELD_S
    while True:
        try:
            for mount, connection, fd in wire.held(os.fspath(path), *max(held, default=(0, 0))):
                held[mount, connection] = fd
            break
        except (FileNotFoundError, ConnectionRefusedError):
            break
        except OSError as error:
            if time.monotonic() > deadline:
                log.warning("not all that was held before is known: %s", error)
                break
            time.sleep(0.1)
    log.info("%d descriptors are held, as before", len(held))
    return held


def _fork_mover(loop: Loop, old: socket.socket | None, move: Callable[[], None]) -> None:
    """Run `move` in a child with only `old` open. It dies with this process; `loop` reaps it."""
    pid = os.fork()
    if pid:
        pidfd = os.pidfd_open(pid)

        def reap() -> None:
            loop.forget(pidfd)
            os.close(pidfd)
            os.waitpid(pid, 0)

        loop.watch(pidfd, select.POLLIN, reap)
        return
    try:
        die_with_parent()
        close_all_but(*([old.fileno()] if old is not None else []))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        move()
    except Exception:
        log.exception("the daemons have not moved")
    finally:
        os._exit(0)
