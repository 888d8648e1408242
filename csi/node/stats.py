"""A volume's usage, from its mount's daemon. No request goes to the bucket or the mount.

A bucket has no size, and counting its objects would cost a LIST for every thousand of
them, each minute and on each node. So `used` is the number of files that the mount knows
(programs have looked them up, and the kernel has not forgotten them) and the sum of their
sizes; `total` is larger than any volume.
"""

from __future__ import annotations

from csi.errors import UnavailableError
from csi.generated import csi_pb2
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts, read_count

ENDLESS = 2**60


def usage_of(mounts: Mounts, record: MountRecord) -> csi_pb2.NodeGetVolumeStatsResponse:
    """The usage of the volume of a record.

    Raises:
        UnavailableError: the daemon does not answer, or answers what is no usage, as a hostile one.
    """
    try:
        answer = mounts.ask(record, command="usage") or {}
        used, files = read_count(answer, "bytes"), read_count(answer, "files")
    except (KeyError, TypeError, ValueError):
        raise UnavailableError(f"the daemon of {record.source} does not tell its usage") from None
    units = csi_pb2.VolumeUsage
    return csi_pb2.NodeGetVolumeStatsResponse(
        usage=[
            csi_pb2.VolumeUsage(unit=unit, used=value, total=ENDLESS, available=ENDLESS)
            for unit, value in ((units.BYTES, used), (units.INODES, files))
        ]
    )
