"""Ranges that are read: long ones into their file by the engine, small ones at once."""

from typing import Any

import pytest

from fusefs.cache.integrity.checksums import BLOCK, Sum, merged
from fusefs.store.checksum import crc32
from fusefs.store.errors import StoreError
from fusefs.store.interface import LARGE
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.tls import TlsDoor
from tests.support.servers.tls import secure as secure
from tests.support.store_reading import BODY, ODD_KEY, Collector, download, opened


@pytest.mark.parametrize("key", ["body", ODD_KEY])
@pytest.mark.parametrize("is_secure", [True, False])
async def test_any_range_arrives_as_it_is(
    shared: Bucket, secure: TlsDoor, faulty: FaultyS3, key: str, is_secure: bool
) -> None:
    async with opened(shared, faulty, **(secure.settings if is_secure else {})) as store:
        info = await store.head(key)
        for start, stop in ((0, len(BODY)), (1, len(BODY) - 1), (len(BODY) // 2, len(BODY))):
            got = await download(store, info, start, stop)
            assert got == BODY[start:stop]
        assert store.counters()["gets"] == 3


async def test_each_mebibyte_is_summed_and_told_once(store: S3Store, faulty: FaultyS3) -> None:
    start, stop = 1000, len(BODY) - 7
    sink = Collector(start)
    faulty.add("GET", cut_after=1_500_000, times=1)
    await store.download((await store.head("body")).version, start, stop, sink)
    sink.close()
    at = start
    for first, last, crc in merged(Sum(*one) for one in sink.sums):
        assert first <= at < last <= first // BLOCK * BLOCK + BLOCK
        assert crc == crc32(BODY[first:last])
        at = last
    assert at == stop


async def test_a_server_that_knows_no_ranges_is_read_from_the_start_alone(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        await store.check("")
        info = await store.head("body")
        faulty.add("GET", status=200, body=BODY, headers={"etag": info.etag})
        assert await download(store, info, 0, 2 << 20) == BODY[: 2 << 20]
        with pytest.raises(StoreError, match="another range"):
            await download(store, info, 1 << 20, 3 << 20)


@pytest.mark.parametrize("size", [1000, 300_000])
@pytest.mark.parametrize("has_length", [True, False], ids=["length", "chunked"])
async def test_what_is_unpacked_on_the_way_is_not_taken_for_the_object(
    bucket: Bucket, faulty: FaultyS3, size: int, has_length: bool
) -> None:
    """Google's store answers so, under the ETag of what is stored, and without a range."""
    bucket.put("file.gz", BODY[:size])
    async with opened(bucket, faulty) as store:
        await store.check("")
        info = await store.head("file.gz")
        body, headers = BODY[: 2 * size], {"etag": info.etag}
        if not has_length:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            headers["transfer-encoding"] = "chunked"
        faulty.add("GET", status=200, body=body, headers=headers)
        with pytest.raises(StoreError, match="not the object as it is stored"):
            await download(store, info)


async def test_an_object_may_come_in_chunks(bucket: Bucket, faulty: FaultyS3) -> None:
    bucket.put("file", BODY[:1000])
    async with opened(bucket, faulty) as store:
        await store.check("")
        info = await store.head("file")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (1000, BODY[:1000])
        headers = {"etag": info.etag, "transfer-encoding": "chunked"}
        faulty.add("GET", status=200, body=body, headers=headers, times=1)
        assert await download(store, info) == BODY[:1000]


# In the middle of an object, so that a server that ignores the range is noticed.
START = 100_000


async def small(store: S3Store, key: str = "body", size: int = LARGE) -> bytes:
    return await download(store, await store.head(key), START, START + size)


@pytest.mark.parametrize("key", ["body", ODD_KEY])
@pytest.mark.parametrize("size", [1, 1000, LARGE])
async def test_a_small_range_is_one_request(store: S3Store, key: str, size: int) -> None:
    for _ in range(2):
        assert await small(store, key, size) == BODY[START : START + size]
    counters = store.counters()
    assert (counters["gets"], counters["bytes_fetched"]) == (2, 2 * size)


@pytest.mark.parametrize(
    "fault",
    [
        {"cut_after": 0},
        {"cut_after": 100_000},
        {"stall": True},
        {"stall_after": 100_000},
        {"short": 100_000},
        {"code": "SlowDown"},
        {"code": "InternalError"},
        {"code": "RequestTimeout"},
        {"code": "ExpiredToken"},
        {"status": 502, "body": b"<html>"},
    ],
)
@pytest.mark.parametrize("size", [LARGE, len(BODY) - START], ids=["small", "large"])
async def test_a_range_that_breaks_is_requested_again(
    store: S3Store, faulty: FaultyS3, fault: dict[str, Any], size: int
) -> None:
    await store.check("")
    rule = faulty.add("GET", times=2, **fault)
    assert await small(store, size=size) == BODY[START : START + size]
    assert rule.used == 2
