"""Checks of volume capabilities, the same for the controller's and the node's calls.

Every access mode but the unknown one is accepted. Several writers on several nodes get what S3
gives them: each object is the whole object of one writer.
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
    """Raises InvalidArgumentError if no volume of this driver can be used in this way."""
    if capability.HasField("block"):
        raise InvalidArgumentError("volumeMode: a bucket is no block device; use Filesystem")
    if not capability.HasField("mount"):
        raise InvalidArgumentError("the volume capability has no access type")
    if capability.access_mode.mode not in _KNOWN_MODES:
        raise InvalidArgumentError("the volume capability has no access mode that is known")
    if capability.mount.fs_type not in _FS_TYPES:
        raise InvalidArgumentError(f"fsType: {capability.mount.fs_type!r} cannot be in a bucket")


def check_capabilities(capabilities: Iterable[csi_pb2.VolumeCapability]) -> None:
    """Check every capability with `check_capability`; InvalidArgumentError if there is none."""
    given = list(capabilities)
    if not given:
        raise InvalidArgumentError("volume_capabilities: missing")
    for capability in given:
        check_capability(capability)


def is_read_only(capability: csi_pb2.VolumeCapability) -> bool:
    """True if the capability's access mode is for readers only."""
    return capability.access_mode.mode in READ_ONLY_MODES
