"""`fusefs-csi daemons`: holds the connections of the node's mounts, beside their keepers.

A FUSE mount lives as long as any process has its /dev/fuse descriptor. The
mounts' keepers and daemons run in the container of `fusefs-csi node` and die
with it; this process, in a pod of its own, is the other one that has them. A
program that reads meanwhile waits, and goes on when `fusefs-csi node` is back
and has started keepers and daemons anew (see `caretaker`).

It needs no privilege and no configuration, and knows nothing of the mounts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusefs.kernel import holder


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
        ready.write_text("")
    try:
        return holder.main(state / "holder.sock")
    finally:
        if ready is not None:
            ready.unlink(missing_ok=True)
