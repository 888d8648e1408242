"""`fusefs-csi daemons`: where the daemons of the node's mounts run, without privilege.

`fusefs-csi node` mounts and has the keepers; the daemons are in a container, and a
pod, of their own, so that each side may die or be replaced without the other. They
are started here (supervisor.py), as the users of their identities. The descriptor
store (fusefs/keeper/fd_store.py) runs here too and has copies of the mounts'
/dev/fuse descriptors. Each keeper and each daemon has one as well, so a mount lives
while any of the three does.

A process that starts beside an earlier one takes over: first the descriptors, then
the sockets, then the daemons (migration.py), and is ready when all of them have
moved. The earlier process, when it gets SIGTERM, ends after its last daemon; it
waits without a limit, as kubelet has one. If the new process ends instead, the
earlier one comes back. With `--successor=after` the next process starts when this
one has ended, and finds the mounts through their keepers.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from csi.daemons import forking
from csi.daemons.client import FdStoreClient
from csi.daemons.migration import Migration
from csi.daemons.supervisor import Supervisor
from csi.node.config import CACHE, DESCRIPTOR_STORE, SUPERVISOR, add_host_path_flag, check_disk
from fusefs.keeper import fd_store, supervisor_protocol
from fusefs.keeper.exchange import ControlError
from fusefs.linux.processes import close_all_but, die_with_parent

# From the fork to a service that answers: it has only to bind its socket.
START_S = 30.0
# For the descriptor store before this one to answer, and for the next to have what that holds.
NAMES_S = 30.0
FILLING_S = 60.0
POLL_S = 0.05

log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `fusefs-csi daemons`."""
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
    """Look after daemons until SIGTERM, and until they have ended; return the exit status.

    Raises:
        OSError: the directory of the sockets cannot be used.
        FailedPreconditionError: the cache would be on the system's disk.
    """
    if arguments.cache_host_path is not None:
        check_disk(arguments.cache_dir, arguments.cache_host_path)
    _forget_variables()
    state: Path = arguments.state_dir
    ready: Path | None = arguments.ready_file
    state.mkdir(mode=0o711, parents=True, exist_ok=True)
    if ready is not None:
        ready.unlink(missing_ok=True)  # a killed container's, before this one in the same pod
    service = FdStoreProcess(state / DESCRIPTOR_STORE)
    service.take_over()
    old = running(state / SUPERVISOR)
    supervisor = Supervisor(
        state / SUPERVISOR,
        forking.prepare(),
        old=running(state / SUPERVISOR),
        on_tick=service.check_process,
        on_return=service.start_or_retry,
        has_successor_beside=arguments.successor == "beside",
    )
    mover = _fork(lambda: _move(old, state, supervisor.number, ready), old)
    service.helpers.append(mover)
    if old is not None:
        old.close()
    try:
        supervisor.run()
    finally:
        if ready is not None:
            ready.unlink(missing_ok=True)
    return 0


def _forget_variables() -> None:
    """Begin again without the variables that a daemon has from its keeper.

    Others, which may be secrets, would stay in the memory that its process is forked with.
    """
    own = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(supervisor_protocol.INHERITED)
    }
    if own != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], own)


def running(path: Path) -> socket.socket | None:
    """The supervisor that is there already."""
    try:
        return supervisor_protocol.connect(os.fspath(path))
    except OSError:
        return None


def _move(old: socket.socket | None, state: Path, number: int, ready: Path | None) -> None:
    if old is not None:
        Migration(old, state / "fusefs", number).run()
    log.info("ready")
    if ready is not None:
        ready.write_text("")


class FdStoreProcess:
    """The process that holds descriptors, which is a child of this one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = 0
        self.helpers: list[int] = []  # to be waited for

    def take_over(self) -> None:
        """Start it with what the one before it holds.

        Raises:
            OSError: it does not come up.
        """
        held = {}
        for name in self._names_before():
            try:
                held[name] = fd_store.fetch(os.fspath(self._path), name)
            except ControlError as error:
                log.warning("%s: %s", name, error)  # its mount has just ended
        self.start(FILLING_S if held else 0.0)
        for name, descriptor in held.items():
            try:
                fd_store.hold(os.fspath(self._path), name, descriptor)
            except ControlError as error:
                log.warning("%s: %s", name, error)
            os.close(descriptor)
        if held:
            try:
                fd_store.complete(os.fspath(self._path))
            except ControlError as error:
                log.warning("what is held is not listed for %.0f s: %s", FILLING_S, error)
        log.info("%d descriptors are held, as before", len(held))

    def _names_before(self) -> frozenset[str]:
        """What is held already; nothing if no answer comes for long."""
        deadline = time.monotonic() + NAMES_S
        while True:
            try:
                return FdStoreClient(self._path).names()
            except ControlError as error:
                if time.monotonic() > deadline:
                    log.warning("what was held before is not known: %s", error)
                    return frozenset()
            time.sleep(POLL_S)

    def start(self, filling_s: float = 0.0) -> None:
        """Start one that holds nothing; the keepers bring what they have.

        For `filling_s` it answers no list, unless it is made complete before.

        Raises:
            OSError: it does not come up.
        """
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self.helpers.append(self._pid)
            self._pid = 0
        before = _identity(self._path)
        self._pid = _fork(lambda: fd_store.main(self._path, filling_s))
        deadline = time.monotonic() + START_S
        while _identity(self._path) in (None, before):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._path}: no process listens")
            time.sleep(POLL_S)

    def check_process(self) -> None:
        """Start another if it has died, and wait for the processes that have ended."""
        self.helpers = [pid for pid in self.helpers if not os.waitpid(pid, os.WNOHANG)[0]]
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            log.warning("what held the descriptors is gone: starting another")
            self._pid = 0
        if not self._pid:
            self.start_or_retry()

    def start_or_retry(self) -> None:
        """As `start`; where it does not come up, `check_process` tries again.

        A node that lacks memory or process ids for it has daemons that still serve.
        """
        try:
            self.start()
        except OSError as error:
            log.error("no process holds the mounts' descriptors yet: %s", error)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _fork(work: Callable[[], object], kept: socket.socket | None = None) -> int:
    """Do something in a child, which ends with this process; return its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent()
            close_all_but(*([kept.fileno()] if kept is not None else []))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            status = 0
        except Exception:
            log.exception("a part of it failed")
        finally:
            os._exit(status)
    return pid
