"""How `fusefs umount` ends a mount: asked politely, detached, or by force."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusefs.cli import sync
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.linux import unmount

ANSWER_TIMEOUT_S = 2.0
# The daemon tries once more to upload what it could not.
UMOUNT_TIMEOUT_S = 120.0
FORCE_TIMEOUT_S = 5.0
SLOW_S = 5.0


def end_mount(mountpoint: Path, *, is_forced: bool, is_lazy: bool) -> None:
    """End a mount and see its processes out.

    Raises:
        CommandError, UnmountError: it is none of ours, or in use, or does not end.
    """
    mount = registry.find_mount(mountpoint)
    registration = registry.registration_of(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs")
    if is_forced:
        _end_by_force(mount, registration)
    else:
        _end(mountpoint, registration, is_lazy=is_lazy)


def _end(mountpoint: Path, registration: registry.Registration | None, *, is_lazy: bool) -> None:
    if registration and not registration.is_alive():
        registration = None
    keeper = _keeper_pid(mountpoint)
    left = [] if registration is None or is_lazy else _uploads(mountpoint)
    try:
        with _said_if_slow(f"the kernel is at unmounting {mountpoint}"):
            unmount.umount_path(mountpoint, is_lazy=is_lazy)
    except unmount.UnmountError as error:
        if error.is_busy:
            raise CommandError(f"{mountpoint} is in use{_by_whom(mountpoint)}") from None
        raise CommandError(f"{mountpoint}: {error}") from None
    # A lazy end may be hours away: it comes when the last user has gone.
    if is_lazy:
        return
    for pid in (registration.pid if registration else None, keeper):
        with _said_if_slow(f"the process {pid} of {mountpoint} is ending, its log says with what"):
            has_ended = pid is None or _has_ended(pid, UMOUNT_TIMEOUT_S)
        if not has_ended:
            raise CommandError(
                f"{mountpoint} is unmounted, but its process {pid} has not ended "
                f"within {UMOUNT_TIMEOUT_S:.0f} s"
            )
    registry.unregister(mountpoint)
    if left:
        raise CommandError(
            f"{mountpoint} is unmounted; {sync.describe(left)}. It is kept on the local disk, "
            "and uploaded when the bucket is mounted there again with the same cache directory"
        )


def _uploads(mountpoint: Path) -> list[dict[str, Any]]:
    """Have what was written uploaded; return what can't be."""
    try:
        with _said_if_slow(f"what was written to {mountpoint} is being uploaded"):
            return sync.wait(mountpoint, "", math.inf, sync.shown())
    except control.ControlError:
        return []  # its end will show


@contextmanager
def _said_if_slow(what: str) -> Iterator[None]:
    """Say on standard error what is under way once it has taken a while."""
    timer = threading.Timer(SLOW_S, print, (f"fusefs: {what}",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _by_whom(mountpoint: Path) -> str:
    users = unmount.users_of(mountpoint)
    if not users:
        return "; close what uses it, or use --lazy"
    shown = ", ".join(f"{command} (pid {pid})" for pid, command in users[:5])
    more = f" and {len(users) - 5} more" if len(users) > 5 else ""
    return f" by {shown}{more}"


def _end_by_force(mount: registry.KernelMount, registration: registry.Registration | None) -> None:
    """Abort the connection, take the mount away and see the daemon out.

    Without the right to abort (an ordinary user in a container) killing the
    daemon does the same, as nobody else holds the connection then.
    """
    failure: unmount.UnmountError | None = None
    try:
        unmount.abort_connection(mount.connection)
    except unmount.UnmountError as error:
        if registration is None:
            failure = error
    keeper = _keeper_pid(mount.mountpoint)
    unmount.umount_path(mount.mountpoint, is_lazy=True)
    if registration and registration.is_alive():
        _see_out(registration.pid)
    if keeper is not None:
        _see_out(keeper)
    registry.unregister(mount.mountpoint)
    if failure is not None:
        raise failure


def _keeper_pid(mountpoint: Path) -> int | None:
    """The process that keeps a mount, if there is one."""
    socket = registry.keeper_socket(mountpoint)
    try:
        return int(control.exchange(socket, {"do": "status"}, ANSWER_TIMEOUT_S)["pid"])
    except control.ControlError:
        return control.peer(socket)


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait until a process is gone; False if it is still there."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()  # select takes no descriptors from 1024 on
        ended.register(process, select.POLLIN)
        return bool(ended.poll(1000 * timeout_s))
    finally:
        os.close(process)


def _see_out(pid: int) -> None:
    """Wait until a process of the mount ends, and kill it if it does not."""
    if _has_ended(pid, FORCE_TIMEOUT_S):
        return
    os.kill(pid, signal.SIGKILL)
    if not _has_ended(pid, FORCE_TIMEOUT_S):
        raise CommandError(f"the process {pid} does not die; see the kernel log")
