"""What goes with the controller's requests: a customer's key, who pays, and an access point."""

import base64
from typing import Any

import pytest

from csi.controller.bucket_client import store_of
from csi.errors import InvalidArgumentError
from csi.generated import csi_pb2
from csi.identities.keys import AccessKeys
from csi.volume.location import VolumeId, new_volume_id
from csi.volume.stores import StoreSettings
from fusefs.settings.types import Addressing
from fusefs.store.s3.access import Access
from tests.support.csi.calls import Driver, refusal
from tests.support.csi.volumes import KEYS, NAME, Code, create, record_key, request
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S

RAW = bytes(range(32))
TEXT = base64.b64encode(RAW).decode()
OTHER_TEXT = base64.b64encode(bytes(32)).decode()
ENCRYPTED: dict[str, Any] = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": RAW}
WITH_KEY = {**KEYS, "customer_key": TEXT}
ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/data"
HOST = "data-123456789012.s3-accesspoint.us-west-2.amazonaws.com"


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


@pytest.fixture
def paid(faulty: FaultyS3) -> FaultyS3:
    """Refuses all whose sender does not agree to pay."""
    faulty.add(with_header="x-amz-request-payer")
    faulty.add(code="AccessDenied")
    return faulty


def test_requests_are_paid_for_where_the_class_says_so(
    driver: Driver, bucket: Bucket, paid: FaultyS3
) -> None:
    message = request(bucket.name, store="faulty", requesterPays="true", onDelete="delete")
    volume = driver.controller.CreateVolume(message, timeout=PATIENCE_S).volume
    bucket.put(f"{NAME}/data", b"x")
    driver.controller.DeleteVolume(deletion(volume.volume_id, KEYS), timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()
    payers = {each.headers.get("x-amz-request-payer") for each in paid.requests()[-8:]}
    assert payers <= {None, "requester"}
    assert "requester" in payers


def test_they_are_not_where_it_does_not(driver: Driver, bucket: Bucket, paid: FaultyS3) -> None:
    before = len(paid.requests())
    code, _ = refusal(driver.controller.CreateVolume, request(bucket.name, store="faulty"))
    assert code is Code.PERMISSION_DENIED
    assert {each.headers.get("x-amz-request-payer") for each in paid.requests()[before:]} == {None}
    create(driver, bucket.name, onDelete="delete")  # by another way
    bucket.put(f"{NAME}/data", b"precious")
    volume_id = f"faulty/{bucket.name}/{NAME}"
    code, _ = refusal(driver.controller.DeleteVolume, deletion(volume_id, KEYS))
    assert code is Code.PERMISSION_DENIED
    assert set(keys(bucket)) == {record_key(), f"{NAME}/data"}


@pytest.mark.parametrize(
    "arn",
    [
        ARN,
        "arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/data",
        "arn:aws-us-gov:s3:us-gov-west-1:123456789012:accesspoint/my-data",
        ARN[: -len("data")] + "x" * 50,
    ],
)
def test_an_id_names_an_access_point_in_short(arn: str) -> None:
    made = new_volume_id("aws", arn, NAME)
    assert len(str(made)) <= 128
    assert str(made).startswith("aws/ap")
    assert VolumeId.parse(str(made)) == VolumeId("aws", arn, NAME)


@pytest.mark.parametrize(
    "text",
    [
        f"aws/{ARN}/{NAME}",
        f"aws/ap:us-west-2:123456789012:x.evil/{NAME}",
        f"aws/ap:us-west-2:12345:data/{NAME}",
        f"aws/ap::123456789012:data/{NAME}",
        f"aws/ap-x:us-west-2:123456789012:-/{NAME}",
    ],
)
def test_no_other_id_does(text: str) -> None:
    assert VolumeId.parse(text) is None


def test_an_access_point_whose_volumes_have_no_id_is_refused() -> None:
    arn = "arn:aws-us-gov:s3:us-gov-west-1:123456789012:accesspoint/" + "x" * 50
    with pytest.raises(InvalidArgumentError, match=r"too long .* alias"):
        new_volume_id("aws", arn, NAME)


@pytest.mark.parametrize("addressing", list(Addressing))
def test_requests_go_to_the_access_points_host(addressing: Addressing) -> None:
    store = StoreSettings("aws", region="eu-central-1", addressing=addressing)
    access = Access(store_of(store, ARN, None, AccessKeys("AKIA", "secret")).settings)
    assert access.url == f"https://{HOST}"
    assert access.region == "us-west-2"


def test_an_access_point_of_a_store_that_is_not_aws_is_refused(
    driver: Driver, bucket: Bucket
) -> None:
    code, sentence = refusal(driver.controller.CreateVolume, request(ARN))
    assert (code, "another one is configured" in sentence) == (Code.INVALID_ARGUMENT, True)
