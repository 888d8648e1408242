"""`fusefs-csi daemons`: holds the connections of the node's mounts, beside their keepers.

A FUSE mount lives as long as any process has its /dev/fuse descriptor. The
mounts' keepers and daemons run in the container of `fusefs-csi node` and die
with it; this process, in a pod of its own, is the other one that has them. A
program that reads meanwhile waits, and goes on when `fusefs-csi node` is back
and has started keepers and daemons anew (see `caretaker`).

One that starts beside another takes what that holds before it takes its place,
so that there is no moment in which nobody can be asked for it. It needs no
privilege and no configuration, and knows nothing of the mounts.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from csi.holding import Holding
from fusefs.kernel import holder

# From the fork to a service that answers: it has only to bind its socket.
START_S = 30.0
POLL_S = 0.05

log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `fusefs-csi daemons`."""
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="a file that is there while the descriptors are held",
    )


def run(arguments: argparse.Namespace) -> int:
    """Hold the mounts' descriptors until SIGTERM; return the exit status.

    Raises:
        OSError: the directory of the socket cannot be used.
    """
    state: Path = arguments.state_dir
    ready: Path | None = arguments.ready_file
    state.mkdir(mode=0o711, parents=True, exist_ok=True)
    if ready is not None:
        ready.unlink(missing_ok=True)  # a killed container's, before this one in the same pod
    socket = state / "holder.sock"
    before = _identity(socket)
    held = _held_at(socket)
    if os.fork() == 0:
        status = 1
        try:
            status = _bring(held, socket, before, ready)
        finally:
            os._exit(status)
    for descriptor in held.values():
        os.close(descriptor)
    try:
        return holder.main(socket)
    finally:
        if ready is not None:
            ready.unlink(missing_ok=True)


def _held_at(socket: Path) -> dict[str, int]:
    """Copies of what the process that listens there holds, if there is one."""
    held = {}
    for name in Holding(socket).names():
        try:
            held[name] = holder.fetch(os.fspath(socket), name)
        except holder.HolderError as error:
            log.warning("%s: %s", name, error)  # its mount has just ended
    return held


def _bring(
    held: dict[str, int], socket: Path, before: tuple[int, int] | None, ready: Path | None
) -> int:
    """Beside the new service: give it what the one before it held, and say that it is ready."""
    deadline = time.monotonic() + START_S
    while _identity(socket) in (None, before):
        if time.monotonic() > deadline:
            return 1
        time.sleep(POLL_S)
    for name, descriptor in held.items():
        try:
            holder.hold(os.fspath(socket), name, descriptor)
        except holder.HolderError as error:
            log.warning("%s: %s", name, error)
    log.info("%d descriptors are held, as before", len(held))
    if ready is not None:
        ready.write_text("")
    return 0


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
