"""Long ranges: read from the socket straight into what the cache file gets, or by obstore."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fusefs.store.errors import StoreError
from fusefs.store.http import answers
from fusefs.store.s3 import clients
from fusefs.store.s3.get import GetStream
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.tls import tls_door
from tests.support.store_reading import BODY, ODD_KEY, download, opened
from tests.support.store_reading import as_owner as as_owner
from tests.support.store_reading import shared as shared


def _fail(*_: Any) -> None:
    raise AssertionError("read by a library")


@pytest.mark.parametrize("key", ["body", ODD_KEY])
async def test_no_library_comes_between(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(GetStream, "_run_obstore", _fail)
    monkeypatch.setattr(GetStream, "_run_boto", _fail)
    async with opened(shared, faulty) as store:
        await store.check("")
        info = await store.head(key)
        for start, stop in ((0, len(BODY)), (1, len(BODY) - 1), (len(BODY) // 2, len(BODY))):
            assert await download(store, info, start, stop) == BODY[start:stop]
        assert store.counters()["gets"] == 3


async def test_what_comes_through_tls_is_obstores(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with tls_door(shared.server.endpoint_url, tmp_path) as door:
        settings = {"endpoint_url": door.url, "ca_bundle": str(door.authority)}
        async with opened(shared, faulty, **settings) as store:
            await store.check("")
            info = await store.head("body")
            assert await download(store, info) == BODY
            monkeypatch.setattr(GetStream, "_run_obstore", _fail)
            with pytest.raises(StoreError, match="by a library"):
                await download(store, info)


async def test_on_few_processors_no_library_comes_between_tls_either(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clients, "FEW_PROCESSORS", os.cpu_count())
    monkeypatch.setattr(GetStream, "_run_obstore", _fail)
    monkeypatch.setattr(GetStream, "_run_boto", _fail)
    with tls_door(shared.server.endpoint_url, tmp_path) as door:
        settings = {"endpoint_url": door.url, "ca_bundle": str(door.authority)}
        async with opened(shared, faulty, **settings) as store:
            await store.check("")
            info = await store.head("body")
            assert await download(store, info) == BODY


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
@pytest.mark.parametrize("in_loop", [True, False])
async def test_what_is_unpacked_on_the_way_is_not_taken_for_the_object(
    bucket: Bucket, faulty: FaultyS3, size: int, has_length: bool, in_loop: bool
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
            await download(store, info, in_loop=in_loop)


async def test_what_comes_through_tls_without_a_range_is_judged_at_once(
    shared: Bucket, faulty: FaultyS3, tmp_path: Path
) -> None:
    with tls_door(faulty.endpoint_url, tmp_path) as door:
        settings = {"endpoint_url": door.url, "ca_bundle": str(door.authority)}
        async with opened(shared, faulty, **settings) as store:
            await store.check("")
            info = await store.head("body")
            headers = {"etag": info.etag, "last-modified": "Mon, 23 Nov 2026 10:00:00 GMT"}
            whole = faulty.add("GET", status=200, body=BODY, headers=headers)
            assert await download(store, info) == BODY
            faulty.remove(whole)
            faulty.add("GET", status=200, body=2 * BODY, headers=headers)
            with pytest.raises(StoreError, match="not the object as it is stored"):
                await download(store, info)
            assert store.counters()["retries"] == 0


@pytest.mark.parametrize("in_loop", [True, False])
async def test_an_object_may_come_in_chunks(
    bucket: Bucket, faulty: FaultyS3, in_loop: bool
) -> None:
    bucket.put("file", BODY[:1000])
    async with opened(bucket, faulty) as store:
        await store.check("")
        info = await store.head("file")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (1000, BODY[:1000])
        headers = {"etag": info.etag, "transfer-encoding": "chunked"}
        faulty.add("GET", status=200, body=body, headers=headers, times=1)
        assert await download(store, info, in_loop=in_loop) == BODY[:1000]


async def test_what_has_come_before_a_break_is_not_requested_again(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty) as store:
        await store.check("")
        info = await store.head("body")
        faulty.add("GET", cut_after=1_500_000, times=1)
        assert await download(store, info) == BODY
    ranges = [request.range for request in faulty.requests("GET")]
    assert ranges == [f"bytes=0-{len(BODY) - 1}", f"bytes=1500000-{len(BODY) - 1}"]


async def test_a_server_that_does_not_say_how_much_it_sends_is_read_by_a_library(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_size = answers.AnswerHead.body_size

    def untold(head: answers.AnswerHead, *, is_head: bool) -> int | None:
        size = body_size(head, is_head=is_head)
        return None if size == len(BODY) else size

    monkeypatch.setattr(answers.AnswerHead, "body_size", untold)
    async with opened(shared, faulty) as store:
        await store.check("")
        assert await download(store, await store.head("body")) == BODY
