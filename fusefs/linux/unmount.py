"""The three ways to end a mount: unmount, detach, abort the connection.

Root calls umount2(2); other users call fusermount3, which is setuid. Neither
waits for the daemon. No function here stats or opens a path of the mount, which
may hang.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from fusefs.linux import fuse_connection, libc
from fusefs.linux.mount import may_mount

FUSERMOUNT_TIMEOUT_S = 30.0


class UnmountError(Exception):
    """A mount could not be ended; `is_busy` if programs still use it."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


def umount_path(mountpoint: Path, *, is_lazy: bool = False) -> None:
    """Unmount, or with `is_lazy` detach the mount; raises UnmountError on failure."""
    if not may_mount():
        _fusermount(mountpoint, is_lazy=is_lazy)
        return
    flags = libc.UMOUNT_NOFOLLOW | (libc.MNT_DETACH if is_lazy else 0)
    try:
        libc.umount(os.fspath(mountpoint), flags)
    except OSError as error:
        message = error.strerror or str(error)
        raise UnmountError(message, is_busy=error.errno == errno.EBUSY) from error


def _fusermount(mountpoint: Path, *, is_lazy: bool) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise UnmountError("fusermount3 is not installed; install the package fuse3")
    command = [program, "-u", *(["-z"] if is_lazy else []), "--", str(mountpoint)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=FUSERMOUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnmountError("fusermount3 does not return") from None
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("fusermount3: ") or "fusermount3 failed"
        raise UnmountError(message, is_busy="busy" in message)


def abort_connection(connection: int) -> None:
    """Abort the FUSE connection, so that all waiting requests fail. Raises UnmountError."""
    try:
        fuse_connection.abort(connection)
    except FileNotFoundError:
        raise UnmountError(f"there is no FUSE connection {connection}") from None
    except OSError as error:
        raise UnmountError(
            f"the FUSE connection {connection} cannot be aborted: {error.strerror}"
        ) from error


def users_of(mountpoint: Path) -> list[tuple[int, str]]:
    """Return the processes (pid, command) that use the mount, but not those that only map files."""
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(int(one.name), _command(one)) for one in processes if _uses(one, mountpoint)]


def holders_of(device: str) -> list[tuple[int, str]]:
    """Return a process (pid, command) for each other mount namespace that has `device` mounted."""
    found: dict[str, tuple[int, str]] = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if f" {device} " in (process / "mountinfo").read_text(errors="replace"):
                namespace = os.readlink(process / "ns" / "mnt")
                found.setdefault(namespace, (int(process.name), _command(process)))
    found.pop(os.readlink("/proc/self/ns/mnt"), None)
    return list(found.values())


def _uses(process: Path, mountpoint: Path) -> bool:
    try:
        descriptors = [f"fd/{name}" for name in os.listdir(process / "fd")]
    except OSError:
        descriptors = []
    for link in ("cwd", "root", "exe", *descriptors):
        try:
            target = os.readlink(process / link)
        except OSError:
            continue
        if target.startswith("/") and Path(target).is_relative_to(mountpoint):
            return True
    return False


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
