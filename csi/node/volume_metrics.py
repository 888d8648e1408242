"""The mounts whose metrics the node plugin serves, by their volumes, with the pods that use them.

A volume that has several mounts on the node (one for each identity, or for each
group) is named with the beginning of the mount's key as well, so that no two
mounts have the same labels.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from csi.node.bind_mount import MountTable
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
from csi.node.pod_records import PodRecords
from fusefs.exporter.queries import Target as MetricsTarget
from fusefs.exporter.queries import target_at as metrics_target

KEY_LENGTH = 8


def targets(mounts: Mounts, pods: PodRecords) -> list[MetricsTarget]:
    """The processes that have metrics at this moment. No mount is touched."""
    records = mounts.records.all()
    counts = Counter(record.volume_id for record in records)
    table, known = MountTable(), pods.all()

    def target(record: MountRecord) -> MetricsTarget:
        volume = record.volume_id
        if counts[volume] > 1:
            volume = f"{volume}/{record.key[-KEY_LENGTH:]}"
        paths = mounts.references(record, table)
        using = {
            (pod.namespace, pod.name) for path in paths if (pod := known.get(path)) is not None
        }
        return metrics_target(Path(record.root), volume, sorted(using))

    return [target(record) for record in records]
