"""`fusefs cluster-cache`: shows a mount's cluster cache, and clears it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fusefs.cli import polling, status_report, sync
from fusefs.cli.status_report import human_size
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request

TIMEOUT_S = 5.0


def show(path: Path, *, is_json: bool) -> None:
    """Print the state of the cluster cache of a path's mount.

    Raises:
        CommandError: `path` is in no mount, or the mount has no cluster cache.
        ControlError: the mount has ended, or its daemon does not answer.
    """
    mountpoint, _ = sync.find(path)
    status = daemon_request(mountpoint, {"command": "status"}, TIMEOUT_S)
    found = status.get("cluster_cache")
    if found is None:
        raise CommandError(f"{mountpoint} has no cluster cache; --cluster-cache names one")
    print(json.dumps(found, indent=2) if is_json else status_report.cluster_cache(found))


def clear(path: Path) -> bool:
    """Remove all blocks of the bucket of a path's mount; return whether none is left.

    Raises:
        CommandError: `path` is in no mount, the daemon is silent for a minute, or the
            blocks can't be listed.
        ControlError: the mount has ended, or has no cluster cache.
    """
    mountpoint, _ = sync.find(path)
    job = polling.finish(mountpoint, {"command": "clear cluster cache"}, _progress)
    if job["why"]:
        raise CommandError(f"{mountpoint}: {job['why']}")
    left = f"; {job['failed']:,} could not be removed" if job["failed"] else ""
    print(f"{_progress(job)}{left}")
    return not job["failed"]


def _progress(job: dict[str, Any]) -> str:
    return f"{job['blocks']:,} blocks removed, {human_size(job['bytes'])}"
