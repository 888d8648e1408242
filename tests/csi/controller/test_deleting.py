"""What a volume's deletion takes away, and what it retains."""

from __future__ import annotations

import json

import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import Driver, refusal
from tests.support.csi.volumes import NAME, Code, create, delete, record_key
from tests.support.servers.buckets import Bucket, keys
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


def test_deleting_needs_an_id(driver: Driver) -> None:
    message = csi_pb2.DeleteVolumeRequest()
    assert refusal(driver.controller.DeleteVolume, message)[0] is Code.INVALID_ARGUMENT


def test_deleting_without_keys_is_tried_as_the_driver(
    driver: Driver, bucket: Bucket, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = create(driver, bucket.name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    driver.controller.DeleteVolume(message, timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()
