"""How `fusefs sync` and `fusefs umount` wait until the bucket has what was written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusefs.cli.status_report import human_size
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError

ANSWER_TIMEOUT_S = 5.0
ASK_EVERY_S = 0.2
# How long to wait for the next daemon where the last one has died.
PATIENCE_S = 30.0
MOST_SHOWN = 5

Progress = Callable[[int, int], None]


def sync(path: Path, timeout_s: float, progress: Progress) -> None:
    """Wait until everything at or below a path is in the bucket.

    `progress` is told how many files and bytes are left.

    Raises:
        CommandError: something can't be uploaded, or it takes longer than `timeout_s`.
    """
    mountpoint, below = find(path)
    left = wait(mountpoint, below, timeout_s, progress, patience_s=PATIENCE_S)
    if left:
        raise CommandError(describe(left))


def find(path: Path) -> tuple[Path, str]:
    """The mount that a path is in, and what is below its root; asks no file system.

    Raises:
        CommandError: it is in none of ours.
    """
    absolute = Path(os.path.abspath(path))
    # From the top, so that no link is read that is in a mount.
    for at in reversed((absolute, *absolute.parents)):
        mountpoint = registry.resolve(at)
        if registry.registration_of(mountpoint) is not None:
            below = absolute.relative_to(at)
            return mountpoint, "" if below == Path() else str(below)
    raise CommandError(f"{path} is not in a mount of fusefs; fusefs status lists them")


def wait(
    mountpoint: Path,
    below: str,
    timeout_s: float,
    progress: Progress,
    *,
    patience_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Wait until everything is uploaded, or has failed to be; return what is not there.

    A daemon that says nothing may be replaced within `patience_s`.

    Raises:
        ControlError: it was not.
    """
    registration = registry.registration_of(mountpoint)
    if registration is None:
        return []
    begun = heard = asked = time.monotonic()
    message = {"command": "sync", "path": below, "start": True}
    while True:
        sent = time.monotonic()
        if message["start"]:
            asked = sent
        try:
            answer = control.exchange(registration.socket, message, ANSWER_TIMEOUT_S)
        except control.NotAnsweringError:
            if time.monotonic() - heard >= patience_s:
                raise
            message["start"] = True  # the next one is asked for it anew
            time.sleep(ASK_EVERY_S)
            continue
        heard = time.monotonic()
        # What was written since is nobody's who asked for this. However late an
        # answer comes: what had been written by then is older than this.
        left = [one for one in answer["pending"] if one["since_s"] >= sent - asked]
        if not answer["under_way"] or not left or heard - begun > timeout_s:
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
