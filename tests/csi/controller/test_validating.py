"""What the controller tells: capabilities, access modes and sizes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import GIB, Driver, Mode, block_capability, mount_capability, refusal
from tests.support.csi.volumes import KEYS, Code, create
from tests.support.servers.buckets import Bucket


def test_the_controller_tells_what_it_can(driver: Driver) -> None:
    message = csi_pb2.ControllerGetCapabilitiesRequest()
    kinds = csi_pb2.ControllerServiceCapability.RPC.Type
    answer = driver.controller.ControllerGetCapabilities(message).capabilities
    assert {kinds.Name(one.rpc.type) for one in answer} == {
        "CREATE_DELETE_VOLUME",
        "EXPAND_VOLUME",
        "SINGLE_NODE_MULTI_WRITER",
    }


@pytest.mark.parametrize(
    "method", ["ControllerPublishVolume", "ListVolumes", "GetCapacity", "CreateSnapshot"]
)
def test_what_it_cannot_is_unimplemented(driver: Driver, method: str) -> None:
    message = getattr(csi_pb2, method + "Request")()
    assert refusal(getattr(driver.controller, method), message)[0] is Code.UNIMPLEMENTED


def _validate(volume_id: str, **fields: Any) -> csi_pb2.ValidateVolumeCapabilitiesRequest:
    fields.setdefault("volume_capabilities", [mount_capability()])
    return csi_pb2.ValidateVolumeCapabilitiesRequest(volume_id=volume_id, secrets=KEYS, **fields)


@pytest.mark.parametrize("mode", sorted(set(Mode.Mode.values()) - {Mode.UNKNOWN}))
def test_every_access_mode_is_confirmed(driver: Driver, shared: Bucket, mode: int) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    context = {**volume.volume_context, "storage.kubernetes.io/csiProvisionerIdentity": "x"}
    message = _validate(
        volume.volume_id,
        volume_context=context,
        volume_capabilities=[mount_capability(mode)],
    )
    confirmed = driver.controller.ValidateVolumeCapabilities(message).confirmed
    assert confirmed.volume_capabilities == message.volume_capabilities
    assert confirmed.volume_context == context


@pytest.mark.parametrize(
    "fields",
    [
        {"volume_capabilities": [block_capability()]},
        {"volume_context": {"bucket": "another"}},
        {"volume_capabilities": [mount_capability(Mode.SINGLE_NODE_WRITER, "cache-dir=/x")]},
    ],
    ids=["block", "context", "option"],
)
def test_what_does_not_hold_is_reported_and_no_error(
    driver: Driver, shared: Bucket, fields: dict[str, Any]
) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    message = _validate(volume.volume_id, **fields)
    answer = driver.controller.ValidateVolumeCapabilities(message)
    assert not answer.HasField("confirmed")
    assert answer.message


@pytest.mark.parametrize(
    ("volume_id", "capabilities", "code"),
    [
        ("", [mount_capability()], Code.INVALID_ARGUMENT),
        ("minio/{}/pvc-valid", [], Code.INVALID_ARGUMENT),
        ("minio/{}/pvc-unknown", [mount_capability()], Code.NOT_FOUND),
        ("minio/no-such-bucket/pvc-valid", [mount_capability()], Code.NOT_FOUND),
        ("whatever", [mount_capability()], Code.NOT_FOUND),
    ],
)
def test_only_a_volume_can_be_validated(
    driver: Driver, shared: Bucket, volume_id: str, capabilities: list[Any], code: grpc.StatusCode
) -> None:
    message = _validate(volume_id.format(shared.name), volume_capabilities=capabilities)
    assert refusal(driver.controller.ValidateVolumeCapabilities, message)[0] is code


def _expand(volume_id: str, **fields: Any) -> csi_pb2.ControllerExpandVolumeRequest:
    return csi_pb2.ControllerExpandVolumeRequest(volume_id=volume_id, secrets=KEYS, **fields)


def _sized(required: int, limit: int = 0) -> csi_pb2.CapacityRange:
    return csi_pb2.CapacityRange(required_bytes=required, limit_bytes=limit)


@pytest.mark.parametrize(("requested", "granted"), [(9 * GIB, 9 * GIB), (GIB, 5 * GIB)])
def test_a_volume_can_be_declared_larger(
    driver: Driver, shared: Bucket, requested: int, granted: int
) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    answer = driver.controller.ControllerExpandVolume(
        _expand(volume.volume_id, capacity_range=_sized(requested))
    )
    assert (answer.capacity_bytes, answer.node_expansion_required) == (granted, False)
    # A creation whose answer was lost may still be requested again.
    assert create(driver, shared.name, "pvc-valid") == volume


@pytest.mark.parametrize(
    ("volume_id", "fields", "code"),
    [
        ("", {"capacity_range": _sized(1)}, Code.INVALID_ARGUMENT),
        ("minio/{}/pvc-valid", {}, Code.INVALID_ARGUMENT),
        (
            "minio/{}/pvc-valid",
            {"capacity_range": _sized(1), "volume_capability": block_capability()},
            Code.INVALID_ARGUMENT,
        ),
        ("minio/{}/pvc-valid", {"capacity_range": _sized(2, 1)}, Code.OUT_OF_RANGE),
        ("minio/{}/pvc-unknown", {"capacity_range": _sized(1)}, Code.NOT_FOUND),
        ("whatever", {"capacity_range": _sized(1)}, Code.NOT_FOUND),
    ],
)
def test_a_bad_expansion_is_refused(
    driver: Driver, shared: Bucket, volume_id: str, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    create(driver, shared.name, "pvc-valid")
    message = _expand(volume_id.format(shared.name), **fields)
    assert refusal(driver.controller.ControllerExpandVolume, message)[0] is code
