"""The path of a mount's log, which the launcher opens and daemon/log_handlers.py writes."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fusefs.launch.preflight import LaunchError
from fusefs.linux.files import open_in_place
from fusefs.settings.mount import MountSettings

# The longest log name in bytes (file systems allow 255); a longer name loses its beginning.
LONGEST_NAME = 200


def path_of(settings: MountSettings) -> Path | None:
    """Return the path of the log; None for standard error."""
    if settings.log_file is not None or settings.foreground:
        return settings.log_file
    # The default of a background mount: one file for each mountpoint.
    if os.geteuid() == 0:
        directory = Path("/var/log/fusefs")
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        directory = Path(state) / "fusefs"
    name = os.fsencode("-".join(settings.mountpoint.parts[1:]) or "root")
    return directory / f"{os.fsdecode(name[-LONGEST_NAME:])}.log"


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[IO[bytes]]:
    """Open the log for appending, with mode 0600 (None: standard error). Raises LaunchError."""
    if path is None:
        yield sys.stderr.buffer
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_in_place(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise LaunchError(f"the log {path} cannot be written: {error.strerror}") from error
    with open(descriptor, "ab") as log:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not /dev/null, which all users share
            os.fchmod(descriptor, 0o600)
        yield log


def last_line(path: Path, start: int) -> str:
    """Return the last line that is not empty after the log's first `start` bytes, or ""."""
    with open(path, "rb") as log:
        # A hostile daemon may have written any amount.
        log.seek(max(start, log.seek(0, os.SEEK_END) - (1 << 16)))
        lines = log.read().decode(errors="replace").splitlines()
    # Without the characters with which Python draws exception groups.
    lines_of_text = (line.strip(" |+-") for line in reversed(lines))
    return next(filter(None, lines_of_text), "")
