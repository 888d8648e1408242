"""Volumes that the controller creates."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import GIB, Driver, refusal
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
from tests.support.servers.s3_server import SECRET_KEY, S3Server
from tests.support.sharing import PATIENCE_S, mounted


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


def test_a_mount_of_the_whole_bucket_does_not_show_the_records(
    s3: S3Server, bucket: Bucket, tmp_path: Any
) -> None:
    bucket.put(record_key(), b"{}")
    bucket.put("data", b"")
    with mounted(s3, f"s3://{bucket.name}", tmp_path) as mount:
        names = {entry.name for entry in mount.path.iterdir()}
        assert "data" in names
        assert ".fusefs" not in names
        assert not (mount.path / record_key()).exists()


@pytest.mark.parametrize(
    ("rule", "is_warned"),
    [
        ({"Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}, True),
        ({"Filter": {"Prefix": ".fusefs/"}, "Expiration": {"Days": 30}}, True),
        ({"Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}}, False),
        ({"Filter": {"Prefix": ""}, "Expiration": {"Days": 30}, "Status": "Disabled"}, False),
    ],
)
def test_a_record_that_a_lifecycle_rule_will_remove_is_warned_of_and_missed(
    driver: Driver,
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
    rule: dict[str, Any],
    is_warned: bool,
) -> None:
    rules = [{"ID": "thirty-days", "Status": "Enabled", **rule}]
    name = bucket.name
    bucket.client.put_bucket_lifecycle_configuration(
        Bucket=name, LifecycleConfiguration={"Rules": rules}
    )
    try:
        volume = create(driver, name, onDelete="delete")
    finally:
        bucket.client.delete_bucket_lifecycle(Bucket=name)
    assert ("thirty-days" in caplog.text) == is_warned
    bucket.delete(record_key())
    expand = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=9),
        secrets=KEYS,
    )
    code, sentence = refusal(driver.controller.ControllerExpandVolume, expand)
    assert code is Code.NOT_FOUND
    delete(driver, volume.volume_id)
    for said in (sentence, caplog.text):
        assert f"no record s3://{name}/{record_key()}" in said
        assert "lifecycle rule" in said
    assert "data are retained" in caplog.text
