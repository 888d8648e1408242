"""The live mounts of this package, whoever mounted them.

    live_mounts.py list      their mountpoints, one a line
    live_mounts.py upgrade   have daemons of this version take them over

The package's maintainer scripts run it as root, with the interpreter of the version that the
daemons are to have. Each version has a tree of its own, /usr/lib/fusefs/VERSION, so the old and
the new one are whole side by side while dpkg upgrades. A mount is the package's if its keeper, or
its daemon where there is no keeper, runs from one of these trees and has this process's root
directory; containers and other installations have mounts of their own.

Users write their own records and choose how their processes are called. So root reads no record
and trusts no environment of theirs: a child with the user's ids does that, within a time limit. It
gets the variables that name the files of keys, and no other. What cannot be upgraded is reported
and goes on with its daemon.

    live_mounts.py records   (that child) the mounts on record, as JSON
"""

from __future__ import annotations

import json
import os
import select
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fusefs.launch import control, registry
from fusefs.linux import mountinfo

TREE = Path(sys.prefix)
TREES = TREE.parent
INTERPRETER = Path(sys.executable).resolve()
# Daemons that prepare themselves at once; each takes a processor for a second.
AT_ONCE = 4
# What of an environment names the mounts of a user, and the files of his keys.
INHERITED = (registry.RUNTIME_VARIABLE, "HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# No user is to hold up dpkg.
RECORDS_S = 20
UPGRADE_S = 300
MAX_OUTPUT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Process:
    """A keeper or daemon of this package."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]
    tree: Path
    environment: dict[str, str]

    @property
    def directory(self) -> str:
        """Its runtime directory."""
        return self.environment.get(registry.RUNTIME_VARIABLE, "")


@dataclass(frozen=True, slots=True)
class LiveMount:
    """A mount, the process that speaks for it, and the tree that its daemon runs from."""

    mountpoint: str
    owner: Process
    daemon_tree: Path | None


def main(arguments: list[str]) -> int:
    """Do what the command line says; return the exit status."""
    match arguments:
        case ["list"]:
            mounts, is_whole = live_mounts()
            for mount in mounts:
                print(_readable(mount.mountpoint))
            return 0 if is_whole else 1
        case ["upgrade"]:
            old = [mount for mount in live_mounts()[0] if mount.daemon_tree != TREE]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(_upgrade, old))
        case ["records"]:
            json.dump(_records(), sys.stdout)
        case _:
            print(f"usage: {sys.argv[0]} list|upgrade", file=sys.stderr)
            return 2
    return 0


def live_mounts() -> tuple[list[LiveMount], bool]:
    """Those that can be found, by mountpoint; and whether these are all."""
    is_whole = True
    processes = {process.pid: process for process in _processes()}
    found: dict[tuple[str, int], LiveMount] = {}
    # One process of each user and runtime directory.
    users = {(one.uid, one.directory): one for one in processes.values() if one.directory}
    for (uid, directory), user in sorted(users.items()):
        if uid == 0 and not _is_roots(directory):
            continue
        records = _records_of(user)
        if records is None:
            print(f"fusefs: {_readable(directory)} cannot be read as user {uid}", file=sys.stderr)
            is_whole = False
        for mountpoint, pid, keeper in records or ():
            daemon = processes.get(pid)
            owner = processes.get(keeper) if keeper else daemon
            # No record is to stand for another user's mount. Root's daemons have other users.
            if owner is not None and owner.directory == directory and uid in (0, owner.uid):
                tree = daemon.tree if daemon is not None else None
                found[mountpoint, uid] = LiveMount(mountpoint, owner, tree)
    return [found[key] for key in sorted(found)], is_whole


def _is_roots(directory: str) -> bool:
    """Whether root alone can change a directory."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and not found.st_mode & 0o022


def _upgrade(mount: LiveMount) -> None:
    command = [os.fspath(TREE / "bin/fusefs"), "upgrade", mount.mountpoint]
    status, shown = _run_as(mount.owner, command, UPGRADE_S)
    if status:
        shown = f"the daemon of {mount.mountpoint} stays the old one:\n{shown}"
    print(f"fusefs: {_readable(shown)}", end="", file=sys.stderr if status else sys.stdout)


def _readable(text: str) -> str:
    """Text of a user's without what would control root's terminal."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


# --- as the user of a mount -------------------------------------------------------


def _records() -> list[tuple[str, int, int | None]]:
    """Of each mount of this process's user: mountpoint, pid of the daemon, pid of the keeper."""
    found = []
    for record in registry.records():
        mount = mountinfo.find_mount(Path(record.mountpoint))
        if record.is_alive() or (mount is not None and mount.is_fusefs):
            keeper = control.peer(registry.keeper_socket(Path(record.mountpoint)))
            found.append((record.mountpoint, record.pid, keeper))
    return found


def _records_of(user: Process) -> list[tuple[str, int, int | None]] | None:
    """What `_records` gives a process's user; None if that fails."""
    status, shown = _run_as(user, [sys.executable, "-I", __file__, "records"], RECORDS_S)
    try:
        # Warnings of the interpreter may come first.
        found = json.loads(shown.splitlines()[-1]) if status == 0 else None
        return found and [(str(path), int(pid), int(keeper or 0)) for path, pid, keeper in found]
    except (ValueError, TypeError, IndexError, RecursionError):
        return None


def _run_as(user: Process, command: list[str], limit_s: float) -> tuple[int, str]:
    """Run a program with the ids of a process; return its status and what it printed.

    The user may trace it: it has no terminal, and neither its time nor its output is without end.
    """
    given = {name: user.environment[name] for name in INHERITED if name in user.environment}
    try:
        child = subprocess.Popen(
            command,
            env=given | {"PATH": PATH},
            cwd="/",
            user=user.uid,
            group=user.gid,
            extra_groups=user.groups,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except (OSError, ValueError) as error:
        return 1, f"{error}\n"
    with child:
        output = _output_of(child, time.monotonic() + limit_s)
    return child.returncode, output.decode(errors="replace")


def _output_of(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What a program prints until it ends, or is killed at the deadline."""
    assert child.stdout is not None
    output = bytearray()
    # Its own children may keep the pipe open after its end.
    while select.select([child.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
        chunk = os.read(child.stdout.fileno(), 1 << 16)
        output += chunk
        if not chunk:
            break
        if len(output) > MAX_OUTPUT:
            child.kill()
            break
    try:
        child.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
    return bytes(output)


# --- which processes --------------------------------------------------------------


def _processes() -> list[Process]:
    if not os.path.isdir("/proc/self"):
        return []  # in a chroot, where no mount is served
    found = (_process(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [process for process in found if process is not None]


def _process(pid: int) -> Process | None:
    """A process, if it runs from a tree of this package, and its user may have started it so."""
    directory = Path(f"/proc/{pid}")
    try:
        # The first argument, or behind the title that a daemon or keeper has given itself.
        arguments = os.fsdecode((directory / "cmdline").read_bytes()).split("\0")[:2]
        programs = [argument for argument in arguments if argument.startswith(f"{TREES}/")]
        if not programs:
            return None
        program = programs[0]
        before = _identity(pid)
        tree = Path(program).parents[1]
        environment = (directory / "environ").read_bytes()
        is_ours = tree.parent == TREES and ".." not in tree.parts and _is_interpreter(directory)
        is_here = os.path.samestat(os.stat(directory / "root"), os.stat("/"))
        if not is_ours or not is_here or _identity(pid) != before:
            return None
    except (OSError, IndexError):
        return None  # it has just ended, or is a kernel thread
    _, status, _ = before
    uids, gids = status["Uid"].split(), status["Gid"].split()
    # What one user starts with the rights of another has the name and environment that he chose.
    if len({*uids}) > 1 or len({*gids}) > 1:
        return None
    variables = (item.partition("=") for item in os.fsdecode(environment).split("\0"))
    return Process(
        pid,
        int(uids[0]),
        int(gids[0]),
        tuple(int(group) for group in status["Groups"].split()),
        tree,
        {name: value for name, separator, value in variables if separator},
    )


def _identity(pid: int) -> tuple[int | None, dict[str, str], tuple[int, int]]:
    """What changes when a process begins another program, or goes on as another user."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    status = dict(line.split(":", 1) for line in lines if line.startswith(("Uid", "Gid", "Groups")))
    program = os.stat(f"/proc/{pid}/exe")
    return registry.start_time(pid), status, (program.st_dev, program.st_ino)


def _is_interpreter(directory: Path) -> bool:
    """Whether a process runs the Python of this package, or one that was there before it."""
    program = os.stat(directory / "exe")
    present = INTERPRETER.stat()
    if program.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return False
    if os.path.samestat(program, present):
        return True
    # An upgrade of Debian's Python replaces the file of interpreters that run.
    path = Path(os.readlink(directory / "exe").removesuffix(" (deleted)"))
    is_python = path.parent == INTERPRETER.parent and path.name.startswith("python3")
    return is_python and program.st_uid == present.st_uid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
