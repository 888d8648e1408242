"""The place of a mount's log, for whoever starts it; daemon/log_handlers.py writes it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fusefs.launch.preflight import LaunchError
from fusefs.settings.mount import MountSettings

# Bytes of a log's name, of which file systems allow 255; the end of a mountpoint says most.
LONGEST_NAME = 200


def path_of(settings: MountSettings) -> Path | None:
    """The path of the log; None is standard error."""
    if settings.log_file is None and not settings.foreground:
        return _default(settings.mountpoint)
    return settings.log_file


def _default(mountpoint: Path) -> Path:
    """The path of a background mount's log: one file per mountpoint."""
    if os.geteuid() == 0:
        directory = Path("/var/log/fusefs")
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        directory = Path(state) / "fusefs"
    name = os.fsencode("-".join(mountpoint.parts[1:]) or "root")
    return directory / f"{os.fsdecode(name[-LONGEST_NAME:])}.log"


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[IO[bytes]]:
    """The log for appending, the user's alone, or standard error; raises LaunchError."""
    if path is None:
        yield sys.stderr.buffer
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"the log {path} cannot be written: {error.strerror}") from error
    with open(descriptor, "ab") as log:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # and not everybody's /dev/null
            os.fchmod(descriptor, 0o600)
        yield log


def last_line(path: Path, start: int) -> str:
    """The last line of what was written since the log had `start` bytes, or nothing."""
    with open(path, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    # Without the frames in which Python shows groups of exceptions.
    lines_of_text = (line.strip(" |+-") for line in reversed(lines))
    return next(filter(None, lines_of_text), "")
