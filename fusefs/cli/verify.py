"""`fusefs verify`: has the daemon compare cached copies with their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusefs.cli import polling, sync
from fusefs.cli.status_report import human_size
from fusefs.launch.control import CommandError
from fusefs.settings.display import shown


def verify(path: Path) -> dict[str, Any]:
    """Compare every cached copy at or below `path` with its checksums, and return the result.

    Raises:
        CommandError: `path` is in no mount, or the daemon is silent for a minute.
        ControlError: the mount has ended, or its daemon refused.
    """
    mountpoint, below = sync.find(path)
    return polling.finish(mountpoint, {"command": "verify", "path": below}, _progress)


def report(path: Path, job: dict[str, Any]) -> bool:
    """Print the result of `verify`; return whether every cached copy is known to be right now.

    Raises:
        CommandError: the comparison is incomplete.
    """
    if job["why"]:
        raise CommandError(f"{path}: {job['why']}")
    for name in job["differed"]:
        print(f"{shown(name)}: the cached copy differed; it was dropped and fetched again")
    for name in job["lost"]:
        print(f"{shown(name)}: differs, and could not be fetched again")
    more = job["differed_files"] + job["lost_files"] - len(job["differed"]) - len(job["lost"])
    if more:
        print(f"and {more:,} more")
    size = human_size(job["bytes"])
    print(
        f"{shown(str(path))}: {job['files']:,} files with {size} in the cache compared,"
        f" {job['differed_files'] + job['lost_files']:,} differed"
    )
    skipped = job["skipped_files"]
    if skipped:
        print(f"{shown(str(path))}: {skipped:,} could not be compared; see the log, and try again")
    return not job["lost_files"] and not skipped


def _progress(job: dict[str, Any]) -> str:
    return f"{job['files']:,} files, {human_size(job['bytes'])}"
