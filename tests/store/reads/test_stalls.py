"""Waits of S3 requests are counted by cause: a connection, a slow or refusing S3, keys."""

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from fusefs.store.interface import ObjectVersion, WholeFileSink
from fusefs.store.s3.store import S3Store
from fusefs.telemetry.s3_requests import S3_REQUESTS
from fusefs.telemetry.stalls import STALLS, WaitCause, served
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import download, opened
from tests.support.waiting import eventually, mostly

SMALL, LARGE = 100_000, 2 << 20


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before a retry is a second, where it is mostly much shorter."""
    monkeypatch.setattr(random, "uniform", lambda _least, _most: 1.0)


@asynccontextmanager
async def connected(shared: Bucket, faulty: FaultyS3, **settings: int) -> AsyncIterator[S3Store]:
    """A store that has answered once, so that its connections are open."""
    async with opened(shared, faulty, read_timeout_s=30.0, **settings) as store:
        await store.list_page("")
        yield store


def put(shared: Bucket, key: str, size: int) -> ObjectVersion:
    return ObjectVersion(key, shared.put(key, random.randbytes(size)), size)


async def read(store: S3Store, version: ObjectVersion) -> None:
    with served():
        await download(store, version)


@pytest.mark.parametrize(
    ("size", "answer", "cause"),
    [
        pytest.param(SMALL, {"delay_s": 1.0}, WaitCause.S3_FIRST_BYTE, id="begins-late-small"),
        pytest.param(LARGE, {"delay_s": 1.0}, WaitCause.S3_FIRST_BYTE, id="begins-late-large"),
        pytest.param(LARGE, {"bytes_per_s": LARGE}, WaitCause.S3_TRANSFER, id="takes-long"),
        pytest.param(SMALL, {"code": "SlowDown", "times": 2}, WaitCause.THROTTLED, id="refused"),
        pytest.param(SMALL, {"code": "ExpiredToken", "times": 2}, WaitCause.CREDENTIALS, id="keys"),
    ],
)
async def test_a_wait_for_an_answer_has_its_cause(
    shared: Bucket, faulty: FaultyS3, size: int, answer: dict[str, Any], cause: int
) -> None:
    version = put(shared, "object", size)
    async with connected(shared, faulty) as store:
        faulty.add("GET", **answer)
        with mostly(cause):
            await read(store, version)


async def test_a_connection_that_others_have(shared: Bucket, faulty: FaultyS3) -> None:
    versions = [put(shared, f"others/{number}", SMALL) for number in range(20)]
    async with connected(shared, faulty, max_connections=1) as store:
        faulty.add("GET", delay_s=0.05)
        with mostly(WaitCause.CONNECTION):
            async with trio.open_nursery() as nursery:
                for version in versions:
                    nursery.start_soon(read, store, version)


async def test_small_objects_do_not_wait_for_the_places_of_large_ones(
    shared: Bucket, faulty: FaultyS3
) -> None:
    versions = [put(shared, f"small/{number}", SMALL) for number in range(3)]
    async with connected(shared, faulty, max_streams=1) as store, trio.open_nursery() as nursery:
        hold = faulty.hold("GET", "small/*", 0.0, times=len(versions))
        for version in versions:
            nursery.start_soon(read, store, version)
        await eventually(lambda: len(hold.held) == len(versions))
        hold.released.set()


@pytest.mark.parametrize("operation", ["LIST", "HEAD"])
async def test_a_listing_and_a_head_are_metadata(
    shared: Bucket, faulty: FaultyS3, operation: str
) -> None:
    put(shared, "looked/at", SMALL)
    async with connected(shared, faulty) as store:
        faulty.add(operation, delay_s=0.5)
        with mostly(WaitCause.METADATA), served():
            await (store.head("looked/at") if operation == "HEAD" else store.list_page("looked/"))


async def test_what_no_program_waits_for_does_not_count(shared: Bucket, faulty: FaultyS3) -> None:
    version = put(shared, "ahead", SMALL)
    async with connected(shared, faulty) as store:
        before = STALLS.totals()
        await download(store, version)
        assert STALLS.totals() == before


def counts(operation: str) -> dict[str, int]:
    """How many requests there were until now, by code."""
    samples = S3_REQUESTS.samples()["s3_requests_total"]
    return {
        one["labels"]["code"]: one["value"]
        for one in samples
        if one["labels"]["operation"] == operation
    }


async def test_requests_are_counted_by_their_answers(shared: Bucket, faulty: FaultyS3) -> None:
    version = put(shared, "counted", LARGE)
    async with connected(shared, faulty) as store:
        faulty.add("GET", code="SlowDown", times=1)
        before = counts("get")
        await read(store, version)
        after = counts("get")
    new = {code: count - before.get(code, 0) for code, count in after.items()}
    assert (new["200"], new["503"]) == (1, 1)


async def test_a_full_local_disk_is_no_failure_of_s3(shared: Bucket, faulty: FaultyS3) -> None:
    version = put(shared, "unkept", LARGE)

    async with connected(shared, faulty) as store:
        before = counts("get")
        full = os.open("/dev/full", os.O_WRONLY)
        with pytest.raises(OSError, match="No space"):
            await store.download(version, 0, LARGE, WholeFileSink(full))
        os.close(full)
        after = counts("get")
    changed = {code: count - before.get(code, 0) for code, count in after.items()}
    assert {code: count for code, count in changed.items() if count} == {"cancelled": 1}
