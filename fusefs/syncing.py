"""How `fusefs sync` and `fusefs umount` wait until the bucket has what was written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusefs import control, mounts
from fusefs.control import CommandError
from fusefs.report import human_size

ANSWER_TIMEOUT_S = 5.0
ASK_EVERY_S = 0.2
MOST_SHOWN = 5

Progress = Callable[[int, int], None]


def sync(path: Path, timeout_s: float, progress: Progress) -> None:
    """Wait until everything at or below a path is in the bucket.

    `progress` is told how many files and bytes are left.

    Raises:
        CommandError: something can't be uploaded, or it takes longer than `timeout_s`.
    """
    mountpoint, below = find(path)
    left = wait(mountpoint, below, timeout_s, progress)
    if left:
        raise CommandError(describe(left))


def find(path: Path) -> tuple[Path, str]:
    """The mount that a path is in, and what is below its root; asks no file system.

    Raises:
        CommandError: it is in none of ours.
    """
    absolute = Path(os.path.abspath(path))
    for at in (absolute, *absolute.parents):
        if mounts.registration_of(at) is not None:
            below = absolute.relative_to(at)
            return at, "" if below == Path() else str(below)
    raise CommandError(f"{path} is not in a mount of fusefs; fusefs status lists them")


def wait(
    mountpoint: Path, below: str, timeout_s: float, progress: Progress
) -> list[dict[str, Any]]:
    """Wait until everything is uploaded, or has failed to be; return what is not there."""
    registration = mounts.registration_of(mountpoint)
    if registration is None:
        return []
    begun = time.monotonic()
    message = {"command": "sync", "path": below, "start": True}
    while True:
        answer = control.exchange(registration.socket, message, ANSWER_TIMEOUT_S)
        passed_s = time.monotonic() - begun
        # What was written since is nobody's who asked for this.
        left = [one for one in answer["pending"] if one["since_s"] > passed_s]
        if not answer["under_way"] or not left or passed_s > timeout_s:
            return left
        progress(answer["pending_files"], answer["pending_bytes"])
        message["start"] = False
        time.sleep(ASK_EVERY_S)


def describe(left: list[dict[str, Any]]) -> str:
    """One line about what is not in the bucket."""
    shown = ", ".join(f"{one['key']} ({one['error'] or one['state']})" for one in left[:MOST_SHOWN])
    more = f" and {len(left) - MOST_SHOWN} more" if len(left) > MOST_SHOWN else ""
    return f"not in the bucket yet: {shown}{more}"


def shown() -> Progress:
    """Progress on one line of a terminal; nothing where there is none."""
    if not sys.stderr.isatty():
        return lambda _files, _size: None

    def show(files: int, size: int) -> None:
        text = f"{files:,} files, {human_size(size)} left"
        print(f"\r{text:<40}", end="", file=sys.stderr, flush=True)

    return show
