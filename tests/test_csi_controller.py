"""The CSI driver's controller, as the provisioner and the resizer talk to it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from csi.bucket import make_client
from csi.controller import ControllerService
from csi.generated import csi_pb2
from csi.stores import Store, Stores
from fusefs.kinds import Addressing
from tests.conftest import Bucket
from tests.support.csi import (
    GIB,
    Driver,
    Mode,
    block_capability,
    mount_capability,
    refusal,
    serving,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from tests.support.sharing import PATIENCE_S, mounted

Code = grpc.StatusCode
KEYS = {"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET_KEY}
CLUSTER = "this-cluster"
NAME = "pvc-0b5c6a3e-7a3c-4b0e-9a55-9b1f1d0f4a11"


@pytest.fixture(scope="module")
def stores(s3: S3Server, faulty: FaultyS3) -> Stores:
    """The server, directly and through one that fails on demand, and one where nobody is."""
    urls = {
        "minio": s3.endpoint_url, "faulty": faulty.endpoint_url, "gone": "http://127.0.0.1:9",
    }  # fmt: skip
    made = [Store(name, url, REGION, Addressing.PATH) for name, url in urls.items()]
    return Stores({"aws": Store("aws"), **{store.name: store for store in made}})


@pytest.fixture(scope="module")
def driver(stores: Stores) -> Iterator[Driver]:
    with serving([ControllerService(stores, CLUSTER)]) as driver:
        yield driver


@pytest.fixture(scope="module")
def other_cluster(stores: Stores) -> Iterator[Driver]:
    with serving([ControllerService(stores, "another-cluster")]) as driver:
        yield driver


@pytest.fixture
def bucket(shared: Bucket) -> Bucket:
    """The module's bucket without anything in it: a new one takes the server longer."""
    for key in keys_in(shared):
        shared.delete(key)
    return shared


@pytest.fixture(autouse=True)
def _no_faults(faulty: FaultyS3) -> Iterator[None]:
    yield
    faulty.clear()


def request(bucket: str, name: str = NAME, **parameters: str) -> csi_pb2.CreateVolumeRequest:
    """What the provisioner asks for a claim `data` in the namespace `team`."""
    return csi_pb2.CreateVolumeRequest(
        name=name,
        capacity_range=csi_pb2.CapacityRange(required_bytes=5 * GIB),
        volume_capabilities=[mount_capability()],
        parameters={
            "store": "minio", "bucket": bucket,
            "csi.storage.k8s.io/pvc/namespace": "team", "csi.storage.k8s.io/pvc/name": "data",
            "csi.storage.k8s.io/pv/name": name, **parameters,
        },
        secrets=KEYS,
    )  # fmt: skip


def create(driver: Driver, bucket: str, name: str = NAME, **parameters: str) -> csi_pb2.Volume:
    asked = request(bucket, name, **parameters)
    return driver.controller.CreateVolume(asked, timeout=PATIENCE_S).volume


def delete(driver: Driver, volume_id: str, timeout: float = PATIENCE_S) -> None:
    asked = csi_pb2.DeleteVolumeRequest(volume_id=volume_id, secrets=KEYS)
    driver.controller.DeleteVolume(asked, timeout=timeout)


def keys_in(bucket: Bucket) -> set[str]:
    answer = bucket.client.list_objects_v2(Bucket=bucket.name)
    return {item["Key"] for item in answer.get("Contents", [])}


def record_key(name: str = NAME) -> str:
    return f".fusefs/volumes/{name}.json"


# Creating


def test_a_new_volume_is_a_record_in_its_bucket(driver: Driver, bucket: Bucket) -> None:
    volume = create(driver, bucket.name, prefix="/${pvc.namespace}/${pvc.name}/${pv.name}")
    prefix = f"team/data/{NAME}/"
    assert volume.volume_id == f"minio/{bucket.name}/{NAME}"
    assert volume.capacity_bytes == 5 * GIB
    assert volume.volume_context == {"store": "minio", "bucket": bucket.name, "prefix": prefix}
    assert keys_in(bucket) == {record_key()}
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


def test_a_volume_that_is_there_is_created_again_without_a_change(
    driver: Driver, bucket: Bucket
) -> None:
    first = create(driver, bucket.name)
    bucket.put(f"{NAME}/data", b"kept")
    assert create(driver, bucket.name) == first
    assert keys_in(bucket) == {record_key(), f"{NAME}/data"}


def _with(**fields: Any) -> Any:
    def change(asked: csi_pb2.CreateVolumeRequest) -> None:
        asked.MergeFrom(csi_pb2.CreateVolumeRequest(**fields))

    return change


def _larger(asked: csi_pb2.CreateVolumeRequest) -> None:
    asked.capacity_range.required_bytes *= 2


def _smaller(asked: csi_pb2.CreateVolumeRequest) -> None:
    asked.capacity_range.required_bytes = 1
    asked.capacity_range.limit_bytes = GIB


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_with(parameters={"prefix": "elsewhere"}), "prefix"),
        (_with(parameters={"metadataTtl": "5m"}), "attributes"),
        (_with(parameters={"onDelete": "delete"}), "deletes"),
        (_larger, "size"),
        (_smaller, "size"),
    ],
)
def test_a_name_stands_for_one_volume(
    driver: Driver, shared: Bucket, change: Any, what: str
) -> None:
    create(driver, shared.name, "pvc-taken")
    asked = request(shared.name, "pvc-taken")
    change(asked)
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, what in sentence) == (Code.ALREADY_EXISTS, True)


def test_two_clusters_do_not_share_a_name(
    driver: Driver, other_cluster: Driver, bucket: Bucket
) -> None:
    create(driver, bucket.name)
    code, sentence = refusal(other_cluster.controller.CreateVolume, request(bucket.name))
    assert (code, "cluster" in sentence) == (Code.ALREADY_EXISTS, True)


@pytest.mark.parametrize("name", ["x" * 128, "über/größe", "..", "a b\tc"])
def test_any_name_makes_a_volume_that_can_be_deleted(
    driver: Driver, bucket: Bucket, name: str
) -> None:
    volume = create(driver, bucket.name, name, prefix="shared")
    assert len(volume.volume_id.encode()) <= 128
    assert create(driver, bucket.name, name, prefix="shared") == volume
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == set()


# What is refused

BAD_REQUESTS = {
    "no name": (lambda asked: asked.ClearField("name"), "name"),
    "no capability": (lambda asked: asked.ClearField("volume_capabilities"), "capabilities"),
    "a block volume": (_with(volume_capabilities=[block_capability()]), "volumeMode"),
    "no access mode": (_with(volume_capabilities=[mount_capability(Mode.UNKNOWN)]), "access mode"),
    "no access type": (_with(volume_capabilities=[csi_pb2.VolumeCapability()]), "access type"),
    "a type of disks": (_with(volume_capabilities=[mount_capability(fs_type="xfs")]), "fsType"),
    "a mount option": (
        _with(volume_capabilities=[mount_capability(Mode.SINGLE_NODE_WRITER, "cache-dir=/etc")]),
        "cache-dir",
    ),
    "a source": (
        _with(
            volume_content_source=csi_pb2.VolumeContentSource(
                volume=csi_pb2.VolumeContentSource.VolumeSource(volume_id="x")
            )
        ),
        "volume_content_source",
    ),
    "mutable parameters": (_with(mutable_parameters={"speed": "9"}), "speed"),
    "a field of the Secret": (_with(secrets={"endpoint": "http://x"}), "endpoint"),
    "half a Secret": (lambda asked: asked.secrets.pop("secretAccessKey"), "secret_access_key"),
    "a negative size": (
        lambda asked: setattr(asked.capacity_range, "required_bytes", -1),
        "negative",
    ),
}


@pytest.mark.parametrize(("change", "what"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_nothing_made(
    driver: Driver, shared: Bucket, change: Any, what: str
) -> None:
    asked = request(shared.name, "pvc-refused")
    change(asked)
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, what in sentence) == (Code.INVALID_ARGUMENT, True), sentence
    assert record_key("pvc-refused") not in keys_in(shared)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket", ""), ("bucket", "SET-YOUR-BUCKET"), ("bucket", "192.168.1.1"),
        ("bucket", "arn:aws:s3:::b"), ("bucket", "a/../b"), ("bucket", "evil.example#"),
        ("store", "unknown"), ("store", ""),
        ("endpoint", "http://169.254.169.254"), ("endpoint", "https://evil.example"),
        ("region", "evil.example/"), ("prefix", "a/../b"), ("prefix", "./a"), ("prefix", "a//b"),
        ("prefix", "a//"), ("prefix", "//"), ("prefix", "a/\n/b"), ("prefix", "a\x7f"),
        ("prefix", "x" * 901), ("prefix", ".fusefs/volumes"), ("prefix", "a/.fusefs"),
        ("prefix", "${pvc.annotations['x']}"), ("prefix", "${pv.name"), ("onDelete", "Delete"),
        ("onDelete", ""), ("unknown", "1"), ("cacheDir", "/etc"), ("durability", "local"),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_refused_by_name(
    driver: Driver, shared: Bucket, name: str, value: str
) -> None:
    asked = request(shared.name, "pvc-refused")
    asked.parameters[name] = value
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, name in sentence) == (Code.INVALID_ARGUMENT, True), sentence
    assert record_key("pvc-refused") not in keys_in(shared)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("csi.storage.k8s.io/pvc/name", "a/b", "pvc.name"),
        ("csi.storage.k8s.io/pvc/namespace", "..", "prefix"),
        ("csi.storage.k8s.io/pvc/name", "", "--extra-create-metadata"),
    ],
)
def test_a_value_that_would_lead_elsewhere_is_not_filled_in(
    driver: Driver, shared: Bucket, name: str, value: str, what: str
) -> None:
    asked = request(shared.name, "pvc-refused", prefix="${pvc.namespace}/${pvc.name}")
    asked.parameters[name] = value
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, what in sentence) == (Code.INVALID_ARGUMENT, True), sentence


@pytest.mark.parametrize("prefix", ["data", "x${pv.name}", "${pvc.name}/${pv.name}-data", ""])
def test_deleting_needs_a_prefix_of_the_volumes_own(
    driver: Driver, shared: Bucket, prefix: str
) -> None:
    asked = request(shared.name, "pvc-refused", prefix=prefix, onDelete="delete")
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, "${pv.name}" in sentence) == (Code.INVALID_ARGUMENT, True)


def test_deleting_needs_a_cluster_id(stores: Stores, shared: Bucket) -> None:
    with serving([ControllerService(stores, "")]) as nameless:
        asked = request(shared.name, "pvc-refused", onDelete="delete")
        code, sentence = refusal(nameless.controller.CreateVolume, asked)
        assert (code, "--cluster-id" in sentence) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(("required", "limit"), [(2, 1), (1 << 61, 0)])
def test_an_impossible_size_is_out_of_range(
    driver: Driver, shared: Bucket, required: int, limit: int
) -> None:
    asked = request(shared.name, "pvc-refused")
    asked.capacity_range.required_bytes = required
    asked.capacity_range.limit_bytes = limit
    assert refusal(driver.controller.CreateVolume, asked)[0] is Code.OUT_OF_RANGE


# What S3 refuses


def test_rejected_keys_are_unauthenticated(driver: Driver, shared: Bucket) -> None:
    asked = request(shared.name, "pvc-refused")
    asked.secrets["accessKeyId"] = "nobody"
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert code is Code.UNAUTHENTICATED
    assert f"s3://{shared.name}/" in sentence
    assert SECRET_KEY not in sentence


def test_without_any_keys_it_says_what_is_missing(
    driver: Driver, shared: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    make_client.cache_clear()
    asked = request(shared.name, "pvc-refused")
    asked.ClearField("secrets")
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, "provisioner Secret" in sentence) == (Code.UNAUTHENTICATED, True)
    make_client.cache_clear()


def test_a_denied_request_is_told_with_its_id(
    driver: Driver, shared: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("PUT", code="AccessDenied")
    asked = request(shared.name, "pvc-refused", store="faulty")
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, "request FAULTY00" in sentence) == (Code.PERMISSION_DENIED, True)


def test_a_bucket_that_is_not_there_is_named(
    driver: Driver, shared: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("PUT", code="NoSuchBucket")
    asked = request(shared.name, "pvc-refused", store="faulty")
    code, sentence = refusal(driver.controller.CreateVolume, asked)
    assert (code, f"s3://{shared.name}/" in sentence) == (Code.INVALID_ARGUMENT, True)


def test_a_store_that_is_away_is_a_reason_to_try_again(driver: Driver, shared: Bucket) -> None:
    asked = request(shared.name, "pvc-refused", store="gone")
    assert refusal(driver.controller.CreateVolume, asked)[0] is Code.UNAVAILABLE


def test_a_volume_whose_answer_was_lost_is_created_by_the_next_call(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("PUT", times=1, lose_answer=True)
    asked = request(bucket.name, store="faulty")
    driver.controller.CreateVolume(asked, timeout=PATIENCE_S)
    faulty.clear()
    again = driver.controller.CreateVolume(asked, timeout=PATIENCE_S)
    assert again.volume.volume_id == f"faulty/{bucket.name}/{NAME}"


# Deleting


def test_data_are_retained_unless_the_class_says_otherwise(driver: Driver, bucket: Bucket) -> None:
    volume = create(driver, bucket.name)
    bucket.put(f"{NAME}/data", b"precious")
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == {f"{NAME}/data"}
    delete(driver, volume.volume_id)


def test_a_deleted_volume_takes_all_below_its_prefix_and_nothing_else(
    driver: Driver, bucket: Bucket
) -> None:
    volume = create(driver, bucket.name, prefix="team/${pv.name}", onDelete="delete")
    mine = [f"team/{NAME}/{key}" for key in ("a", "deep/er/b", "ü %&+", "c\x01", "empty/")]
    others = {f"team/{NAME}x/a", f"team/{NAME}.bak", "team/a", f"x/team/{NAME}/a"}
    for key in (*mine, *others):
        bucket.put(key, b"")
    delete(driver, volume.volume_id)
    assert {key for key in keys_in(bucket) if not key.endswith("/")} == others
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
    assert keys_in(bucket) == {f"{NAME}/data", record_key()}


@pytest.mark.parametrize("prefix", [NAME, f"{NAME}/within", "", f"{NAME}/within/${{pv.name}}"])
def test_data_that_another_volume_may_have_are_retained(
    driver: Driver, bucket: Bucket, prefix: str
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    create(driver, bucket.name, "pvc-other", prefix=prefix)
    bucket.put(f"{NAME}/data", b"precious")
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == {f"{NAME}/data", record_key("pvc-other")}


def test_a_neighbour_with_a_similar_prefix_is_no_reason_to_retain(
    driver: Driver, bucket: Bucket
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    create(driver, bucket.name, NAME + "0", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == {record_key(NAME + "0")}


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
    assert keys_in(bucket) == {f"{NAME}/data", record_key(whose)}


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "others/"}, {"prefix": ""}, {"name": "others", "prefix": "others/"},
        {"prefix": f"{NAME}/../others/"}, {"deletes": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_somebody_changed_cannot_delete_anything_else(
    driver: Driver, bucket: Bucket, change: dict[str, str]
) -> None:
    volume = create(driver, bucket.name, onDelete="delete")
    bucket.put("others/data", b"precious")
    record = bucket.client.get_object(Bucket=bucket.name, Key=record_key())["Body"].read()
    bucket.put(record_key(), json.dumps({**json.loads(record), **change}).encode())
    delete(driver, volume.volume_id)
    assert "others/data" in keys_in(bucket)


@pytest.mark.parametrize(
    "volume_id",
    ["x", "a/b", "minio/b/c/d", "unknown/bucket/x", "minio/no-such-bucket/x", "/" * 200],
)
def test_what_is_no_volume_is_deleted_already(driver: Driver, volume_id: str) -> None:
    delete(driver, volume_id)


def test_deleting_needs_an_id(driver: Driver) -> None:
    asked = csi_pb2.DeleteVolumeRequest()
    assert refusal(driver.controller.DeleteVolume, asked)[0] is Code.INVALID_ARGUMENT


def test_deleting_without_keys_is_tried_as_the_driver(
    driver: Driver, bucket: Bucket, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = create(driver, bucket.name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    asked = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    driver.controller.DeleteVolume(asked, timeout=PATIENCE_S)
    assert keys_in(bucket) == set()


class Held:
    """A request of one kind that waits until the test lets it go on."""

    def __init__(self, faulty: FaultyS3, operation: str, key: str = "*") -> None:
        self.begun = threading.Event()
        self._going_on = threading.Event()
        faulty.add(operation, key, times=1, before=self._hold)

    def _hold(self) -> None:
        self.begun.set()
        self._going_on.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._going_on.set()


def test_a_long_deletion_tells_how_far_it_is_and_goes_on(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "DELETE MANY")
    asked = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    with pytest.raises(grpc.RpcError) as caught:
        driver.controller.DeleteVolume(asked, timeout=4)
    assert caught.value.code() is Code.ABORTED
    assert "0 objects deleted so far" in caught.value.details()
    code, _ = refusal(driver.controller.CreateVolume, request(bucket.name, store="faulty"))
    assert code is Code.ABORTED
    held.let_go()
    driver.controller.DeleteVolume(asked, timeout=PATIENCE_S)
    assert keys_in(bucket) == set()
    assert len(faulty.requests("DELETE MANY")) == 1


def test_a_second_call_for_a_volume_is_not_queued(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty")
    held = Held(faulty, "GET")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        asked = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
        assert refusal(driver.controller.DeleteVolume, asked)[0] is Code.ABORTED
        held.let_go()
        first.result()


def test_a_volume_made_within_another_stops_its_deletion(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"precious")
    held = Held(faulty, "LIST")
    with ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        create(driver, bucket.name, "pvc-late", prefix=f"{NAME}/late")
        held.let_go()
        deletion.result()
    assert keys_in(bucket) == {f"{NAME}/data", record_key("pvc-late")}


def test_a_volume_made_within_another_keeps_what_is_left_of_it(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.bucket.PAGE", 3)
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
    assert keys_in(bucket) == {*left, record_key("pvc-late")}


def test_many_objects_are_deleted_page_by_page(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.bucket.PAGE", 3)
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    for number in range(7):
        bucket.put(f"{NAME}/{number}", b"")
        create(driver, bucket.name, f"pvc-{number}")
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == {record_key(f"pvc-{number}") for number in range(7)}
    assert len(faulty.requests("DELETE MANY")) == 3
    # Each record is asked for once, however often they are listed; its own before that.
    assert len(faulty.requests("GET")) == 1 + 8


def test_uploads_that_cannot_be_listed_do_not_keep_a_volume(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    faulty.add("UPLOADS", code="AccessDenied")
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == set()


@pytest.mark.parametrize("operation", ["GET", "LIST", "DELETE MANY", "UPLOADS", "DELETE"])
def test_a_deletion_goes_on_where_an_answer_was_lost(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, operation: str
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    faulty.add(operation, times=1, lose_answer=True)
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == set()


def test_a_driver_that_was_left_behind_deletes_nothing_of_a_later_volume(
    driver: Driver, stores: Stores, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "LIST")
    with (
        serving([ControllerService(stores, CLUSTER)]) as successor,
        ThreadPoolExecutor(1) as pool,
    ):
        left_behind = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        delete(successor, volume.volume_id)
        create(successor, bucket.name, store="faulty", onDelete="delete")
        bucket.put(f"{NAME}/data", b"precious")
        held.let_go()
        error: Any = left_behind.exception()
    assert error.code() is Code.ABORTED
    assert keys_in(bucket) == {f"{NAME}/data", record_key()}


def test_a_deletion_that_failed_is_finished_by_the_next_call(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    rule = faulty.add("DELETE MANY", code="InternalError")
    asked = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    assert refusal(driver.controller.DeleteVolume, asked)[0] is Code.UNAVAILABLE
    assert keys_in(bucket) == {f"{NAME}/data", record_key()}
    faulty.remove(rule)
    delete(driver, volume.volume_id)
    assert keys_in(bucket) == set()


# The rest


def test_the_controller_tells_what_it_can(driver: Driver) -> None:
    asked = csi_pb2.ControllerGetCapabilitiesRequest()
    kinds = csi_pb2.ControllerServiceCapability.RPC.Type
    told = driver.controller.ControllerGetCapabilities(asked).capabilities
    assert {kinds.Name(one.rpc.type) for one in told} == {
        "CREATE_DELETE_VOLUME", "EXPAND_VOLUME", "SINGLE_NODE_MULTI_WRITER",
    }  # fmt: skip


@pytest.mark.parametrize(
    "method", ["ControllerPublishVolume", "ListVolumes", "GetCapacity", "CreateSnapshot"]
)
def test_what_it_cannot_is_unimplemented(driver: Driver, method: str) -> None:
    asked = getattr(csi_pb2, method + "Request")()
    assert refusal(getattr(driver.controller, method), asked)[0] is Code.UNIMPLEMENTED


def _validate(volume_id: str, **fields: Any) -> csi_pb2.ValidateVolumeCapabilitiesRequest:
    fields.setdefault("volume_capabilities", [mount_capability()])
    return csi_pb2.ValidateVolumeCapabilitiesRequest(volume_id=volume_id, secrets=KEYS, **fields)


@pytest.mark.parametrize("mode", sorted(set(Mode.Mode.values()) - {Mode.UNKNOWN}))
def test_every_access_mode_is_confirmed(driver: Driver, shared: Bucket, mode: int) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    context = {**volume.volume_context, "storage.kubernetes.io/csiProvisionerIdentity": "x"}
    asked = _validate(
        volume.volume_id,
        volume_context=context,
        volume_capabilities=[mount_capability(mode)],
    )
    confirmed = driver.controller.ValidateVolumeCapabilities(asked).confirmed
    assert confirmed.volume_capabilities == asked.volume_capabilities
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
def test_what_does_not_hold_is_told_and_no_error(
    driver: Driver, shared: Bucket, fields: dict[str, Any]
) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    asked = _validate(volume.volume_id, **fields)
    answer = driver.controller.ValidateVolumeCapabilities(asked)
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
    asked = _validate(volume_id.format(shared.name), volume_capabilities=capabilities)
    assert refusal(driver.controller.ValidateVolumeCapabilities, asked)[0] is code


def _expand(volume_id: str, **fields: Any) -> csi_pb2.ControllerExpandVolumeRequest:
    return csi_pb2.ControllerExpandVolumeRequest(volume_id=volume_id, secrets=KEYS, **fields)


def _sized(required: int, limit: int = 0) -> csi_pb2.CapacityRange:
    return csi_pb2.CapacityRange(required_bytes=required, limit_bytes=limit)


@pytest.mark.parametrize(("asked", "told"), [(9 * GIB, 9 * GIB), (GIB, 5 * GIB)])
def test_a_volume_can_be_said_to_be_larger(
    driver: Driver, shared: Bucket, asked: int, told: int
) -> None:
    volume = create(driver, shared.name, "pvc-valid")
    answer = driver.controller.ControllerExpandVolume(
        _expand(volume.volume_id, capacity_range=_sized(asked))
    )
    assert (answer.capacity_bytes, answer.node_expansion_required) == (told, False)
    # A creation whose answer was lost may still be asked for again.
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
    asked = _expand(volume_id.format(shared.name), **fields)
    assert refusal(driver.controller.ControllerExpandVolume, asked)[0] is code


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
