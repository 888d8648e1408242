"""The request of one NodePublishVolume call, parsed and checked.

Kubelet adds data of the pod to the volume's context, under its own keys; the volume's author has
written all other attributes.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from csi.errors import InvalidArgumentError
from csi.generated import csi_pb2
from csi.node.bind_mount import MountTable
from csi.volume.capabilities import Mode, check_capability, is_read_only
from csi.volume.location import LOCATION_KEYS, own, without_location
from fusefs.launch.registry import resolve as resolve_path

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
# Access modes under which a node may have a volume at only one path.
_ONE_TARGET = frozenset(
    (Mode.SINGLE_NODE_WRITER, Mode.SINGLE_NODE_READER_ONLY, Mode.SINGLE_NODE_SINGLE_WRITER)
)
# The volume id that kubelet gives an inline volume: a digest of pod uid and volume name.
_INLINE_ID = re.compile("csi-[0-9a-f]{64}")
_MAX_GROUP = 2**32 - 2
# Numbers with more digits are too large, and Python refuses to read the longest.
_GROUP = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """A request to publish one volume at one target path.

    The author's attributes are in `location`, if they say where the data are, or `attributes`.
    """

    volume_id: str
    target: Path
    is_read_only: bool
    is_reader_mode: bool
    has_one_target: bool
    is_inline: bool
    fs_group: int | None
    mode: str
    location: dict[str, str]
    attributes: dict[str, str]
    mount_flags: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The part of the request that must not change while the volume is published, as JSON.

        Kubelet publishes again every minute, and treats a refusal as the end of the pod's volume.
        So this lacks everything that an administrator may change while pods run: the mount
        options, and the access mode, as Kubernetes documents for ReadWriteOncePod.
        """
        return json.dumps(
            [self.volume_id, self.fs_group, self.location, self.attributes], sort_keys=True
        )

    def with_group(self, group: int | None) -> PublishRequest:
        """Return the request with `group` as its fsGroup; unchanged if either group is None."""
        return self if None in (self.fs_group, group) else replace(self, fs_group=group)


def read_request(
    request: csi_pb2.NodePublishVolumeRequest, kubelet_directory: Path, own_directory: Path
) -> PublishRequest:
    """Parse `request`; raise InvalidArgumentError if a field is missing or invalid."""
    if not request.volume_id:
        raise InvalidArgumentError("volume_id: missing")
    if not request.HasField("volume_capability"):
        raise InvalidArgumentError("volume_capability: missing")
    capability = request.volume_capability
    check_capability(capability)
    target = target_of(request.target_path, kubelet_directory, own_directory)
    context = dict(request.volume_context)
    attributes = own(context)
    # Kubelet's own key says so if the CSIDriver object has podInfoOnMount; the id always does.
    is_inline = context.get(EPHEMERAL) == "true" or bool(_INLINE_ID.fullmatch(request.volume_id))
    location = {name: value for name, value in attributes.items() if name in LOCATION_KEYS}
    return PublishRequest(
        request.volume_id,
        target,
        request.readonly,
        is_read_only(capability),
        capability.access_mode.mode in _ONE_TARGET,
        is_inline,
        _group(capability.mount.volume_mount_group),
        Mode.Mode.Name(capability.access_mode.mode),
        location,
        without_location(attributes),
        tuple(capability.mount.mount_flags),
    )


def target_of(text: str, kubelet_directory: Path, own_directory: Path) -> Path:
    """Return a target path with links resolved; raise InvalidArgumentError if it is not allowed."""
    if not text:
        raise InvalidArgumentError("target_path: missing")
    path = Path(text)
    if not path.is_absolute() or "\0" in text or os.path.normpath(text) != text.rstrip("/"):
        raise InvalidArgumentError(
            f"target_path: {text!r} is not an absolute path in its normal form"
        )
    if len(os.fsencode(text)) >= os.pathconf("/", "PC_PATH_MAX"):
        raise InvalidArgumentError("target_path: longer than a path can be")
    if MountTable().fusefs_above(path) is not None:
        raise InvalidArgumentError(f"target_path: {text!r} is inside of a volume")
    path = resolve_path(path)
    kubelet, own = resolve_path(kubelet_directory), resolve_path(own_directory)
    if kubelet not in path.parents:
        raise InvalidArgumentError(f"target_path: {text!r} is not below {kubelet_directory}")
    if path == own or own in path.parents or path in own.parents:
        raise InvalidArgumentError(f"target_path: {text!r} is the driver's own")
    return path


def _group(text: str) -> int | None:
    if not text:
        return None
    if not _GROUP.fullmatch(text) or int(text) > _MAX_GROUP:
        raise InvalidArgumentError(f"volume_mount_group: {text!r} is no number of a group")
    return int(text)
