"""The live mounts of this package, whoever mounted them.

    live_mounts.py list      their mountpoints, one a line
    live_mounts.py upgrade   have daemons of this version take them over

The package's maintainer scripts run it as root, with the interpreter of the version that the
daemons are to have. Each version has a tree of its own, /usr/lib/fusefs/VERSION, so the old and
the new one are whole side by side while dpkg upgrades. A mount is the package's if its keeper, or
its daemon where there is no keeper, runs from one of these trees and has this process's root
directory; containers and other installations have mounts of their own.

A mount is upgraded by its own user and with its keeper's environment, which names the files of
keys. What cannot be upgraded is reported and goes on with its daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fusefs.launch import control, registry

TREE = Path(sys.prefix)
TREES = TREE.parent
# Daemons that prepare themselves at once; each takes a processor for a second.
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Process:
    """A keeper or daemon of this package."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]
    tree: Path
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class LiveMount:
    """A mount, the process that speaks for it, and the tree that its daemon runs from."""

    mountpoint: str
    owner: Process
    daemon_tree: Path | None


def main(arguments: list[str]) -> int:
    """Do one of the two; return the exit status."""
    match arguments:
        case ["list"]:
            for mount in live_mounts():
                print(mount.mountpoint)
        case ["upgrade"]:
            old = [mount for mount in live_mounts() if mount.daemon_tree != TREE]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(_upgrade, old))
        case _:
            print(f"usage: {sys.argv[0]} list|upgrade", file=sys.stderr)
            return 2
    return 0


def live_mounts() -> list[LiveMount]:
    """All of them, by mountpoint."""
    processes = {process.pid: process for process in _processes()}
    found: dict[str, LiveMount] = {}
    directories = {one.environment.get(registry.RUNTIME_VARIABLE) for one in processes.values()}
    for directory in sorted(filter(None, directories)):
        os.environ[registry.RUNTIME_VARIABLE] = directory
        for record in registry.all_mounts():
            keeper = control.peer(registry.keeper_socket(Path(record.mountpoint)))
            daemon = processes.get(record.pid)
            owner = processes.get(keeper) if keeper else daemon
            # Users write their own records, which are to name no mount of another user's.
            if owner is not None and owner.environment.get(registry.RUNTIME_VARIABLE) == directory:
                tree = daemon.tree if daemon is not None else None
                found[record.mountpoint] = LiveMount(record.mountpoint, owner, tree)
    return [found[mountpoint] for mountpoint in sorted(found)]


def _upgrade(mount: LiveMount) -> None:
    owner = mount.owner
    done = subprocess.run(
        [TREE / "bin/fusefs", "upgrade", mount.mountpoint],
        env=owner.environment,
        cwd="/",
        user=owner.uid,
        group=owner.gid,
        extra_groups=owner.groups,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"fusefs: the daemon of {mount.mountpoint} stays the old one:", file=sys.stderr)
        print(done.stderr, end="", file=sys.stderr)
    else:
        print(f"fusefs: {done.stdout}", end="")


def _processes() -> list[Process]:
    found = (_process(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [process for process in found if process is not None]


def _process(pid: int) -> Process | None:
    """A process, if it runs from a tree of this package."""
    directory = Path(f"/proc/{pid}")
    try:
        program = os.fsdecode((directory / "cmdline").read_bytes().split(b"\0")[0])
        tree = Path(program).parents[1] if program.startswith(f"{TREES}/") else None
        if tree is None or not os.path.samestat(os.stat(directory / "root"), os.stat("/")):
            return None
        status = dict(
            line.split(":", 1) for line in (directory / "status").read_text().splitlines()
        )
        environment = (directory / "environ").read_bytes()
    except (OSError, IndexError):
        return None  # it has just ended, or is a kernel thread
    variables = (item.partition("=") for item in os.fsdecode(environment).split("\0"))
    return Process(
        pid,
        int(status["Uid"].split()[1]),
        int(status["Gid"].split()[1]),
        tuple(int(group) for group in status["Groups"].split()),
        tree,
        {name: value for name, separator, value in variables if separator},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
