"""The store against a server that fails in every way: what is tried again, and what is an error."""

import errno
from typing import Any

import pytest

from fusefs.store.errors import (
    AccessDeniedError,
    ArchivedError,
    NotFoundError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.interface import LARGE
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import REQUEST_ID, FaultyS3
from tests.support.store_reading import BODY, download, opened

FAULTS = [
    ("AccessDenied", AccessDeniedError, errno.EACCES),
    ("NoSuchKey", NotFoundError, errno.ENOENT),
    ("InvalidObjectState", ArchivedError, errno.EIO),
    ("SlowDown", ThrottledError, errno.EIO),
    ("TooManyRequests", ThrottledError, errno.EIO),
    ("InternalError", UnreachableError, errno.EIO),
    ("BadGateway", UnreachableError, errno.EIO),
]


@pytest.mark.parametrize("size", [LARGE, len(BODY)], ids=["small", "large"])
@pytest.mark.parametrize(("code", "kind", "number"), FAULTS)
async def test_a_refused_download_says_why(
    shared: Bucket, faulty: FaultyS3, code: str, kind: type[StoreError], number: int, size: int
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        info = await store.head("body")
        faulty.add("GET", code=code)
        with pytest.raises(kind, match=REQUEST_ID) as raised:
            await download(store, info, 0, size)
        assert raised.value.errno == number
        assert ("restore" in str(raised.value)) == (kind is ArchivedError)


@pytest.mark.parametrize(
    "fault",
    [{"status": status} for status in (400, 403, 429, 500, 502, 503, 504)] + [{"stall": True}],
)
async def test_only_404_is_a_missing_object(
    shared: Bucket, faulty: FaultyS3, fault: dict[str, Any]
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2, read_timeout_s=0.3) as store:
        faulty.add("HEAD", **fault)
        with pytest.raises(StoreError) as raised:
            await store.head("body")
        assert not isinstance(raised.value, NotFoundError)


async def test_a_missing_object_is_not_found(store: S3Store, faulty: FaultyS3) -> None:
    with pytest.raises(NotFoundError):
        await store.head("missing")
    assert store.counters()["errors"] == 0
    faulty.add("HEAD", code="AccessDenied")
    with pytest.raises(AccessDeniedError):
        await store.head("body")
    assert store.counters()["errors"] == 1


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchBucket", "InternalError"])
async def test_a_list_that_fails_says_nothing_about_an_object(
    shared: Bucket, faulty: FaultyS3, code: str
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        await store.list_page("")
        faulty.add("LIST", code=code)
        with pytest.raises(StoreError) as raised:
            await store.list_page("")
        assert raised.value.errno == errno.EIO


@pytest.mark.parametrize(
    "fault",
    [
        {"code": "InternalError"},
        {"code": "SlowDown"},
        {"body": b"<html>Sign in</html>"},
        {"body": b"<ListBucketResult><Contents>"},
        {"cut_after": 100},
        {"stall": True},
        {"short": 100},
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_list_that_fails_once_is_requested_again(
    store: S3Store, faulty: FaultyS3, fault: dict[str, Any], *, is_first: bool
) -> None:
    if not is_first:
        await store.list_page("")
    faulty.add("LIST", times=1, **fault)
    assert {info.key for info in (await store.list_page("")).objects} == {"body"}
    assert store.counters()["retries"] == 1


@pytest.mark.parametrize(
    "fault",
    [{"status": 408, "body": b""}, {"status": 400, "code": "KMS.ThrottlingException"}],
    ids=["timed-out", "kms"],
)
async def test_a_read_that_a_proxy_or_the_key_service_refuses_for_now_is_sent_again(
    bucket: Bucket, faulty: FaultyS3, fault: dict[str, Any]
) -> None:
    bucket.put("file", BODY[:1000])
    async with opened(bucket, faulty) as store:
        await store.check("")
        info = await store.head("file")
        faulty.add("GET", times=2, **fault)
        assert await download(store, info) == BODY[:1000]


async def test_a_bucket_elsewhere_is_signed_for_its_region(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty, region="us-east-2") as store:
        moved = {"x-amz-bucket-region": "eu-central-1"}
        for operation, fault in (("LIST", {"status": 301}), ("HEAD", {"status": 400})):
            faulty.add(operation, times=1, headers=moved, **fault)
        assert (await store.list_page("")).objects
        assert "eu-central-1/s3" in faulty.requests("LIST")[1].headers["authorization"]
        assert store.counters()["retries"] == 0
        # The second time it is there already: that is why the request failed.
        assert (await store.head("body")).size == len(BODY)
        assert store.counters()["retries"] == 1


async def test_the_document_of_an_error_tells_the_region_as_well(
    store: S3Store, faulty: FaultyS3
) -> None:
    wrong = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-north-1</Region></Error>"
    faulty.add("LIST", status=400, times=1, body=wrong)
    assert (await store.list_page("")).objects
    assert "eu-north-1/s3" in faulty.requests("LIST")[1].headers["authorization"]


async def test_connections_that_die_idle_are_made_again(store: S3Store, faulty: FaultyS3) -> None:
    info = await store.head("body")
    await download(store, info)
    faulty.drop_connections()
    assert (await store.list_page("")).objects
    assert await store.head("body") == info
    assert await download(store, info) == BODY


@pytest.mark.parametrize("operation", ["HEAD", "GET", "LIST"])
async def test_expired_credentials_are_requested_again(
    store: S3Store, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr("fusefs.store.s3.access.RECONNECT_EVERY_S", 0.0)
    info = await store.head("body")
    before = store.requester.source.access
    # A HEAD without a reason is sent again once.
    faulty.add(operation, code="ExpiredToken", times=1)
    await store.list_page("")
    assert await store.head("body") == info
    assert await download(store, info) == BODY
    assert store.requester.source.access is not before
