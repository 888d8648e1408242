"""What is sent to a store with each object: storage class, encryption, ACL; AWS's endpoints."""

import pytest

from fusefs.settings.mount import RawValue, SettingsError, build
from fusefs.store.s3.access import Access
from fusefs.store.s3.settings import S3Settings, WriteOptions
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3, Request
from tests.support.store_writing import each_way, opened, put

OPTIONS = WriteOptions("STANDARD_IA", "AES256", None, "bucket-owner-full-control")
HEADERS = {
    "x-amz-storage-class": "STANDARD_IA",
    "x-amz-server-side-encryption": "AES256",
    "x-amz-acl": "bucket-owner-full-control",
}
BEGINNINGS = ("PUT", "BEGIN", "COPY")


@pytest.fixture(autouse=True)
def _no_kms(faulty: FaultyS3) -> None:
    """The real server encrypts nothing without a KMS, and would refuse."""
    faulty.add(ignored_header="x-amz-server-side-encryption")


def extra_headers(requests: list[Request]) -> dict[str, dict[str, str]]:
    """What the requests that begin an object ask for, by operation."""
    return {
        request.operation: {name: request.headers.get(name, "") for name in HEADERS}
        for request in requests
        if request.operation in BEGINNINGS
    }


@states(
    "What a mount makes has the storage class, encryption and ACL of `--storage-class`,"
    " `--encryption` and `--acl`; a rename keeps the storage class."
)
@each_way
async def test_each_way_of_writing_asks_for_it(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    before = len(faulty.requests())
    async with opened(bucket, faulty, write_options=OPTIONS) as store:
        info = await put(store, "made", make_file(size))
        assert info.storage_class == "STANDARD_IA"
        await store.copy(info, "renamed")
    made = extra_headers(faulty.requests()[before:])
    begun = made["BEGIN" if operation == "PART" else "PUT"]
    assert begun == HEADERS
    assert made["COPY"] == HEADERS


async def test_a_rename_keeps_the_class_of_the_object(bucket: Bucket, faulty: FaultyS3) -> None:
    bucket.put("old", b"x", StorageClass="ONEZONE_IA")
    before = len(faulty.requests())
    async with opened(bucket, faulty, write_options=OPTIONS) as store:
        info = await store.head("old")
        await store.copy(info, "new")
    made = extra_headers(faulty.requests()[before:])["COPY"]
    assert made == HEADERS | {"x-amz-storage-class": info.storage_class}


async def test_without_a_choice_nothing_is_requested(
    store: S3Store, faulty: FaultyS3, make_file: MakeFile
) -> None:
    before = len(faulty.requests())
    await put(store, "plain", make_file(1000))
    assert set(extra_headers(faulty.requests()[before:])["PUT"].values()) == {""}


@pytest.mark.parametrize(
    ("options", "has_bucket_key"),
    [
        (WriteOptions(None, "aws:kms", "alias/data"), True),
        (WriteOptions(None, "aws:kms:dsse", "alias/data"), False),
    ],
)
def test_a_kms_key_is_used_once_for_many_objects(
    options: WriteOptions, has_bucket_key: bool
) -> None:
    headers = options.headers()
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/data"
    assert ("x-amz-server-side-encryption-bucket-key-enabled" in headers) is has_bucket_key


@pytest.mark.parametrize(
    ("fips", "dual_stack", "host"),
    [
        (True, False, "s3-fips.us-west-2.amazonaws.com"),
        (False, True, "s3.dualstack.us-west-2.amazonaws.com"),
        (True, True, "s3-fips.dualstack.us-west-2.amazonaws.com"),
    ],
)
def test_requests_go_to_the_endpoint_that_is_chosen(
    fips: bool, dual_stack: bool, host: str
) -> None:
    settings = S3Settings(
        "bucket", region="us-west-2", anonymous=True, fips=fips, dual_stack=dual_stack
    )
    assert Access(settings).url == f"https://bucket.{host}"


def settings(**texts: str) -> object:
    place = {"source": "s3://bucket", "mountpoint": "/mnt", "cache_dir": "/cache"}
    return build({name: RawValue(text, name) for name, text in {**place, **texts}.items()})


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"storage_class": "DEEP_ARCHIVE"}, "archive"),
        ({"storage_class": "standard ia"}, "storage class"),
        ({"encryption": "rot13"}, "AES256"),
        ({"kms_key": "alias/data", "encryption": "AES256"}, "encryption"),
        ({"acl": "everybody"}, "bucket-owner-full-control"),
        ({"fips": "true", "endpoint_url": "https://minio"}, "AWS's own endpoints"),
    ],
)
def test_what_cannot_be_had_is_refused(texts: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings(**texts)
