"""Checks of the settings and the machine before a mount is started, without requests to S3.

Each usual mistake gets its own message here. No function stats a mountpoint that
may be a mount, because the call could wait for ever.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time
from pathlib import Path

from fusefs.launch import registry
from fusefs.linux import mountinfo, unmount
from fusefs.linux.fuse_connection import is_device
from fusefs.linux.mount import may_mount
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import SessionKind
from fusefs.store.errors import ErrorCode

DEVICE = Path("/dev/fuse")
FUSE_CONFIGURATION = Path("/etc/fuse.conf")
FUSE_SETTINGS = Path("/proc/sys/fs/fuse")
DEAD_TIMEOUT_S = 2.0


class LaunchError(Exception):
    """The mount cannot be started; the message is one line for the user."""

    def __init__(self, sentence: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> None:
        super().__init__(sentence)
        self.code = code


# A shorter request time-out of the kernel could end a mount during a pause.
SHORTEST_REQUEST_TIMEOUT_S = 600


def warnings() -> list[str]:
    """Return warnings for the user about system settings that impair the mount."""
    found = []
    for name in ("default_request_timeout", "max_request_timeout"):
        try:
            seconds = int((FUSE_SETTINGS / name).read_text())
        except (OSError, ValueError):
            continue
        if 0 < seconds < SHORTEST_REQUEST_TIMEOUT_S:
            found.append(
                f"fs.fuse.{name} is {seconds} s: the kernel ends a mount that is not answered for"
                " that long, as during a longer pause"
            )
    return found


def check(settings: MountSettings) -> None:
    """Raise LaunchError, with advice, if the mount cannot work on this machine."""
    _clear_dead_mount(settings.mountpoint)
    _check_mountpoint(settings.mountpoint)
    _check_directories(settings)
    check_device()
    check_privileges(settings.mountpoint, allow_other=settings.allow_other)
    _check_session(settings)


def _check_mountpoint(mountpoint: Path) -> None:
    refuse_mounted(mountpoint)  # first, since a mount there may not answer a stat
    try:
        if not stat.S_ISDIR(mountpoint.stat().st_mode):
            raise LaunchError(f"{mountpoint} is not a directory")
        is_empty = not any(mountpoint.iterdir())
    except FileNotFoundError:
        raise LaunchError(f"{mountpoint} does not exist; create it first") from None
    except OSError as error:
        raise LaunchError(f"{mountpoint} cannot be used: {error.strerror}") from error
    if not is_empty:
        raise LaunchError(f"{mountpoint} is not empty; choose an empty directory")


def refuse_mounted(mountpoint: Path) -> None:
    """Raise LaunchError if there is a mount on the directory already."""
    if (mount := mountinfo.find_mount(mountpoint)) is not None:
        raise LaunchError(
            f"{mountpoint} is already a mount ({mount.filesystem}, {mount.source}); "
            "unmount it or choose another directory"
        )


def _check_directories(settings: MountSettings) -> None:
    """Raise LaunchError if the cache or runtime directory is inside another fusefs mount."""
    named = {
        "--cache-dir": settings.cache_dir,
        registry.RUNTIME_VARIABLE: registry.runtime_directory(),
    }
    for name, given in named.items():
        # The unresolved path first: resolving may access another mount, and is often not needed.
        for directory in (Path(os.path.abspath(given)), registry.resolve(given)):
            above = mountinfo.mount_above(directory)
            if above is not None and above.is_fusefs:
                raise LaunchError(
                    f"{name}: {given} is inside the fusefs mount on {above.mountpoint}; "
                    "choose a directory on a local disk"
                )


def check_device() -> None:
    """Raise LaunchError, with advice, if there is no usable /dev/fuse."""
    try:
        status = DEVICE.stat()
    except OSError:
        status = None
    if status is None or not is_device(status):
        raise LaunchError(
            "there is no /dev/fuse; load the kernel module (modprobe fuse), "
            "or give the container the device"
        )
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise LaunchError(
            f"/dev/fuse cannot be opened ({error.strerror}); it needs mode 0666, "
            "and a container the right to use it"
        ) from error


def check_privileges(mountpoint: Path | None, *, allow_other: bool) -> None:
    """Raise LaunchError if this user may not mount, or not on `mountpoint` if it is given."""
    if may_mount():
        return
    if os.geteuid() == 0:
        raise LaunchError("mounting needs CAP_SYS_ADMIN, which this container does not have")
    if not any(
        os.access(Path(directory, "fusermount3"), os.X_OK) for directory in os.get_exec_path()
    ):
        raise LaunchError("an ordinary user mounts through fusermount3; install the package fuse3")
    if mountpoint is not None and not os.access(mountpoint, os.W_OK):
        raise LaunchError(f"{mountpoint} must be writable for you to mount on it")
    if allow_other and not _has_user_allow_other():
        raise LaunchError(
            "--allow-other by an ordinary user needs the line user_allow_other in /etc/fuse.conf"
        )


def _check_session(settings: MountSettings) -> None:
    is_own = settings.session != SessionKind.PYFUSE3 and may_mount()
    if mountinfo.has_automount(settings.mountpoint) and not is_own:
        # pyfuse3 and fusermount3 access the path, so they would wait for their own mount.
        raise LaunchError(
            f"{settings.mountpoint} is mounted on demand (autofs): mounting there needs root "
            "and --session kernel"
        )
    if settings.session == SessionKind.PYFUSE3 and settings.user is not None:
        raise LaunchError(
            "--user needs the kernel session: under pyfuse3 the daemon runs as whoever mounts"
        )


def _has_user_allow_other() -> bool:
    try:
        lines = FUSE_CONFIGURATION.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def _clear_dead_mount(mountpoint: Path) -> None:
    """Detach a fusefs mount whose daemon is dead, and print a message; may raise LaunchError."""
    mount = mountinfo.find_mount(mountpoint)
    if mount is None or not mount.is_fusefs or not _is_dead(mountpoint):
        return
    try:
        unmount.umount_path(mountpoint, is_lazy=True)
    except unmount.UnmountError as error:
        raise LaunchError(f"the dead mount on {mountpoint} can't be taken away: {error}") from None
    print(f"fusefs: {mountpoint} was a dead mount; mounting anew", file=sys.stderr)


def _is_dead(mountpoint: Path) -> bool:
    """True if statvfs fails with ENOTCONN. A child calls it, because it may block for ever."""
    child = os.fork()
    if not child:
        try:
            os.statvfs(mountpoint)
            os._exit(0)
        except OSError as error:
            os._exit(1 if error.errno == errno.ENOTCONN else 0)
    deadline = time.monotonic() + DEAD_TIMEOUT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 1
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return False
