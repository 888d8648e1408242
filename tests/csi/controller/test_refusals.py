"""What the controller refuses, and what S3 refuses it."""

import logging
import os
import re
import time
from typing import Any

import grpc
import pytest

from csi.controller import service
from csi.controller.bucket_client import store_of
from csi.controller.service import ControllerService
from csi.generated import csi_pb2
from csi.volume.stores import Stores
from tests.support.csi.calls import (
    Driver,
    Mode,
    block_capability,
    mount_capability,
    refusal,
    serving,
)
from tests.support.csi.volumes import KEYS, NAME, Code, changed, create, record_key, request
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import SECRET_KEY
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

BAD_REQUESTS = {
    "no name": (lambda message: message.ClearField("name"), "name"),
    "no capability": (lambda message: message.ClearField("volume_capabilities"), "capabilities"),
    "a block volume": (changed(volume_capabilities=[block_capability()]), "volumeMode"),
    "no access mode": (
        changed(volume_capabilities=[mount_capability(Mode.UNKNOWN)]),
        "access mode",
    ),
    "no access type": (changed(volume_capabilities=[csi_pb2.VolumeCapability()]), "access type"),
    "a type of disks": (changed(volume_capabilities=[mount_capability(fs_type="xfs")]), "fsType"),
    "a mount option": (
        changed(volume_capabilities=[mount_capability(Mode.SINGLE_NODE_WRITER, "cache-dir=/etc")]),
        "cache-dir",
    ),
    "a source": (
        changed(
            volume_content_source=csi_pb2.VolumeContentSource(
                volume=csi_pb2.VolumeContentSource.VolumeSource(volume_id="x")
            )
        ),
        "volume_content_source",
    ),
    "mutable parameters": (changed(mutable_parameters={"speed": "9"}), "speed"),
    "a field of the Secret": (changed(secrets={"endpoint": "http://x"}), "endpoint"),
    "half a Secret": (lambda message: message.secrets.pop("secretAccessKey"), "secret_access_key"),
    "a negative size": (
        lambda message: setattr(message.capacity_range, "required_bytes", -1),
        "negative",
    ),
}


@pytest.mark.parametrize(("change", "what"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_nothing_made(
    driver: Driver, shared: Bucket, change: Any, what: str
) -> None:
    message = request(shared.name, "pvc-refused")
    change(message)
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, what in sentence) == (Code.INVALID_ARGUMENT, True), sentence
    assert record_key("pvc-refused") not in set(keys(shared))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket", "SET-YOUR-BUCKET"),
        ("bucket", "192.168.1.1"),
        ("bucket", "arn:aws:s3:::b"),
        ("bucket", "evil.example#"),
        ("store", "unknown"),
        ("endpoint", "http://169.254.169.254"),
        ("endpoint", "https://evil.example"),
        ("region", "evil.example/"),
        ("prefix", "a/../b"),
        ("prefix", ".fusefs/volumes"),
        ("prefix", "${pvc.namespace}-${pvc.name}"),
        ("prefix", "${pvc.annotations['x']}"),
        ("prefix", "${pv.name"),
        ("onDelete", "Delete"),
        ("unknown", "1"),
        ("cacheDir", "/etc"),
        ("durability", "local"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    driver: Driver, shared: Bucket, name: str, value: str
) -> None:
    message = request(shared.name, "pvc-refused")
    message.parameters[name] = value
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, name in sentence) == (Code.INVALID_ARGUMENT, True), sentence
    assert record_key("pvc-refused") not in set(keys(shared))


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
    message = request(shared.name, "pvc-refused", prefix="${pvc.namespace}/${pvc.name}")
    message.parameters[name] = value
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, what in sentence) == (Code.INVALID_ARGUMENT, True), sentence


@pytest.mark.parametrize("prefix", ["data", "x${pv.name}", "${pvc.name}/${pv.name}-data", ""])
def test_deleting_needs_a_prefix_of_the_volumes_own(
    driver: Driver, shared: Bucket, prefix: str
) -> None:
    message = request(shared.name, "pvc-refused", prefix=prefix, onDelete="delete")
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, "${pv.name}" in sentence) == (Code.INVALID_ARGUMENT, True)


def test_deleting_needs_a_cluster_id(stores: Stores, shared: Bucket) -> None:
    with serving([ControllerService(stores, "")]) as nameless:
        message = request(shared.name, "pvc-refused", onDelete="delete")
        code, sentence = refusal(nameless.controller.CreateVolume, message)
        assert (code, "--cluster-id" in sentence) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(("required", "limit"), [(2, 1), (1 << 61, 0)])
def test_an_impossible_size_is_out_of_range(
    driver: Driver, shared: Bucket, required: int, limit: int
) -> None:
    message = request(shared.name, "pvc-refused")
    message.capacity_range.required_bytes = required
    message.capacity_range.limit_bytes = limit
    assert refusal(driver.controller.CreateVolume, message)[0] is Code.OUT_OF_RANGE


def test_rejected_keys_are_unauthenticated(driver: Driver, shared: Bucket) -> None:
    message = request(shared.name, "pvc-refused")
    message.secrets["accessKeyId"] = "nobody"
    code, sentence = refusal(driver.controller.CreateVolume, message)
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
    store_of.cache_clear()
    message = request(shared.name, "pvc-refused")
    message.ClearField("secrets")
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, "provisioner Secret" in sentence) == (Code.UNAUTHENTICATED, True)
    store_of.cache_clear()


def test_the_id_of_a_denied_request_is_logged_and_in_no_event(
    driver: Driver, shared: Bucket, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.add("PUT", code="AccessDenied")
    message = request(shared.name, "pvc-refused", store="faulty")
    with caplog.at_level(logging.INFO, "csi"):
        code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, "request FAULTY00" in sentence) == (Code.PERMISSION_DENIED, False)
    assert "request FAULTY00" in caplog.text


def test_a_bucket_that_is_not_there_is_named(
    driver: Driver, shared: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("PUT", code="NoSuchBucket")
    message = request(shared.name, "pvc-refused", store="faulty")
    code, sentence = refusal(driver.controller.CreateVolume, message)
    assert (code, f"s3://{shared.name}/" in sentence) == (Code.INVALID_ARGUMENT, True)


def test_a_store_that_is_away_is_a_reason_to_try_again(driver: Driver, shared: Bucket) -> None:
    message = request(shared.name, "pvc-refused", store="gone")
    assert refusal(driver.controller.CreateVolume, message)[0] is Code.UNAVAILABLE


def test_a_volume_whose_answer_was_lost_is_created_by_the_next_call(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("PUT", times=1, lose_answer=True)
    message = request(bucket.name, store="faulty")
    driver.controller.CreateVolume(message, timeout=PATIENCE_S)
    faulty.clear()
    again = driver.controller.CreateVolume(message, timeout=PATIENCE_S)
    assert again.volume.volume_id == f"faulty/{bucket.name}/{NAME}"


@pytest.mark.parametrize(("timeout_s", "answered_s"), [(5.0, 5.0), (60.0, 15.0)])
def test_a_store_that_stays_silent_is_named_before_the_callers_deadline(
    driver: Driver,
    bucket: Bucket,
    faulty: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    answered_s: float,
) -> None:
    assert service.ANSWER_S < 10.0  # for which provisioner and resizer wait by default
    monkeypatch.setattr(service, "ANSWER_S", 5.0)
    volume = create(driver, bucket.name, store="faulty")
    silent = faulty.add("*", stall=True)
    expand = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=9),
        secrets=KEYS,
    )
    another = request(bucket.name, "pvc-another", store="faulty")
    silences = []
    try:
        for call, message in (
            (driver.controller.CreateVolume, another),
            (driver.controller.CreateVolume, another),  # it waits on for the same work
            (driver.controller.ControllerExpandVolume, expand),
        ):
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=timeout_s)
            assert time.monotonic() - began < answered_s
            assert caught.value.code() is Code.ABORTED
            said = caught.value.details()
            assert f" s from {faulty.endpoint_url} (s3://{bucket.name}/" in said
            silences += [int(found) for found in re.findall("no answer for ([0-9]+) s", said)]
        assert silences[1] > silences[0] > 0
    finally:
        faulty.remove(silent)
        silent.release()
    until(lambda: record_key("pvc-another") in keys(bucket), "the work is done")
