"""Deletions of volumes: their data, what is retained, and calls that fail or meet another one."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from csi.controller.service import ControllerService
from csi.generated import csi_pb2
from csi.volume.stores import Stores
from tests.support.csi.calls import Driver, refusal, serving
from tests.support.csi.volumes import (
    CLUSTER,
    KEYS,
    NAME,
    Code,
    Held,
    create,
    delete,
    record_key,
    request,
)
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S


def test_data_are_retained_unless_the_class_says_otherwise(
    driver: Driver, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    volume = create(driver, bucket.name)
    bucket.put(f"{NAME}/data", b"precious")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {f"{NAME}/data"}
    delete(driver, volume.volume_id)
    messages = [record.getMessage() for record in caplog.records if "retained" in record.message]
    first, again = messages
    assert f"s3://{bucket.name}/{NAME}/ is retained" in first
    assert "was deleted before" in again


def test_a_deleted_volume_takes_all_below_its_prefix_and_nothing_else(
    driver: Driver, bucket: Bucket
) -> None:
    volume = create(driver, bucket.name, prefix="team/${pv.name}", onDelete="delete")
    mine = [f"team/{NAME}/{key}" for key in ("a", "deep/er/b", "ü %&+", "c\x01", "empty/")]
    others = {f"team/{NAME}x/a", f"team/{NAME}.bak", "team/a", f"x/team/{NAME}/a"}
    for key in (*mine, *others):
        bucket.put(key, b"")
    delete(driver, volume.volume_id)
    assert {key for key in set(keys(bucket)) if not key.endswith("/")} == others
    delete(driver, volume.volume_id)


def test_unfinished_uploads_go_with_the_volume(driver: Driver, bucket: Bucket) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    for key in (f"{NAME}/large", "another/large"):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    delete(driver, volume.volume_id)
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert [upload["Key"] for upload in left] == ["another/large"]


def test_data_of_another_clusters_volume_are_retained_with_its_record(
    driver: Driver, other_cluster: Driver, bucket: Bucket
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    bucket.put(f"{NAME}/data", b"precious")
    delete(other_cluster, volume.volume_id)
    assert set(keys(bucket)) == {f"{NAME}/data", record_key()}


@pytest.mark.parametrize("prefix", [NAME, f"{NAME}/within", "", f"{NAME}/within/${{pv.name}}"])
def test_data_that_another_volume_may_have_are_retained(
    driver: Driver, bucket: Bucket, prefix: str
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    create(driver, bucket.name, "pvc-other", prefix=prefix)
    bucket.put(f"{NAME}/data", b"precious")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {f"{NAME}/data", record_key("pvc-other")}


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\xff", b'{"format": 2}', b"[" * 5000],
    ids=["empty", "blank", "bytes", "newer", "deep"],
)
@pytest.mark.parametrize("whose", [NAME, "pvc-other"])
def test_a_record_that_cannot_be_read_retains_the_data(
    driver: Driver, bucket: Bucket, body: bytes, whose: str
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    bucket.put(f"{NAME}/data", b"precious")
    bucket.put(record_key(whose), body)
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {f"{NAME}/data", record_key(whose)}


def test_an_object_that_is_too_long_for_a_record_is_not_read_to_its_end(
    driver: Driver, bucket: Bucket
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    record = bucket.client.get_object(Bucket=bucket.name, Key=record_key())["Body"].read()
    other = record.replace(NAME.encode(), b"pvc-other")
    bucket.put(record_key("pvc-other"), b" " * (2 << 20) + other)
    bucket.put(f"{NAME}/data", b"precious")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {f"{NAME}/data", record_key("pvc-other")}


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "others/"},
        {"prefix": ""},
        {"name": "others", "prefix": "others/"},
        {"prefix": f"{NAME}/../others/"},
        {"deletes": "yes"},
    ],
    ids=str,
)
def test_a_record_that_somebody_changed_cannot_delete_anything_else(
    driver: Driver, bucket: Bucket, change: dict[str, str]
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    bucket.put("others/data", b"precious")
    record = bucket.client.get_object(Bucket=bucket.name, Key=record_key())["Body"].read()
    bucket.put(record_key(), json.dumps({**json.loads(record), **change}).encode())
    delete(driver, volume.volume_id)
    assert "others/data" in set(keys(bucket))


@pytest.mark.parametrize(
    "volume_id",
    ["x", "a/b", "minio/b/c/d", "unknown/bucket/x", "minio/no-such-bucket/x", "/" * 200],
)
def test_what_is_no_volume_is_deleted_already(driver: Driver, volume_id: str) -> None:
    delete(driver, volume_id)


def test_deleting_without_keys_is_tried_as_the_driver(
    driver: Driver, bucket: Bucket, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = create(driver, bucket.name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    driver.controller.DeleteVolume(message, timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()


def test_a_long_deletion_tells_how_far_it_is_and_goes_on(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "DELETE MANY")
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    with pytest.raises(grpc.RpcError) as caught:
        driver.controller.DeleteVolume(message, timeout=8)
    assert caught.value.code() is Code.ABORTED
    assert "0 objects deleted so far" in caught.value.details()
    code, _ = refusal(driver.controller.CreateVolume, request(bucket.name, store="faulty"))
    assert code is Code.ABORTED
    held.let_go()
    driver.controller.DeleteVolume(message, timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()
    assert len(faulty.requests("DELETE MANY")) == 1


def test_a_volume_made_within_another_keeps_what_is_left_of_it(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.controller.bucket_client.PAGE", 3)
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    for number in range(7):
        bucket.put(f"{NAME}/{number}", b"precious")
    held = Held(faulty, "DELETE MANY")
    with ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        create(driver, bucket.name, "pvc-late", prefix=f"{NAME}/late")
        held.let_go()
        deletion.result()
    left = {f"{NAME}/{number}" for number in range(3, 7)}
    assert set(keys(bucket)) == {*left, record_key("pvc-late")}


def test_many_objects_are_deleted_page_by_page(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.controller.bucket_client.PAGE", 3)
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    for number in range(7):
        bucket.put(f"{NAME}/{number}", b"")
        create(driver, bucket.name, f"pvc-{number}")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {record_key(f"pvc-{number}") for number in range(7)}
    assert len(faulty.requests("DELETE MANY")) == 3
    # Each record is fetched once, however often they are listed; its own before that.
    assert len(faulty.requests("GET")) == 1 + 8


LOST = {"times": 1, "lose_answer": True}


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        *((one, LOST) for one in ("GET", "LIST", "DELETE MANY", "UPLOADS", "DELETE")),
        ("UPLOADS", {"code": "AccessDenied"}),
    ],
)
def test_a_deletion_goes_on_where_an_answer_was_lost_or_uploads_cannot_be_listed(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, operation: str, fault: dict[str, Any]
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    faulty.add(operation, **fault)
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()


def test_a_driver_that_was_left_behind_deletes_nothing_of_a_later_volume(
    driver: Driver, stores: Stores, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "LIST")
    with serving([ControllerService(stores, CLUSTER)]) as successor, ThreadPoolExecutor(1) as pool:
        left_behind = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        delete(successor, volume.volume_id)
        create(successor, bucket.name, store="faulty", onDelete="delete")
        bucket.put(f"{NAME}/data", b"precious")
        held.let_go()
        error: Any = left_behind.exception()
    assert error.code() is Code.ABORTED
    assert set(keys(bucket)) == {f"{NAME}/data", record_key()}


def test_a_deletion_that_failed_is_finished_by_the_next_call(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    rule = faulty.add("DELETE MANY", code="InternalError")
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    assert refusal(driver.controller.DeleteVolume, message)[0] is Code.UNAVAILABLE
    assert set(keys(bucket)) == {f"{NAME}/data", record_key()}
    faulty.remove(rule)
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()
