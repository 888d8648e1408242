"""Starting a mount's daemon: what can be told beforehand, and the wait for it.

`check` looks at what the machine says without asking S3, so that the usual
mistakes get their sentence before anything is started. `start` then runs
`python -m fusefs.daemon` in a session of its own. The settings go to its
standard input as JSON; it answers with one JSON line on its standard output,
`{"ready": true}` or `{"error": "..."}`, and closes that. Its
standard error is the log. A daemon that ends without that line has said why
in the log, whose last line is then shown.

Whatever goes wrong, nothing is left: the daemon is ended, and a mount that it
had already made is taken away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fusefs import mounts
from fusefs.kernel import unmount
from fusefs.kernel.mount import may_mount
from fusefs.settings import MountSettings

FUSE_DEVICE = Path("/dev/fuse")
FUSE_NUMBER = os.makedev(10, 229)  # as Linux has it in Documentation/admin-guide/devices.txt
FUSE_CONFIGURATION = Path("/etc/fuse.conf")

# What a start may take beyond the time in which S3 requests are retried.
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0


class LaunchError(Exception):
    """The mount cannot be made; the message is one line for the user."""


# --- what can be told beforehand ----------------------------------------------


def check(settings: MountSettings) -> None:
    """Refuse what cannot work on this machine.

    Raises:
        LaunchError: with what is wrong and what to do.
    """
    _check_mountpoint(settings.mountpoint)
    _check_device()
    _check_privileges(settings)


def _check_mountpoint(mountpoint: Path) -> None:
    _refuse_mounted(mountpoint)  # first, since a mount there may not answer a stat
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


def _refuse_mounted(mountpoint: Path) -> None:
    mount = mounts.find_mount(mountpoint)
    if mount is not None:
        raise LaunchError(
            f"{mountpoint} is already a mount ({mount.filesystem}, {mount.source}); "
            "unmount it or choose another directory"
        )


def _check_device() -> None:
    try:
        status = FUSE_DEVICE.stat()
    except OSError:
        status = None
    if status is None or not stat.S_ISCHR(status.st_mode) or status.st_rdev != FUSE_NUMBER:
        raise LaunchError(
            "there is no /dev/fuse; load the kernel module (modprobe fuse), "
            "or give the container the device"
        )
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise LaunchError("/dev/fuse cannot be opened by this user; it needs mode 0666")


def _check_privileges(settings: MountSettings) -> None:
    if may_mount():
        return
    if os.geteuid() == 0:
        raise LaunchError("mounting needs CAP_SYS_ADMIN, which this container does not have")
    if not any(
        os.access(Path(directory, "fusermount3"), os.X_OK) for directory in os.get_exec_path()
    ):
        raise LaunchError("an ordinary user mounts through fusermount3; install the package fuse3")
    if not os.access(settings.mountpoint, os.W_OK):
        raise LaunchError(f"{settings.mountpoint} must be writable for you to mount on it")
    if settings.allow_other and not _has_user_allow_other():
        raise LaunchError(
            "--allow-other by an ordinary user needs the line user_allow_other in /etc/fuse.conf"
        )


def _has_user_allow_other() -> bool:
    try:
        lines = FUSE_CONFIGURATION.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


# --- starting -----------------------------------------------------------------


def start(settings: MountSettings) -> None:
    """Start the daemon and return once the mount answers.

    Raises:
        LaunchError: it did not come up; nothing is left of it.
    """
    log_path = settings.log_file or default_log_file(settings.mountpoint)
    with _claim(settings.mountpoint), _open_log(log_path) as log:
        log_start = log.seek(0, os.SEEK_END)
        daemon = _spawn(settings, log)
        try:
            _wait_until_ready(daemon, settings.retry_time + START_TIMEOUT_S)
        except _DiedError:
            _clean_up(daemon, settings.mountpoint)
            last_line = _last_line(log_path, log_start) or f"exit status {daemon.returncode}"
            raise LaunchError(f"the daemon ended while starting: {last_line}") from None
        except BaseException:  # Ctrl-C too leaves nothing behind
            _clean_up(daemon, settings.mountpoint)
            raise


@contextlib.contextmanager
def _claim(mountpoint: Path) -> Iterator[None]:
    """Keep other commands from mounting on the same directory meanwhile.

    Whoever opens it after the mount was made locks the mount's root instead,
    hence the second look.
    """
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_mounted(mountpoint)
        yield
    except BlockingIOError:
        raise LaunchError(f"{mountpoint} is just being mounted by another command") from None
    finally:
        os.close(directory)


class _DiedError(Exception):
    """The daemon closed its answer without having given one."""


def _spawn(settings: MountSettings, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P keeps the working directory, which is "/", out of the module path.
    daemon = subprocess.Popen(
        [sys.executable, "-P", "-m", "fusefs.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",
        start_new_session=True,
    )
    assert daemon.stdin is not None
    with contextlib.suppress(BrokenPipeError), daemon.stdin:
        daemon.stdin.write(settings.to_json().encode())
    return daemon


def _wait_until_ready(daemon: subprocess.Popen[bytes], timeout_s: float) -> None:
    line = _read_line(daemon, timeout_s)
    try:
        answer = json.loads(line)
    except ValueError:
        raise LaunchError(f"the daemon answered {line!r} instead of JSON") from None
    if "error" in answer:
        raise LaunchError(str(answer["error"]))


def _read_line(daemon: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """The daemon's one line. EOF before its end means that it died."""
    assert daemon.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    with daemon.stdout as answer, selectors.DefaultSelector() as selector:
        selector.register(answer, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"the mount did not come up within {timeout_s:.0f} s")
            chunk = os.read(answer.fileno(), 1 << 16)
            if not chunk:
                raise _DiedError
            line += chunk
    return line


def _clean_up(daemon: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """End the daemon and take away what it mounted."""
    daemon.terminate()
    try:
        daemon.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
    mount = mounts.find_mount(mountpoint)
    if mount is not None and mount.is_fusefs:
        with contextlib.suppress(unmount.UnmountError):
            unmount.umount_path(mountpoint, is_lazy=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(END_TIMEOUT_S)
    mounts.unregister(mountpoint)


# --- the log ------------------------------------------------------------------


def default_log_file(mountpoint: Path) -> Path:
    """Where the log of a background mount goes: one file per mountpoint."""
    if os.geteuid() == 0:
        directory = Path("/var/log/fusefs")
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        directory = Path(state) / "fusefs"
    name = "-".join(mountpoint.parts[1:]) or "root"
    return directory / f"{name[-200:]}.log"


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[IO[bytes]]:
    """The log for appending, created for the user alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"the log {path} cannot be written: {error.strerror}") from error
    with open(descriptor, "ab") as log:
        yield log


def _last_line(path: Path, start: int) -> str:
    with open(path, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
