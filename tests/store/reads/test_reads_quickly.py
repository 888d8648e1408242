"""Small ranges: they are in memory before any of it is written."""

from __future__ import annotations

from typing import Any

import pytest

from fusefs.store.errors import StoreError
from fusefs.store.s3.get import SMALL
from fusefs.store.s3.store import S3Store
from tests.store.test_failures import FAULTS
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import REQUEST_ID, FaultyS3
from tests.support.store_reading import BODY, ODD_KEY, download, opened
from tests.support.store_reading import as_owner as as_owner
from tests.support.store_reading import shared as shared

# In the middle of an object, so that a server that ignores the range is noticed.
START = 100_000


async def small(store: S3Store, key: str = "body", size: int = SMALL) -> bytes:
    return await download(store, await store.head(key), START, START + size)


@pytest.mark.parametrize("key", ["body", ODD_KEY])
@pytest.mark.parametrize("size", [1, 1000, SMALL])
async def test_a_small_range_is_one_request(
    shared: Bucket, faulty: FaultyS3, key: str, size: int
) -> None:
    async with opened(shared, faulty) as store:
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
    ],
)
async def test_a_small_range_that_breaks_is_requested_again(
    shared: Bucket, faulty: FaultyS3, fault: dict[str, Any]
) -> None:
    async with opened(shared, faulty) as store:
        await store.check("")
        rule = faulty.add("GET", times=1, **fault)
        assert await small(store) == BODY[START : START + SMALL]
        assert rule.used == 1


@pytest.mark.parametrize(("code", "kind", "number"), FAULTS)
async def test_what_can_not_be_read_says_why(
    shared: Bucket, faulty: FaultyS3, code: str, kind: type[StoreError], number: int
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        await store.check("")
        faulty.add("GET", code=code)
        with pytest.raises(kind, match=REQUEST_ID) as raised:
            await small(store)
        assert raised.value.errno == number


async def test_an_answer_that_is_longer_than_requested_is_refused(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        await store.check("")
        etag = (await store.head("body")).etag
        faulty.add("GET", status=200, body=BODY[: SMALL * 2], headers={"etag": etag})
        with pytest.raises(StoreError):
            await small(store)
