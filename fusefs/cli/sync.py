"""`fusefs sync`: waits until all written files are uploaded, also for `fusefs umount`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fusefs.cli.polling import ANSWER_TIMEOUT_S, show_line
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request
from fusefs.linux import files, mountinfo
from fusefs.settings.display import human_size

POLL_S = 0.2
# With many files the daemon takes long to answer: the pause is four times as long, up to this.
LONGEST_POLL_S = 5.0
# The longest wait for the replacement of a dead daemon.
NEXT_DAEMON_S = 30.0
MOST_SHOWN = 5


def sync(path: Path, timeout_s: float) -> None:
    """Wait until all files at or below a path are uploaded; CommandError names failed files."""
    mountpoint, below = find(path)
    patience_s = min(NEXT_DAEMON_S, timeout_s)
    try:
        remaining = wait(mountpoint, below, timeout_s, patience_s=patience_s)
    finally:
        show_line("")
    if remaining:
        raise CommandError(describe(remaining))


def find(path: Path) -> tuple[Path, str]:
    """Return the innermost mountpoint at or above `path`, and `path` relative to that mountpoint.

    The mounts' file systems are not accessed. Raises CommandError if `path` is in no registered
    mount.
    """
    absolute = Path(os.path.normpath(files.absolute(path)))
    # From the root down, so that no symbolic link inside a mount is read.
    for at in reversed((absolute, *absolute.parents)):
        mountpoint = registry.resolve(at)
        if registry.registration_of(mountpoint) is not None:
            found = mountpoint / absolute.relative_to(at)
            inner = mountinfo.mount_above(found)
            if inner is None or mountpoint not in inner.mountpoint.parents:
                return mountpoint, _below(mountpoint, found)
            if registry.registration_of(inner.mountpoint) is not None:
                return inner.mountpoint, _below(inner.mountpoint, found)
            break
    raise CommandError(f"{path} is not in a mount of fusefs; fusefs status lists them")


def _below(mountpoint: Path, path: Path) -> str:
    below = path.relative_to(mountpoint)
    return "" if below == Path() else str(below)


def wait(
    mountpoint: Path, below: str, timeout_s: float, *, patience_s: float = 0.0
) -> list[dict[str, Any]]:
    """Wait until the uploads of files at or below a path have ended; return the failed files.

    Files that still wait after `timeout_s` are returned, too; files written since the call are not.
    If the daemon does not answer, its replacement has to answer within `patience_s`.

    Raises:
        ControlError: no daemon answered for `patience_s`, or the daemon refused.
    """
    if registry.registration_of(mountpoint) is None:
        return []
    begun = last_answer = requested = time.monotonic()
    message = {"command": "sync", "path": below, "start": True}
    while True:
        sent = time.monotonic()
        if message["start"]:
            requested = sent
        try:
            answer = daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)
        except control.NotAnsweringError:
            if time.monotonic() - last_answer >= patience_s:
                raise
            message["start"] = True  # for the daemon's replacement
            time.sleep(POLL_S)
            continue
        last_answer = time.monotonic()
        # Files written after the first request do not count. `since_s` is a file's age when the
        # daemon answered, so that a file of the first request is at least this old.
        remaining = [file for file in answer["pending"] if file["since_s"] >= sent - requested]
        if not answer["under_way"] or not remaining or last_answer - begun > timeout_s:
            return remaining
        show_line(f"{answer['pending_files']:,} files, {human_size(answer['pending_bytes'])} left")
        message["start"] = False
        time.sleep(min(max(POLL_S, 4 * (last_answer - sent)), LONGEST_POLL_S))


def describe(files: list[dict[str, Any]]) -> str:
    """Return one line about files that are not in the bucket."""
    names = ", ".join(
        f"{file['key']} ({file['error'] or file['state']})" for file in files[:MOST_SHOWN]
    )
    more = f" and {len(files) - MOST_SHOWN} more" if len(files) > MOST_SHOWN else ""
    return f"not in the bucket yet: {names}{more}"
