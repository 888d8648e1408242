"""What goes with the controller's requests: a customer's key."""

import base64
from typing import Any

import pytest

from csi.generated import csi_pb2
from tests.support.csi.calls import Driver, refusal
from tests.support.csi.volumes import KEYS, NAME, Code, create, record_key, request
from tests.support.servers.buckets import Bucket, keys
from tests.support.sharing import PATIENCE_S

RAW = bytes(range(32))
TEXT = base64.b64encode(RAW).decode()
ENCRYPTED: dict[str, Any] = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": RAW}
WITH_KEY = {**KEYS, "customer_key": TEXT}


def with_secret(message: Any, secret: dict[str, str]) -> Any:
    message.secrets.clear()
    message.secrets.update(secret)
    return message


def deletion(volume_id: str, secret: dict[str, str]) -> csi_pb2.DeleteVolumeRequest:
    return csi_pb2.DeleteVolumeRequest(volume_id=volume_id, secrets=secret)


def test_a_record_is_encrypted_with_the_key_of_the_secret(driver: Driver, bucket: Bucket) -> None:
    message = with_secret(request(bucket.name, onDelete="delete"), WITH_KEY)
    volume = driver.controller.CreateVolume(message, timeout=PATIENCE_S).volume
    assert TEXT not in str(volume)
    record = bucket.client.get_object(Bucket=bucket.name, Key=record_key(), **ENCRYPTED)
    assert TEXT not in record["Body"].read().decode()
    assert driver.controller.CreateVolume(message, timeout=PATIENCE_S).volume == volume
    bucket.put(f"{NAME}/data", b"x")
    # Without the key the record is not readable, and the volume stays for the next call.
    code, _ = refusal(driver.controller.DeleteVolume, deletion(volume.volume_id, KEYS))
    assert code in (Code.UNAVAILABLE, Code.PERMISSION_DENIED)
    assert set(keys(bucket)) == {record_key(), f"{NAME}/data"}
    driver.controller.DeleteVolume(deletion(volume.volume_id, WITH_KEY), timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()


def test_a_record_that_others_have_the_key_of_keeps_data_and_no_volume_from_being_made(
    driver: Driver, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = with_secret(request(bucket.name, "pvc-theirs"), WITH_KEY)
    driver.controller.CreateVolume(theirs, timeout=PATIENCE_S)
    by_claim = request(bucket.name, "pvc-mine", prefix="claims/${pvc.name}")
    driver.controller.CreateVolume(by_claim, timeout=PATIENCE_S)
    volume = create(driver, bucket.name, onDelete="delete")
    bucket.put(f"{NAME}/data", b"precious")
    driver.controller.DeleteVolume(deletion(volume.volume_id, KEYS), timeout=PATIENCE_S)
    assert f"{NAME}/data" in set(keys(bucket))
    assert "another volume may have a part of it" in caplog.text
    assert "may be encrypted with another key" in caplog.text


def test_no_key_is_refused_and_none_is_shown(driver: Driver, bucket: Bucket) -> None:
    bad = {**KEYS, "customer_key": TEXT[:-2]}
    code, sentence = refusal(driver.controller.CreateVolume, with_secret(request(bucket.name), bad))
    assert (code, "customer_key is no key" in sentence) == (Code.INVALID_ARGUMENT, True)
    assert TEXT[:-2] not in sentence
    parameter = request(bucket.name, customerKey=TEXT)
    code, sentence = refusal(driver.controller.CreateVolume, parameter)
    assert (code, sentence.startswith("customerKey: ")) == (Code.INVALID_ARGUMENT, True)
    assert TEXT not in sentence
    assert set(keys(bucket)) == set()
