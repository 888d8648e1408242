"""Checks of volume capabilities, the same for the controller's and the node's calls.

Every access mode but UNKNOWN is accepted. If several nodes write an object, S3 has the whole object
of one of the writers.
"""

from __future__ import annotations

from collections.abc import Iterable

from csi.errors import InvalidArgumentError
from csi.generated import csi_pb2

Mode = csi_pb2.VolumeCapability.AccessMode

READ_ONLY_MODES = frozenset((Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY))
_KNOWN_MODES = frozenset(Mode.Mode.values()) - {Mode.UNKNOWN}
_FS_TYPES = frozenset(("", "fusefs"))


def check_capability(capability: csi_pb2.VolumeCapability) -> None:
    """Raise InvalidArgumentError if volumes of this driver do not have this capability."""
    if capability.HasField("block"):
        raise InvalidArgumentError("volumeMode: a bucket is no block device; use Filesystem")
    if not capability.HasField("mount"):
        raise InvalidArgumentError("the volume capability has no access type")
    if capability.access_mode.mode not in _KNOWN_MODES:
        raise InvalidArgumentError("the volume capability has no access mode that is known")
    if capability.mount.fs_type not in _FS_TYPES:
        raise InvalidArgumentError(f"fsType: {capability.mount.fs_type!r} cannot be in a bucket")


def check_capabilities(capabilities: Iterable[csi_pb2.VolumeCapability]) -> None:
    """Call `check_capability` for each capability; InvalidArgumentError for an empty list."""
    given = list(capabilities)
    if not given:
        raise InvalidArgumentError("volume_capabilities: missing")
    for capability in given:
        check_capability(capability)


def is_read_only(capability: csi_pb2.VolumeCapability) -> bool:
    """True if the capability's access mode is for readers only."""
    return capability.access_mode.mode in READ_ONLY_MODES
