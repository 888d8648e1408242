"""How `fusefs verify` has daemons compare cached copies, and shows what they find."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from fusefs.cli import sync
from fusefs.cli.status_report import human_size
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError

ANSWER_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
ASK_EVERY_S = 0.25
# For the next daemon, if one dies.
SILENCE_S = 60.0


def verify(path: Path) -> dict[str, Any]:
    """Have everything cached at or below a path compared with its checksums; wait for the end.

    Raises:
        CommandError: it is in no mount, its mount has ended, or its daemon is silent.
        ControlError: the daemon refused.
    """
    mountpoint, below = sync.find(path)
    message = {"command": "verify", "path": below, "start": True}
    heard, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        registration = registry.registration_of(mountpoint)
        if registration is None:
            raise CommandError(f"the mount at {mountpoint} has ended")
        try:
            job = control.exchange(registration.socket, message, ANSWER_TIMEOUT_S)
            heard = time.monotonic()
            message["start"] = False
            if job["has_ended"]:
                _show(None)
                return job
            _show(job)
        except control.NotAnsweringError as error:
            if time.monotonic() - heard > SILENCE_S:
                raise CommandError(f"its daemon is silent: {error}") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, ASK_EVERY_S)


def report(path: Path, job: dict[str, Any]) -> bool:
    """Print what was found; tell whether everything is right now.

    Raises:
        CommandError: not everything could be looked at.
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
    """Progress on one line of a terminal; nothing where there is none."""
    if sys.stderr.isatty():
        text = f"{job['files']:,} files, {human_size(job['bytes'])}" if job is not None else ""
        print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)
