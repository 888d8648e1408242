"""What arrives is compared with the checksum that S3 has of the object."""

import base64
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fusefs.store.checksum import mismatch
from fusefs.store.contract import Store
from fusefs.store.errors import StaleVersionError, UnreachableError
from fusefs.store.interface import ObjectInfo
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import download, opened

CONTENT = b"123456789"
# The published check values of the algorithms, which are of these nine bytes.
SUMS = {
    "crc32": bytes.fromhex("cbf43926"),
    "crc32c": bytes.fromhex("e3069283"),
    "crc64nvme": bytes.fromhex("ae8b14860a799888"),
}


@asynccontextmanager
async def filled(bucket: Bucket, faulty: FaultyS3) -> AsyncIterator[tuple[Store, ObjectInfo]]:
    """A store whose first requests are over, and the object `file` in it."""
    bucket.put("file", CONTENT)
    async with opened(bucket, faulty) as store:
        await store.check("")
        yield store, await store.head("file")


def headers(name: str, *, suffix: str = "") -> dict[str, str]:
    return {f"x-amz-checksum-{name}": base64.b64encode(SUMS[name]).decode() + suffix}


@pytest.mark.parametrize("name", SUMS)
def test_each_algorithm_is_compared(name: str) -> None:
    if name != "crc32":
        pytest.importorskip("awscrt")
    assert mismatch(headers(name), lambda: CONTENT) is None
    assert mismatch(headers(name), lambda: b"123456780") == name.upper()
    # Of parts' checksums nothing follows for the bytes.
    assert mismatch(headers(name, suffix="-2"), lambda: b"123456780") is None


@pytest.mark.parametrize(
    "value", ["cbf43926", "y_Q5Jg==", '"y/Q5Jg=="', "y/Q5Jg==, y/Q5Jg==", "", "y/Q5", "ÿ"]
)
def test_what_is_no_checksum_is_not_compared(value: str) -> None:
    assert mismatch({"x-amz-checksum-crc32": value}, lambda: b"123456780") is None


def test_a_checksum_of_parts_is_not_compared() -> None:
    of_parts = {**headers("crc32"), "x-amz-checksum-type": "COMPOSITE"}
    assert mismatch(of_parts, lambda: b"123456780") is None
    assert (
        mismatch({**of_parts, "x-amz-checksum-type": "FULL_OBJECT"}, lambda: b"123456780")
        == "CRC32"
    )


def test_an_object_without_a_checksum_is_taken() -> None:
    assert mismatch({"etag": '"x"'}, lambda: CONTENT) is None


@states(
    "An object of up to 256 KiB that is fetched whole is compared with the CRC32 that S3 has of it,"
    " and where awscrt is installed with its CRC32C or CRC64NVME; other bytes are fetched again."
)
async def test_a_flipped_bit_is_fetched_again(bucket: Bucket, faulty: FaultyS3) -> None:
    async with filled(bucket, faulty) as (store, info):
        answer = {"etag": info.etag, **headers("crc32")}
        bad = faulty.add("GET", "file", times=2, status=200, body=b"123456780", headers=answer)
        before = len(faulty.requests("GET"))
        assert await download(store, info) == CONTENT
    assert bad.used == 2
    sent = faulty.requests("GET")[before:]
    assert len(sent) == 3
    for request in sent:
        assert request.headers["x-amz-checksum-mode"] == "ENABLED"
        assert request.range == ""  # S3 shows no checksum with a range


async def test_bytes_that_stay_wrong_are_an_error(bucket: Bucket, faulty: FaultyS3) -> None:
    bucket.put("file", CONTENT)
    async with opened(bucket, faulty, retry_time_s=0.1) as store:
        await store.check("")
        info = await store.head("file")
        answer = {"etag": info.etag, **headers("crc32")}
        faulty.add("GET", "file", status=200, body=b"123456780", headers=answer)
        with pytest.raises(UnreachableError, match="another CRC32"):
            await download(store, info)


async def test_a_part_of_an_object_is_requested_as_a_range(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with filled(bucket, faulty) as (store, info):
        assert await download(store, info, 2, 5) == CONTENT[2:5]
    [request] = faulty.requests("GET", "file")[-1:]
    assert request.range == "bytes=2-4"


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")], ids=["501", "400"]
)
async def test_a_store_that_refuses_to_be_asked_is_read_without(
    bucket: Bucket, faulty: FaultyS3, status: int, code: str
) -> None:
    async with filled(bucket, faulty) as (store, info):
        faulty.add("GET", "file", status=status, code=code, with_header="x-amz-checksum-mode")
        for _ in range(2):
            assert await download(store, info) == CONTENT
        before = len(faulty.requests("GET", "file"))
        assert await download(store, info) == CONTENT
    sent = faulty.requests("GET", "file")[before:]
    assert sent[-1].range == "bytes=0-8"
    assert len(sent) == 1


@pytest.mark.parametrize("stop", [len(CONTENT), 5], ids=["whole", "range"])
async def test_no_more_is_received_than_the_object_had(
    bucket: Bucket, faulty: FaultyS3, stop: int
) -> None:
    """A server that ignores If-Match and ranges, and has a large object in place of a small one."""
    async with filled(bucket, faulty) as (store, info):
        large = bytes(64 << 20)
        sent = faulty.add("GET", "file", status=200, body=large, headers={"etag": '"another"'})
        tracemalloc.start()
        try:
            with pytest.raises(StaleVersionError):
                await download(store, info, 0, stop)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sent.used
        assert most < 32 << 20
