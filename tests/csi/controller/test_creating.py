"""Volumes that the controller creates, confirms and expands."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import GIB, Driver, Mode, block_capability, mount_capability, refusal
from tests.support.csi.volumes import (
    CLUSTER,
    KEYS,
    NAME,
    Code,
    Held,
    changed,
    create,
    delete,
    record_key,
    request,
)
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import SECRET_KEY
from tests.support.sharing import PATIENCE_S


def test_a_new_volume_is_a_record_in_its_bucket(driver: Driver, bucket: Bucket) -> None:
    volume = create(driver, bucket.name, prefix="/${pvc.namespace}/${pvc.name}/${pv.name}")
    prefix = f"team/data/{NAME}/"
    assert volume.volume_id == f"minio/{bucket.name}/{NAME}"
    assert volume.capacity_bytes == 5 * GIB
    # The claim is for lists and logs: no decision of the node's rests on it.
    claim = {"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "team"}
    context = {"store": "minio", "bucket": bucket.name, "prefix": prefix}
    assert volume.volume_context == context | claim
    assert set(keys(bucket)) == {record_key()}
    body = bucket.client.get_object(Bucket=bucket.name, Key=record_key())["Body"].read()
    record = json.loads(body)
    assert (record["prefix"], record["deletes"], record["cluster"]) == (prefix, False, CLUSTER)
    assert SECRET_KEY not in body.decode()


def test_a_class_without_a_prefix_gives_each_volume_its_own(driver: Driver, bucket: Bucket) -> None:
    assert create(driver, bucket.name).volume_context["prefix"] == f"{NAME}/"


def test_settings_of_the_class_go_to_the_mounts(driver: Driver, bucket: Bucket) -> None:
    context = create(driver, bucket.name, metadataTtl="5m", onDelete="retain").volume_context
    assert context["metadataTtl"] == "5m"
    assert "onDelete" not in context


def test_a_record_is_written_as_the_volumes_mounts_write(driver: Driver, bucket: Bucket) -> None:
    create(driver, bucket.name, storageClass="STANDARD_IA")
    [listed] = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert (listed["Key"], listed["StorageClass"]) == (record_key(), "STANDARD_IA")


def test_a_volume_that_is_there_is_created_again_without_a_change(
    driver: Driver, bucket: Bucket
) -> None:
    first = create(driver, bucket.name)
    bucket.put(f"{NAME}/data", b"kept")
    assert create(driver, bucket.name) == first
    assert set(keys(bucket)) == {record_key(), f"{NAME}/data"}


def _larger(message: csi_pb2.CreateVolumeRequest) -> None:
    message.capacity_range.required_bytes *= 2


def _smaller(message: csi_pb2.CreateVolumeRequest) -> None:
    message.capacity_range.required_bytes = 1
    message.capacity_range.limit_bytes = GIB


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (changed(parameters={"prefix": "elsewhere"}), "prefix"),
        (changed(parameters={"metadataTtl": "5m"}), "attributes"),
        (changed(parameters={"onDelete": "delete"}), "deletes"),
        (_larger, "size"),
        (_smaller, "size"),
    ],
)
def test_a_name_stands_for_one_volume(
    driver: Driver, shared: Bucket, change: Any, what: str
) -> None:
    create(driver, shared.name, "pvc-taken")
    message = request(shared.name, "pvc-taken")
    change(message)
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, what in sentence) == (Code.ALREADY_EXISTS, True)


def test_two_clusters_do_not_share_a_name(
    driver: Driver, other_cluster: Driver, bucket: Bucket
) -> None:
    create(driver, bucket.name)
    code, sentence = refusal(other_cluster.controller.CreateVolume, request(bucket.name))
    assert (code, "cluster" in sentence) == (Code.ALREADY_EXISTS, True)


BY_CLAIM = "claims/${pvc.namespace}/${pvc.name}"


def test_a_claims_folder_is_not_shared_with_an_equal_claim_of_another_cluster(
    driver: Driver, other_cluster: Driver, bucket: Bucket
) -> None:
    create(driver, bucket.name, prefix=BY_CLAIM)
    bucket.put(".fusefs/volumes/unreadable.json", b"{}")
    message = request(bucket.name, "pvc-other", prefix=BY_CLAIM)
    code, sentence = refusal(other_cluster.controller.CreateVolume, message)
    assert (code, record_key() in sentence) == (Code.FAILED_PRECONDITION, True)
    assert record_key("pvc-other") not in set(keys(bucket))
    # The claim that is made again under its name finds its files, and gets its own volume again.
    again = create(driver, bucket.name, "pvc-again", prefix=BY_CLAIM)
    assert again == create(driver, bucket.name, "pvc-again", prefix=BY_CLAIM)
    # Other claims, and folders that an administrator names, are no other cluster's.
    create(other_cluster, bucket.name, "pvc-third", prefix="all-claims")
    create(other_cluster, bucket.name, "pvc-fourth", prefix="claims/${pvc.name}")


def test_of_two_clusters_that_make_equal_claims_at_once_at_most_one_has_the_folder(
    driver: Driver, other_cluster: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    held = Held(faulty, "PUT")  # both have looked, and found no other's record
    with ThreadPoolExecutor(1) as pool:
        late = request(bucket.name, "pvc-late", store="faulty", prefix=BY_CLAIM)
        refused = pool.submit(refusal, other_cluster.controller.CreateVolume, late)
        assert held.begun.wait(PATIENCE_S)
        create(driver, bucket.name, prefix=BY_CLAIM)
        held.let_go()
        assert refused.result()[0] is Code.ABORTED
    assert set(keys(bucket)) == {record_key()}


@pytest.mark.parametrize("name", ["x" * 128, "über/größe", "..", "a b\tc"])
def test_any_name_makes_a_volume_that_can_be_deleted(
    driver: Driver, bucket: Bucket, name: str
) -> None:
    volume = create(driver, bucket.name, name, prefix="shared")
    assert len(volume.volume_id.encode()) <= 128
    assert create(driver, bucket.name, name, prefix="shared") == volume
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()


def test_a_record_that_somebody_has_removed_is_missed(
    driver: Driver, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    name = bucket.name
    volume = create(driver, name, onDelete="delete")
    bucket.delete(record_key())
    expand = _expand(volume.volume_id, capacity_range=_sized(9))
    code, sentence = refusal(driver.controller.ControllerExpandVolume, expand)
    assert code is Code.NOT_FOUND
    delete(driver, volume.volume_id)
    for said in (sentence, caplog.text):
        assert f"no record s3://{name}/{record_key()}" in said
        assert "lifecycle rule" in said
    assert "data are retained" in caplog.text


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
        volume.volume_id, volume_context=context, volume_capabilities=[mount_capability(mode)]
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
