"""`fusefs verify`: has the daemon compare cached copies with their checksums."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from fusefs.cli import sync
from fusefs.cli.status_report import human_size
from fusefs.launch import control
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request

ANSWER_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
POLL_S = 0.25
# Enough for the next daemon, if the daemon dies.
SILENCE_S = 60.0


def verify(path: Path) -> dict[str, Any]:
    """Compare every cached copy at or below `path` with its checksums, and return the result.

    Raises:
        CommandError: `path` is in no mount, or the daemon is silent for a minute.
        ControlError: the mount has ended, or its daemon refused.
    """
    mountpoint, below = sync.find(path)
    message = {"command": "verify", "path": below, "start": True}
    last_answer, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            job = daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)
            last_answer = time.monotonic()
            message["start"] = False
            if job["has_ended"]:
                _show(None)
                return job
            _show(job)
        except control.NotAnsweringError as error:
            if time.monotonic() - last_answer > SILENCE_S:
                raise CommandError(f"the daemon of {mountpoint} is silent: {error}") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def report(path: Path, job: dict[str, Any]) -> bool:
    """Print the result of `verify`; return whether every cached copy is right now.

    Raises:
        CommandError: the comparison is incomplete.
    """
    if job["why"]:
        raise CommandError(f"{path}: {job['why']}")
    for name in job["differed"]:
        print(f"{name}: the cached copy differed; it was dropped and fetched again")
    for name in job["lost"]:
        print(f"{name}: differs, and could not be fetched again")
    more = job["differed_files"] + job["lost_files"] - len(job["differed"]) - len(job["lost"])
    if more:
        print(f"and {more:,} more")
    size = human_size(job["bytes"])
    print(
        f"{path}: {job['files']:,} files with {size} in the cache compared,"
        f" {job['differed_files'] + job['lost_files']:,} differed"
    )
    return not job["lost_files"]


def _show(job: dict[str, Any] | None) -> None:
    """Show progress on one line of the terminal, if there is one; None clears the line."""
    if sys.stderr.isatty():
        text = f"{job['files']:,} files, {human_size(job['bytes'])}" if job is not None else ""
        print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)
