"""A volume's usage, from the status of its mount's daemon.

A bucket has no size, and counting its objects would cost a LIST for every thousand of
them, each minute and on each node. So `used` is the number of files that the mount knows
(programs have looked them up, and the kernel has not forgotten them) and the sum of their
sizes; `total` is larger than any volume. No request goes to the bucket or the mount. If
the daemon does not answer within a second, its last answer counts.
"""

from __future__ import annotations

import contextlib

from csi.generated import csi_pb2
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts, read_count

ENDLESS = 2**60


class Stats:
    """The usage of all volumes, with the last answer of each daemon."""

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts
        self._last: dict[str, tuple[int, int]] = {}

    def of(self, record: MountRecord) -> csi_pb2.NodeGetVolumeStatsResponse:
        """The usage of the volume of a record."""
        usage = self._mounts.ask(record, command="usage")
        if usage is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a hostile daemon's
                counts = read_count(usage, "bytes"), read_count(usage, "files")
                self._last[record.key] = counts
        used, nodes = self._last.get(record.key, (0, 0))
        units = csi_pb2.VolumeUsage
        return csi_pb2.NodeGetVolumeStatsResponse(
            usage=[
                csi_pb2.VolumeUsage(unit=unit, used=value, total=ENDLESS, available=ENDLESS)
                for unit, value in ((units.BYTES, used), (units.INODES, nodes))
            ]
        )

    def forget(self, key: str) -> None:
        """Drop the last answer of a mount that has ended."""
        self._last.pop(key, None)
