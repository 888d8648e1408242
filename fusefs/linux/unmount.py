"""How a mount ends: asked politely, detached, or with its connection aborted.

Root calls umount2(2) itself; others go through fusermount3, which is setuid.
Neither waits for the daemon, and no path here is stat'ed or opened: the mount
may be wedged.

`abort_connection` is what ends a mount whose daemon will never answer. It
writes to the connection's `abort` file in fusectl, upon which every waiting
program gets ECONNABORTED and can be killed again. Where fusectl is not
mounted, which is usual in containers, root opens it as a detached mount
(fsopen, fsmount; Linux 5.2), which no namespace ever shows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

from fusefs.linux import libc
from fusefs.linux.mount import may_mount

FUSECTL = Path("/sys/fs/fuse/connections")
FUSERMOUNT_TIMEOUT_S = 30.0

# The new mount interface has the same numbers on every architecture but alpha.
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6

_libc = ctypes.CDLL(None, use_errno=True)


class UnmountError(Exception):
    """A mount could not be ended; `is_busy` when programs still use it."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


def umount_path(mountpoint: Path, *, is_lazy: bool = False) -> None:
    """Take the mount at `mountpoint` away, or with `is_lazy` out of sight.

    Raises:
        UnmountError: it is busy, not a mount, or not this user's to end.
    """
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
    """End the FUSE connection: whatever waits for its daemon fails at once.

    Raises:
        UnmountError: there is no such connection, or no way to reach it.
    """
    try:
        if FUSECTL.joinpath(str(connection)).exists():
            FUSECTL.joinpath(str(connection), "abort").write_bytes(b"1")
        else:
            _abort_detached(connection)
    except FileNotFoundError:
        raise UnmountError(f"there is no FUSE connection {connection}") from None
    except OSError as error:
        raise UnmountError(
            f"the FUSE connection {connection} cannot be aborted: {error.strerror}"
        ) from error


def _abort_detached(connection: int) -> None:
    context = _syscall(_SYS_FSOPEN, b"fusectl", _FSOPEN_CLOEXEC)
    try:
        _syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        root = _syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)
    try:
        abort = os.open(f"{connection}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)
        try:
            os.write(abort, b"1")
        finally:
            os.close(abort)
    finally:
        os.close(root)


def _syscall(number: int, *arguments: bytes | int | None) -> int:
    # Without a prototype ctypes passes an int as 32 bits, so each is widened.
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *widened))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def users_of(mountpoint: Path) -> list[tuple[int, str]]:
    """The processes that visibly use the mount, as (pid, command).

    Looks at working directories, roots, programs and descriptors through
    readlink alone; a mapping whose file is closed goes unseen.
    """
    users = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _uses(entry, mountpoint):
            users.append((int(entry.name), _command(entry)))
    return users


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
