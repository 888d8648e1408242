"""`fusefs-csi list`: the volumes that pods of this node use, one line for each pod.

The command runs beside the driver, in its container. It reads the driver's records, the kernel's
table of mounts and the daemons' status, but accesses no mount. The column STATE shows if a daemon
does not answer within a second, or gives no valid status (a hostile daemon, or another version).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from csi.node.bind_mount import MountTable
from csi.node.config import MOUNT_RECORDS, POD_RECORDS, RUNTIME
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.pod_records import PodRecord, PodRecords
from fusefs.launch.registry import use_runtime_directory
from fusefs.settings.types import MIB

MOST_AT_ONCE = 32
NO_POD = PodRecord("", "", "")
_HEADINGS = ("POD", "CLAIM", "VOLUME", "SOURCE", "IDENTITY", "CACHE", "PENDING", "STATE")


# The use of a volume by a pod, made by `_row`; `cache_bytes` is the size of the identity's cache.
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fusefs-csi list`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the volumes of this node; return the exit status."""
    rows = list(rows_of(arguments.state_dir))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(as_table([_cells(row) for row in rows]) if rows else "no volumes")
    return 0


def rows_of(state: Path) -> Iterator[Row]:
    """Yield a row for each pod of each volume on record below `state`, mounted or not."""
    use_runtime_directory(state / RUNTIME)
    records = state / MOUNT_RECORDS
    if not records.is_dir():
        return
    table = MountTable()
    pods = PodRecords(state / POD_RECORDS).all()
    found = [(record, table.top(Path(record.root))) for record in MountRecords(records).all()]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # so that silent daemons cost one time-out
        mounted = [record for record, root in found if root is not None]
        statuses = dict(
            zip(
                (record.key for record in mounted),
                pool.map(MountRecord.status, mounted),
                strict=True,
            )
        )
    for record, root in found:
        status = statuses.get(record.key)
        targets = [
            mount.mountpoint
            for mount in (table.of_device(root.device) if root is not None else [])
            if mount.mountpoint.name != record.key
        ]
        # A target for a subPath belongs to a pod that has another target, too.
        shown: list[Path | None] = [path for path in targets if "volume-subpaths" not in path.parts]
        for target in shown or [None]:
            pod = pods.get(target) if target is not None else None
            yield _row(record, pod or NO_POD, target, status, is_mounted=root is not None)


def _row(
    record: MountRecord,
    pod: PodRecord,
    target: Path | None,
    status: dict[str, Any] | None,
    *,
    is_mounted: bool,
) -> Row:
    row: Row = {
        "namespace": pod.namespace,
        "pod": pod.name,
        "claim": pod.claim,
        "volume": record.volume_id,
        "is_inline": pod.is_inline,
        "source": record.source,
        "identity": record.who,
        "mount": record.root,
        "target": os.fspath(target) if target is not None else "",
        "state": "does not answer" if is_mounted else "not mounted",
        "cache_bytes": None,
        "pending_files": None,
        "pending_bytes": None,
    }
    if status is None:
        return row
    try:
        writing = status["writing"] or {"pending_files": 0, "pending_bytes": 0}
        return row | {
            "state": "refused" if status["access"]["is_shut"] else "ok",
            "cache_bytes": _count(status["cache"], "used_bytes"),
            "pending_files": _count(writing, "pending_files"),
            "pending_bytes": _count(writing, "pending_bytes"),
        }
    except (KeyError, TypeError, ValueError):
        return row | {"state": "does not report its status"}


def _count(answer: dict[str, Any], name: str) -> int:
    """Return the count `name` from a daemon's answer; the daemon may be hostile.

    Raises:
        KeyError, TypeError, ValueError: the value is missing or is no valid count.
    """
    count = answer[name]
    if not isinstance(count, int):
        raise TypeError(f"{name} is no number")
    if not 0 <= count < 2**63:
        raise ValueError(f"{name} is out of range")
    return count


def _cells(row: Row) -> tuple[str, ...]:
    pod = f"{row['namespace']}/{row['pod']}" if row["pod"] else "-"
    claim = "(inline)" if row["is_inline"] else row["claim"] or "-"
    cache, pending = "-", "-"
    if row["cache_bytes"] is not None:
        cache = f"{row['cache_bytes'] / MIB:.1f} MiB"
        pending = f"{row['pending_files']} ({row['pending_bytes'] / MIB:.1f} MiB)"
    place = (row["volume"], row["source"], row["identity"])
    return (pod, claim, *place, cache, pending, row["state"])


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Format the rows in columns, below their headings."""
    lines = [_HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
