"""The Controller service: creates and deletes volumes.

CreateVolume writes only the volume's record (see `volume_record`), because a prefix exists as soon
as a pod writes below it. If the prefix contains the claim's name, CreateVolume refuses a prefix of
another cluster's volume. `deletion` deletes the data. There is no quota: the size of a volume is
recorded and reported, but not enforced. All calls that send requests to the store run in
`background`, so that each call is answered in time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc

from csi.controller import volume_record
from csi.controller.background import BackgroundWork, Progress
from csi.controller.bucket_client import Bucket, NoSuchBucketError
from csi.controller.deletion import delete
from csi.controller.volume_record import VolumeRecord, VolumeRecordError, VolumeRecords
from csi.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    VolumeNotFoundError,
)
from csi.generated import csi_pb2, csi_pb2_grpc
from csi.identities.keys import customer_key_from, keys_from
from csi.in_flight import Claims
from csi.volume.capabilities import check_capabilities, check_capability
from csi.volume.location import (
    VolumeId,
    fill_in,
    has_segment,
    location_of,
    new_volume_id,
    own,
    without_location,
)
from csi.volume.options import read_options
from csi.volume.stores import Stores
from fusefs.settings.mount import MountSettings
from fusefs.store.errors import ExistsError
from fusefs.store.s3.settings import WriteOptions

DEFAULT_PREFIX = "${pv.name}"
ON_DELETE = "onDelete"
# The parameters that name the volume's claim, as the provisioner sets them.
_CLAIM = ("csi.storage.k8s.io/pvc/name", "csi.storage.k8s.io/pvc/namespace")
# The maximum size of a volume: the size that a mount reports to `df`.
MAX_BYTES = 1 << 60
# Time limit for calls that only read or write a record: below the sidecars' --timeout of 10 s.
ANSWER_S = 9.0

_RPC = csi_pb2.ControllerServiceCapability.RPC
_CAPABILITIES = (_RPC.CREATE_DELETE_VOLUME, _RPC.EXPAND_VOLUME, _RPC.SINGLE_NODE_MULTI_WRITER)

log = logging.getLogger(__name__)


class ControllerService(csi_pb2_grpc.ControllerServicer):
    """Serves the provisioner and the resizer. `cluster` is this cluster's id, or ""."""

    register = staticmethod(csi_pb2_grpc.add_ControllerServicer_to_server)

    def __init__(self, stores: Stores, cluster: str) -> None:
        self._stores = stores
        self._cluster = cluster
        self._claims = Claims()
        self._work = BackgroundWork()
        self._records = VolumeRecords()

    def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        return csi_pb2.ControllerGetCapabilitiesResponse(
            capabilities=[
                csi_pb2.ControllerServiceCapability(rpc=_RPC(type=kind)) for kind in _CAPABILITIES
            ]
        )

    def CreateVolume(
        self, request: csi_pb2.CreateVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.CreateVolumeResponse:
        return self._work.run(request, context, partial(self._create, request), ANSWER_S)

    def _create(
        self, request: csi_pb2.CreateVolumeRequest, progress: Progress
    ) -> csi_pb2.CreateVolumeResponse:
        record, volume = self._planned(request)
        settings = _settings(record.attributes, request.volume_capabilities)
        bucket = self._bucket(
            volume,
            request.secrets,
            progress,
            record.attributes.get("region"),
            # A bucket policy may demand an encryption or an ACL for every object, even a record.
            write_options=WriteOptions.of(settings),
        )
        template = request.parameters.get("prefix", DEFAULT_PREFIX)
        # Two clusters may have claims of the same name, but not volumes of the same name.
        is_claims = "${pvc." in template and "${pv.name}" not in template
        with self._claims.claim(str(volume)):
            if is_claims:
                self._refuse_shared(bucket, record)
            record, is_new = _create(bucket, volume, record, request)
            if is_claims and is_new:
                try:
                    self._refuse_shared(bucket, record)
                except FailedPreconditionError as error:  # another cluster just took the prefix
                    bucket.delete(volume_record.key_of(volume))
                    raise AbortedError(str(error)) from error
        return csi_pb2.CreateVolumeResponse(
            volume=csi_pb2.Volume(
                volume_id=str(volume),
                capacity_bytes=record.capacity_bytes,
                volume_context={
                    **record.attributes,
                    **{name: text for name, text in request.parameters.items() if name in _CLAIM},
                },
            )
        )

    def _refuse_shared(self, bucket: Bucket, record: VolumeRecord) -> None:
        """Raise FailedPreconditionError if a volume of another cluster has the record's prefix.

        Otherwise two claims of the same name would share files unknown to their owners.
        """
        if not self._cluster:
            return
        for key, other in self._records.now(bucket):
            if isinstance(other, VolumeRecordError) or other.prefix != record.prefix:
                continue
            if other.cluster not in ("", self._cluster):
                raise FailedPreconditionError(
                    f"prefix: {record.prefix!r} is that of a volume of the cluster"
                    f" {other.cluster!r}, which has a claim of the same name. Give the classes of"
                    f" each cluster a prefix of their own. If that volume no longer exists, remove"
                    f" its record s3://{bucket.name}/{key}; the files stay"
                )

    def _planned(self, request: csi_pb2.CreateVolumeRequest) -> tuple[VolumeRecord, VolumeId]:
        """Check a request; return record and id of the volume to create; CsiError if refused."""
        if not request.name:
            raise InvalidArgumentError("name: missing")
        check_capabilities(request.volume_capabilities)
        if request.HasField("volume_content_source"):
            raise InvalidArgumentError("volume_content_source: copies are not supported")
        if request.mutable_parameters:
            raise InvalidArgumentError(
                f"mutable_parameters: {min(request.mutable_parameters)}: volumes cannot be modified"
            )
        size = _size(request.capacity_range)
        parameters = own(request.parameters)
        on_delete = parameters.pop(ON_DELETE, "retain")
        if on_delete not in ("retain", "delete"):
            raise InvalidArgumentError(f"{ON_DELETE}: {on_delete!r} is neither retain nor delete")
        deletes = on_delete == "delete"
        template = parameters.get("prefix", DEFAULT_PREFIX)
        if deletes and not has_segment(template, "${pv.name}"):
            raise InvalidArgumentError(
                f"prefix: {template!r} has no segment ${{pv.name}}, without which {ON_DELETE} can"
                " only be retain"
            )
        if deletes and not self._cluster:
            raise InvalidArgumentError(
                f"{ON_DELETE}: the driver has no --cluster-id, without which it can only be retain"
            )
        variables = {
            "pvc.namespace": request.parameters.get("csi.storage.k8s.io/pvc/namespace", ""),
            "pvc.name": request.parameters.get("csi.storage.k8s.io/pvc/name", ""),
            "pv.name": request.name,
        }
        prefix = fill_in(template, variables)
        attributes = {**parameters, "prefix": prefix}
        location = location_of(attributes, self._stores)
        attributes["store"] = location.store.name
        now = datetime.now(UTC).isoformat()
        record = VolumeRecord(request.name, prefix, deletes, self._cluster, size, attributes, now)
        return record, new_volume_id(location.store.name, location.bucket, request.name)

    def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.DeleteVolumeResponse:
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        volume = VolumeId.parse(request.volume_id)
        if volume is None or volume.store not in self._stores.by_name:
            log.warning("volume %r: retained: it is in no configured store", request.volume_id)
            return csi_pb2.DeleteVolumeResponse()
        return self._work.run(request, context, partial(self._delete, request, volume))

    def _delete(
        self, request: csi_pb2.DeleteVolumeRequest, volume: VolumeId, progress: Progress
    ) -> csi_pb2.DeleteVolumeResponse:
        with self._claims.claim(str(volume)):
            try:
                bucket = self._bucket(volume, request.secrets, progress)
                delete(bucket, volume, self._cluster, self._records, progress)
            except NoSuchBucketError:
                log.info("volume %s: the bucket no longer exists", volume)
        return csi_pb2.DeleteVolumeResponse()

    def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        if not request.volume_capabilities:
            raise InvalidArgumentError("volume_capabilities: missing")
        record = self._existing(request, context)
        try:
            check_capabilities(request.volume_capabilities)
            attributes = own(request.volume_context)
            if attributes and attributes != record.attributes:
                raise InvalidArgumentError("volume_context: is not this volume's")
            _settings(record.attributes, request.volume_capabilities)
        except InvalidArgumentError as error:
            return csi_pb2.ValidateVolumeCapabilitiesResponse(message=str(error))
        return csi_pb2.ValidateVolumeCapabilitiesResponse(
            confirmed=csi_pb2.ValidateVolumeCapabilitiesResponse.Confirmed(
                volume_context=request.volume_context,
                volume_capabilities=request.volume_capabilities,
                parameters=request.parameters,
                mutable_parameters=request.mutable_parameters,
            )
        )

    def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        if not request.HasField("capacity_range"):
            raise InvalidArgumentError("capacity_range: missing")
        size = _size(request.capacity_range)
        if request.HasField("volume_capability"):
            check_capability(request.volume_capability)
        record = self._existing(request, context)
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=max(size, record.capacity_bytes), node_expansion_required=False
        )

    def _existing(self, request: Any, context: grpc.ServicerContext) -> VolumeRecord:
        """Return the record of a request's volume; raise VolumeNotFoundError if there is none."""
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        return self._work.run(request, context, partial(self._read, request), ANSWER_S)

    def _read(self, request: Any, progress: Progress) -> VolumeRecord:
        volume = VolumeId.parse(request.volume_id)
        if volume is None or volume.store not in self._stores.by_name:
            raise VolumeNotFoundError(f"there is no volume {request.volume_id!r}")
        try:
            record = volume_record.read(self._bucket(volume, request.secrets, progress), volume)
        except VolumeRecordError as error:
            raise FailedPreconditionError(f"volume {volume}: its record {error}") from error
        if record is None:
            raise VolumeNotFoundError(f"volume {volume}: {volume_record.lost(volume)}")
        return record

    def _bucket(
        self,
        volume: VolumeId,
        secrets: Mapping[str, str],
        progress: Progress,
        region: str | None = None,
        **options: Any,
    ) -> Bucket:
        store = self._stores.by_name[volume.store]
        secret = keys_from(secrets), customer_key_from(secrets)
        return Bucket(store, volume.bucket, region, *secret, progress=progress, **options)


def _create(
    bucket: Bucket, volume: VolumeId, record: VolumeRecord, request: csi_pb2.CreateVolumeRequest
) -> tuple[VolumeRecord, bool]:
    """Write the record of a new volume; return it and True, or an equal existing record and False.

    Raises AlreadyExistsError if the existing record differs, AbortedError if it is being deleted.
    """
    try:
        bucket.put_new(volume_record.key_of(volume), record.to_json())
        return record, True
    except NoSuchBucketError as error:
        raise InvalidArgumentError(f"bucket: {error}") from error
    except ExistsError:
        pass
    try:
        found = volume_record.read(bucket, volume)
    except VolumeRecordError as error:
        raise AlreadyExistsError(f"volume {volume}: its existing record {error}") from error
    if found is None:
        raise AbortedError(f"volume {volume} is being deleted")
    differences = [
        name
        for name in ("name", "prefix", "deletes", "cluster", "attributes")
        if getattr(found, name) != getattr(record, name)
    ]
    size, wanted = found.capacity_bytes, request.capacity_range
    if size < wanted.required_bytes or 0 < wanted.limit_bytes < size:
        differences.append("size")
    if differences:
        raise AlreadyExistsError(f"volume {volume} exists with another {', '.join(differences)}")
    return found, False


def _settings(
    attributes: Mapping[str, str], capabilities: Iterable[csi_pb2.VolumeCapability]
) -> MountSettings:
    """Return the mount settings that a volume's attributes and mount options ask for.

    Raises InvalidArgumentError for settings that every node would refuse, before a pod waits.
    """
    flags = [flag for capability in capabilities for flag in capability.mount.mount_flags]
    return read_options(without_location(attributes), flags, is_inline=False).wanted


def _size(capacity: csi_pb2.CapacityRange) -> int:
    """Return the requested size of a volume in bytes; 0 if none was requested."""
    required, limit = capacity.required_bytes, capacity.limit_bytes
    if required < 0 or limit < 0:
        raise InvalidArgumentError("capacity_range: a size is negative")
    if limit and required > limit:
        raise OutOfRangeError(f"capacity_range: {required} bytes at least and {limit} at most")
    if required > MAX_BYTES:
        raise OutOfRangeError(f"capacity_range: {required} bytes are over {MAX_BYTES}")
    return required
