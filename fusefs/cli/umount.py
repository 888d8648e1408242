"""`fusefs umount`: ends a mount in the ordinary way, lazily, or by force.

Without --lazy, exit status 0 promises that the bucket has all written files. After the end of the
mount's processes, left_behind.py finds the files that the bucket lacks on the local disk, even if a
daemon was killed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusefs.cli import left_behind, polling, sync
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_pid, keeper_pid
from fusefs.linux import mountinfo, processes, unmount
from fusefs.linux.files import closing

# Time limit for the end of a process: the daemon retries failed uploads before it ends.
UMOUNT_TIMEOUT_S = 120.0
FORCE_TIMEOUT_S = 5.0
SLOW_S = 5.0
# The longest wait for an answer: a keeper replaces a daemon silent for 30 s (`--hang-timeout`).
NEXT_DAEMON_S = 45.0


def end_mount(mountpoint: Path, *, is_forced: bool, is_lazy: bool) -> None:
    """End a mount and wait for the end of its processes.

    Raises:
        CommandError, UnmountError: `mountpoint` is not a mount of fusefs, is in use, or does not
            end; or the mount has ended, but the bucket lacks written files.
    """
    mount = mountinfo.find_mount(mountpoint)
    registration = registry.registration_of(mountpoint)
    if mount is None or not mount.is_fusefs:
        raise CommandError(f"{mountpoint} is not a mount of fusefs")
    os.chdir("/")  # or this process could keep the mount busy
    staging = registry.staging_of(mountpoint)
    if is_forced:
        _end_by_force(mount, registration)
        remaining = []
    else:
        remaining = _end(mount, registration, has_staging=staging is not None, is_lazy=is_lazy)
    if is_lazy and remaining:
        raise CommandError(
            f"{mountpoint} is detached; {sync.describe(remaining)}. The daemon goes on with them;"
            " without --lazy the command waits for that"
        )
    left = remaining if staging is None else left_behind.find(staging, remaining)
    if left and not is_lazy:
        where = f"in {staging}" if staging is not None else "on the local disk"
        raise CommandError(
            f"{mountpoint} is unmounted; {sync.describe(left)}. These files stay on the local "
            f"disk, {where}, and are uploaded when the bucket is mounted there again with the "
            "same cache directory"
        )


def _end(
    mount: mountinfo.KernelMount,
    registration: registry.Registration | None,
    *,
    has_staging: bool,
    is_lazy: bool,
) -> list[dict[str, Any]]:
    """Wait for uploads, unmount, wait for processes (lazy: no waits); return files not uploaded."""
    mountpoint = mount.mountpoint
    daemon = registration.pid if registration and registration.is_alive() else None
    keeper = keeper_pid(mountpoint) or None  # 0 if in another PID namespace
    patience_s = NEXT_DAEMON_S if has_staging and keeper is not None and not is_lazy else 0.0
    remaining = _finish_uploads(mountpoint, patience_s, timeout_s=0.0 if is_lazy else math.inf)
    try:
        with _notice_if_slow(f"the kernel is unmounting {mountpoint}"):
            unmount.umount_path(mountpoint, is_lazy=is_lazy)
    except unmount.UnmountError as error:
        if error.is_busy:
            raise CommandError(f"{mountpoint} is in use{_users_text(mountpoint)}") from None
        raise CommandError(f"{mountpoint}: {error}") from None
    # After a lazy unmount the mount ends with its last use, perhaps hours later.
    if is_lazy:
        return remaining
    # Another daemon may have replaced the first one meanwhile.
    for pid in dict.fromkeys((daemon, daemon_pid(mountpoint), keeper)):
        if pid is None or _has_ended(pid, SLOW_S):
            continue
        why = _holders_text(mount)
        print(f"fusefs: process {pid} of {mountpoint} is ending{why}", file=sys.stderr)
        if not _has_ended(pid, UMOUNT_TIMEOUT_S):
            raise CommandError(
                f"{mountpoint} is unmounted, but its process {pid} has not ended within "
                f"{UMOUNT_TIMEOUT_S:.0f} s{why}. What is not in the bucket yet stays on the local "
                "disk"
            )
    registry.unregister(mountpoint)
    return remaining


def _finish_uploads(mountpoint: Path, patience_s: float, timeout_s: float) -> list[dict[str, Any]]:
    """Wait for the uploads of written files; return the files that failed to be uploaded.

    Returns no files if the daemon does not answer: the caller then checks the local disk.
    """
    try:
        with _notice_if_slow(f"files written to {mountpoint} are being uploaded"):
            return sync.wait(mountpoint, "", timeout_s, patience_s=patience_s)
    except control.ControlError:
        return []
    finally:
        polling.show_line("")


@contextmanager
def _notice_if_slow(what: str) -> Iterator[None]:
    """Print `what` to standard error if the block takes longer than five seconds."""
    timer = threading.Timer(SLOW_S, print, (f"fusefs: {what}",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _holders_text(mount: mountinfo.KernelMount) -> str:
    holders = unmount.holders_of(mount.device)
    if not holders:
        return "; its log has the details"
    shown = ", ".join(f"{command} (pid {pid})" for pid, command in holders[:5])
    return f"; it ends with the copies of the mount in the mount namespaces of {shown}"


def _users_text(mountpoint: Path) -> str:
    users = unmount.users_of(mountpoint)
    if not users:
        return "; end the programs that use it, or use --lazy"
    shown = ", ".join(f"{command} (pid {pid})" for pid, command in users[:5])
    more = f" and {len(users) - 5} more" if len(users) > 5 else ""
    return f" by {shown}{more}"


def _end_by_force(mount: mountinfo.KernelMount, registration: registry.Registration | None) -> None:
    """Abort the connection, unmount, and end the daemon and the keeper.

    If this user may not abort the connection (an ordinary user in a container), the daemon's death
    has the same effect, because no other process has the connection open.
    """
    failure: unmount.UnmountError | None = None
    try:
        unmount.abort_connection(mount.connection)
    except unmount.UnmountError as error:
        if registration is None:
            failure = error
    keeper = keeper_pid(mount.mountpoint) or None
    unmount.umount_path(mount.mountpoint, is_lazy=True)
    if registration and registration.is_alive():
        _wait_or_kill(registration.pid)
    if keeper is not None:
        _wait_or_kill(keeper)
    registry.unregister(mount.mountpoint)
    if failure is not None:
        raise failure


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a process; return False if it still runs after `timeout_s`."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with closing(process):
        return processes.has_ended(process, timeout_s)


def _wait_or_kill(pid: int) -> None:
    if _has_ended(pid, FORCE_TIMEOUT_S):
        return
    os.kill(pid, signal.SIGKILL)
    if not _has_ended(pid, FORCE_TIMEOUT_S):
        raise CommandError(f"process {pid} does not end after SIGKILL; see the kernel log")
