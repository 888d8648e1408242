"""What a volume uses, as its mount's daemon knows it.

A bucket has no size, and counting what is in it would cost a LIST for every
thousand objects, each minute and on each node. So `used` is what the node's
cache holds of it, and the number of files that the mount knows; `total` is more
than anybody will have. Nothing asks the bucket or touches the mount, and a
daemon that does not answer within a second is answered for with its last words.
"""

from __future__ import annotations

from csi.generated import csi_pb2
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts

ENDLESS = 2**60


class Stats:
    """Answers for all volumes, and remembers."""

    def __init__(self, mounts: Mounts) -> None:
        self._mounts = mounts
        self._last: dict[str, tuple[int, int]] = {}

    def of(self, record: MountRecord) -> csi_pb2.NodeGetVolumeStatsResponse:
        """The numbers of the volume behind a record."""
        status = self._mounts.ask(record)
        if status is not None:
            self._last[record.key] = (
                int(status["cache"]["used_bytes"]),
                int(status["metadata"]["nodes"]),
            )
        used, nodes = self._last.get(record.key, (0, 0))
        units = csi_pb2.VolumeUsage
        return csi_pb2.NodeGetVolumeStatsResponse(
            usage=[
                csi_pb2.VolumeUsage(unit=unit, used=value, total=ENDLESS, available=ENDLESS)
                for unit, value in ((units.BYTES, used), (units.INODES, nodes))
            ]
        )

    def forget(self, key: str) -> None:
        """A mount has ended."""
        self._last.pop(key, None)
