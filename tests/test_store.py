"""The store against a real S3 server, and against one that fails in every way."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from fusefs.store import s3 as s3_module
from fusefs.store.base import ObjectInfo, ObjectVersion, Priority
from fusefs.store.clients import S3Settings
from fusefs.store.errors import (
    AccessDeniedError,
    ArchivedError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    ThrottledError,
    UnreachableError,
)
from fusefs.store.s3 import S3Store
from tests.conftest import Bucket
from tests.support.faulty_s3 import REQUEST_ID, FaultyS3
from tests.support.s3_server import S3Server

BODY = os.urandom(5 << 20)
# No path of obstore's can hold it, so boto3 reads it.
ODD_KEY = "odd//key"
LIMIT_S = 30


@pytest.fixture(scope="module")
def faulty(s3: S3Server) -> Iterator[FaultyS3]:
    with FaultyS3(s3.endpoint_url) as server:
        yield server


@pytest.fixture(scope="module")
def shared(s3: S3Server) -> Bucket:
    """A bucket that no test changes, with `BODY` under a plain and an odd key."""
    bucket = Bucket(s3, s3.new_bucket(), s3.client())
    bucket.put("body", BODY)
    bucket.put(ODD_KEY, BODY)
    return bucket


@pytest.fixture(autouse=True)
def _as_owner(s3: S3Server, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_module, "CHECK_TIME_S", 0.5)
    yield
    faulty.clear()


@asynccontextmanager
async def opened(shared: Bucket, faulty: FaultyS3, **settings: Any) -> AsyncIterator[S3Store]:
    """A store that sees the bucket through the faulty server and gives up soon."""
    chosen = {
        "bucket": shared.name, "endpoint_url": faulty.endpoint_url, "max_connections": 4,
        "retry_time_s": 20.0, "read_timeout_s": 1.0, **settings,
    }  # fmt: skip
    store = S3Store(S3Settings(**chosen))
    with trio.fail_after(LIMIT_S):
        yield store
        await store.aclose()


async def download(
    store: S3Store, info: ObjectInfo | ObjectVersion, start: int = 0, stop: int | None = None
) -> bytes:
    """Download a range; checks that the pieces come in order and without gaps."""
    version = info.version if isinstance(info, ObjectInfo) else info
    got = bytearray()

    def write(offset: int, chunk: memoryview) -> None:
        assert offset == start + len(got)
        got.extend(chunk)

    await store.download(version, start, version.size if stop is None else stop, write)
    return bytes(got)


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await trio.sleep(0.01)


# --- what it does -----------------------------------------------------------------


async def test_a_range_arrives_as_it_is(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        info = await store.head("body")
        assert await download(store, info, 12345, 3 << 20) == BODY[12345 : 3 << 20]


async def test_a_key_that_obstore_cannot_express_is_read(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        info = await store.head(ODD_KEY)
        assert await download(store, info, 1) == BODY[1:]


async def test_a_head_and_a_listing_tell_the_same(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        listed = {info.key: info for info in (await store.list_page("", delimiter="")).objects}
        info = await store.head("body")
        assert (listed["body"].version, listed["body"].mtime_ns) == (info.version, info.mtime_ns)


KEYS = ["a b", "a+b", "a%20b", "a%2Bb", "ü/ö", "x\x01y", "a&b<c>", "q'\"q", "😀", "%", "d+e/f g+h"]


async def test_keys_of_all_kinds_are_listed_and_read(bucket: Bucket, faulty: FaultyS3) -> None:
    for key in KEYS:
        bucket.put(key, key.encode())
    async with opened(bucket, faulty) as store:
        await store.list_page("", delimiter="", max_keys=1)
        page = await store.list_page("", delimiter="")
        assert sorted(info.key for info in page.objects) == sorted(KEYS)
        for info in page.objects:
            assert await download(store, info) == info.key.encode()


async def test_pages_follow_each_other_by_token_and_by_key(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    for number in range(5):
        bucket.put(f"p/{number}+ x", b"")
    async with opened(bucket, faulty) as store:
        first = await store.list_page("p/", max_keys=2)
        by_token = await store.list_page("p/", token=first.next_token)
        by_key = await store.list_page("p/", start_after=first.last)
        assert [info.key for info in by_token.objects] == ["p/2+ x", "p/3+ x", "p/4+ x"]
        assert by_key.objects == by_token.objects


async def test_common_prefixes_are_listed(bucket: Bucket, faulty: FaultyS3) -> None:
    bucket.put("a b/c", b"")
    bucket.put("d+/e", b"")
    async with opened(bucket, faulty) as store:
        assert (await store.list_page("")).prefixes == ["a b/", "d+/"]


async def test_only_the_first_list_is_botocores(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        for _ in range(3):
            assert (await store.list_page("")).objects
        asked = faulty.requests("LIST")
        assert len(asked) == 3
        assert ["amz-sdk-request" in request.headers for request in asked] == [True, False, False]
        assert {request.query["prefix"] for request in asked} == {""}


async def test_a_public_bucket_is_asked_without_a_signature(
    shared: Bucket, faulty: FaultyS3
) -> None:
    listed = (
        b"<ListBucketResult><Contents><Key>k</Key><ETag>x</ETag><Size>1</Size>"
        b"<LastModified>2026-11-21T04:15:07Z</LastModified></Contents></ListBucketResult>"
    )
    faulty.add("LIST", body=listed)
    async with opened(shared, faulty, anonymous=True) as store:
        for _ in range(2):
            assert [info.key for info in (await store.list_page("")).objects] == ["k"]
        assert not any("authorization" in request.headers for request in faulty.requests())


# --- downloads that break -----------------------------------------------------------


@pytest.mark.parametrize("key", ["body", ODD_KEY])
@pytest.mark.parametrize(
    "fault", [{"cut_after": 2_500_000}, {"short": 2_500_000}, {"stall_after": 2_500_000}]
)
async def test_a_broken_stream_goes_on_where_it_stopped(
    shared: Bucket, faulty: FaultyS3, key: str, fault: dict[str, int]
) -> None:
    rule = faulty.add("GET", key, times=1, **fault)
    async with opened(shared, faulty) as store:
        info = await store.head(key)
        assert await download(store, info) == BODY
        assert rule.used == 1
        second = faulty.requests("GET", key)[1]
        assert int(second.range.removeprefix("bytes=").partition("-")[0]) >= 1 << 20
        assert second.headers["if-match"].strip('"') == info.etag.strip('"')


async def test_a_stream_that_breaks_again_and_again_arrives_in_the_end(
    shared: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("GET", cut_after=1_100_000)
    async with opened(shared, faulty) as store:
        assert await download(store, await store.head("body")) == BODY
        assert store.counters()["bytes_fetched"] == len(BODY)


async def test_a_server_that_is_silent_is_asked_again(shared: Bucket, faulty: FaultyS3) -> None:
    faulty.add("GET", stall=True, times=1)
    async with opened(shared, faulty) as store:
        assert await download(store, await store.head("body")) == BODY
        assert store.counters()["retries"] == 1


@pytest.mark.parametrize("key", ["body", ODD_KEY])
async def test_another_content_than_asked_for_is_stale(
    bucket: Bucket, faulty: FaultyS3, key: str
) -> None:
    bucket.put(key, b"old")
    async with opened(bucket, faulty) as store:
        info = await store.head(key)
        bucket.put(key, b"new")
        with pytest.raises(StaleVersionError):
            await download(store, info)


@pytest.mark.parametrize("key", ["body", ODD_KEY])
async def test_another_content_is_noticed_where_if_match_is_ignored(
    bucket: Bucket, faulty: FaultyS3, key: str
) -> None:
    faulty.add("GET", key, ignore_if_match=True)
    bucket.put(key, b"old")
    async with opened(bucket, faulty) as store:
        info = await store.head(key)
        bucket.put(key, b"new")
        with pytest.raises(StaleVersionError):
            await download(store, info)


async def test_an_object_replaced_before_a_stream_goes_on_is_stale(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("body", BODY)
    faulty.add(
        "GET", times=1, cut_after=2_500_000, at=(2_500_000, lambda: bucket.put("body", BODY[::-1]))
    )
    async with opened(bucket, faulty) as store:
        info = await store.head("body")
        got = bytearray(info.size)

        def write(offset: int, chunk: memoryview) -> None:
            got[offset : offset + len(chunk)] = chunk

        with pytest.raises(StaleVersionError):
            await store.download(info.version, 0, info.size, write)
        written = next(at for at in range(len(got), 0, -1) if got[at - 1])
        assert got[:written] == BODY[:written]


async def test_a_server_that_refuses_the_very_etag_that_it_tells_is_read(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty) as store:
        info = await store.head("body")
        faulty.add("GET", code="PreconditionFailed", times=1)
        assert await download(store, info) == BODY
        assert "if-match" not in faulty.requests("GET")[1].headers


# --- failures ----------------------------------------------------------------------


FAULTS = [
    ("AccessDenied", AccessDeniedError, errno.EACCES),
    ("NoSuchKey", NotFoundError, errno.ENOENT),
    ("InvalidObjectState", ArchivedError, errno.EIO),
    ("SlowDown", ThrottledError, errno.EIO),
    ("TooManyRequests", ThrottledError, errno.EIO),
    ("InternalError", UnreachableError, errno.EIO),
    ("BadGateway", UnreachableError, errno.EIO),
]


@pytest.mark.parametrize(("code", "kind", "number"), FAULTS)
async def test_a_refused_download_says_why(
    shared: Bucket, faulty: FaultyS3, code: str, kind: type[StoreError], number: int
) -> None:
    async with opened(shared, faulty, retry_time_s=0.2) as store:
        info = await store.head("body")
        faulty.add("GET", code=code)
        with pytest.raises(kind, match=REQUEST_ID) as raised:
            await download(store, info)
        assert raised.value.errno == number


async def test_an_archived_object_is_to_be_restored(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        info = await store.head("body")
        faulty.add("GET", code="InvalidObjectState")
        with pytest.raises(ArchivedError, match="restore"):
            await download(store, info)


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


async def test_a_missing_object_is_not_found(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        with pytest.raises(NotFoundError):
            await store.head("missing")


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
        {"code": "InternalError"}, {"code": "SlowDown"}, {"body": b"<html>Sign in</html>"},
        {"body": b"<ListBucketResult><Contents>"}, {"cut_after": 100}, {"stall": True},
        {"short": 100},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_list_that_fails_once_is_asked_again(
    shared: Bucket, faulty: FaultyS3, fault: dict[str, Any], *, is_first: bool
) -> None:
    async with opened(shared, faulty) as store:
        if not is_first:
            await store.list_page("")
        faulty.add("LIST", times=1, **fault)
        assert {info.key for info in (await store.list_page("")).objects} == {"body"}
        assert store.counters()["retries"] == 1


async def test_a_redirected_list_is_left_to_botocore(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        await store.list_page("")
        faulty.add("LIST", status=307, times=1)
        assert (await store.list_page("")).objects
        assert store.counters()["retries"] == 0


async def test_connections_that_die_idle_are_made_again(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty) as store:
        info = await store.head("body")
        await download(store, info)
        faulty.drop_connections()
        assert (await store.list_page("")).objects
        assert await store.head("body") == info
        assert await download(store, info) == BODY


async def test_being_throttled_lowers_the_concurrency_for_a_while(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty) as store:
        assert store.counters()["connections"] == 4
        faulty.add("HEAD", code="SlowDown", times=1)
        await store.list_page("")
        seen = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.head, "body")
            await until(lambda: store.counters()["throttled"] > 0)
            seen.append(store.counters()["connections"])
        for _ in range(10):
            await store.head("body")
        assert seen == [2]
        assert store.counters()["connections"] == 4


@pytest.mark.parametrize("operation", ["HEAD", "GET", "LIST"])
async def test_expired_credentials_are_asked_for_again(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(s3_module, "RECONNECT_EVERY_S", 0.0)
    async with opened(shared, faulty) as store:
        info = await store.head("body")
        before = store._clients
        faulty.add(operation, code="ExpiredToken", times=1)
        await store.list_page("")
        assert await store.head("body") == info
        assert await download(store, info) == BODY
        assert store._clients is not before


# --- cancelling -----------------------------------------------------------------------


async def test_a_cancelled_download_never_writes_again(shared: Bucket, faulty: FaultyS3) -> None:
    rule = faulty.add("GET", stall_after=2_500_000, times=1)
    written: list[int] = []
    began = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def write(offset: int, chunk: memoryview) -> None:
        written.append(offset)
        token.run_sync_soon(began.set)

    async with opened(shared, faulty, read_timeout_s=10.0) as store:
        info = await store.head("body")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.download, info.version, 0, info.size, write)
            await began.wait()
            nursery.cancel_scope.cancel()
        count = len(written)
        rule.release()
        assert await download(store, info) == BODY
        assert len(written) == count


async def test_cancelling_waits_for_a_write_that_is_running(
    shared: Bucket, faulty: FaultyS3
) -> None:
    is_inside = trio.Event()
    go_on = threading.Event()
    states: list[str] = []
    token = trio.lowlevel.current_trio_token()

    def write(offset: int, chunk: memoryview) -> None:
        token.run_sync_soon(is_inside.set)
        go_on.wait(LIMIT_S)
        states.append("written")

    async with opened(shared, faulty) as store:
        info = await store.head("body")

        async def cancelled() -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel, scope)
                await store.download(info.version, 0, info.size, write)
            states.append("returned")

        async def cancel(scope: trio.CancelScope) -> None:
            await is_inside.wait()
            scope.cancel()
            await trio.sleep(0.05)
            go_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
    assert states == ["written", "returned"]


async def test_a_cancelled_request_gives_its_connection_back(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty, max_connections=1, read_timeout_s=10.0) as store:
        await store.list_page("")
        rule = faulty.add("HEAD", stall=True, times=1)
        with trio.move_on_after(0.1):
            await store.head("body")
        assert (await store.head("body")).size == len(BODY)
        rule.release()


async def test_an_error_of_the_writer_ends_the_download(shared: Bucket, faulty: FaultyS3) -> None:
    def write(offset: int, chunk: memoryview) -> None:
        raise FileNotFoundError(errno.ENOENT, "the disk is gone")

    async with opened(shared, faulty) as store:
        info = await store.head("body")
        with pytest.raises(FileNotFoundError, match="the disk is gone"):
            await store.download(info.version, 0, info.size, write)
        assert len(faulty.requests("GET")) == 1


async def test_a_prefetch_leaves_room_for_a_demand(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty, read_timeout_s=10.0) as store:
        info = await store.head("body")
        rule = faulty.add("GET", stall=True)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(
                    lambda: store.download(
                        info.version, 0, 10, lambda offset, chunk: None,
                        priority=lambda: Priority.PREFETCH,
                    )
                )  # fmt: skip
            await until(lambda: len(faulty.requests("GET")) == 3)
            assert (await store.head("body")) == info
            assert len(faulty.requests("GET")) == 3
            rule.release()


# --- what is said ---------------------------------------------------------------------


async def test_a_failed_request_is_one_line_in_the_log(
    shared: Bucket, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(shared, faulty, retry_time_s=0.5) as store:
        info = await store.head("body")
        faulty.add("GET", code="InternalError")
        with caplog.at_level(logging.WARNING, "fusefs"), pytest.raises(StoreError):
            await download(store, info)
    (record,) = caplog.records
    line = record.getMessage()
    for part in ("GET", f"s3://{shared.name}/body", "500", "InternalError", REQUEST_ID):
        assert part in line
    assert "\n" not in line


async def test_no_secret_is_in_the_log(
    shared: Bucket, faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fusefs"):
        for fault in ({"code": "AccessDenied"}, {"stall": True}, {"cut_after": 9}, {"status": 400}):
            faulty.clear()
            async with opened(shared, faulty, retry_time_s=0.1, read_timeout_s=0.2) as store:
                faulty.add(**fault)
                for ask in (store.list_page, store.head):
                    with contextlib.suppress(StoreError):
                        await ask("body")
                for key in ("body", ODD_KEY):
                    with contextlib.suppress(StoreError):
                        await download(store, ObjectVersion(key, '"x"', 10))
    assert caplog.records
    assert shared.server.secret_key not in caplog.text
    assert "Signature=" not in caplog.text


async def complaint(shared: Bucket, faulty: FaultyS3, **settings: Any) -> str:
    """What `check` says, which must be one line that does not sound like a library."""
    async with opened(shared, faulty, **settings) as store:
        with pytest.raises(StoreError) as raised:
            await store.check("")
    text = str(raised.value)
    assert "\n" not in text
    assert not any(word in text for word in ("Errno", "ListObjectsV2", "botocore", "HTTPConn"))
    return text


async def test_a_missing_bucket_is_named(shared: Bucket, faulty: FaultyS3) -> None:
    text = await complaint(shared, faulty, bucket="no-such-bucket")
    assert "s3://no-such-bucket/" in text
    assert "there is no such bucket" in text


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("AWS_ACCESS_KEY_ID", "UNKNOWN", "the access key is not known"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", "the secret key does not match"),
        ("AWS_ACCESS_KEY_ID", None, "no AWS credentials were found"),
        ("AWS_PROFILE", "nope", "there is no AWS profile 'nope'"),
    ],
)
async def test_wrong_credentials_are_told_apart(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch,
    name: str, value: str | None, part: str,
) -> None:  # fmt: skip
    if value is None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv(name, value)
    assert part in await complaint(shared, faulty)


async def test_a_profile_wins_over_keys_in_the_environment(
    shared: Bucket, faulty: FaultyS3
) -> None:
    assert "there is no AWS profile 'nope'" in await complaint(shared, faulty, profile="nope")


async def test_an_unreachable_endpoint_is_named_once(shared: Bucket, faulty: FaultyS3) -> None:
    text = await complaint(shared, faulty, endpoint_url="http://127.0.0.1:1")
    assert text.endswith("no connection to http://127.0.0.1:1: connection refused")


async def test_a_silent_endpoint_is_named(shared: Bucket, faulty: FaultyS3) -> None:
    faulty.add(stall=True)
    text = await complaint(shared, faulty, read_timeout_s=0.2)
    assert f"no answer from {faulty.endpoint_url} in time" in text


async def test_a_missing_ca_bundle_is_named(shared: Bucket, faulty: FaultyS3) -> None:
    assert "/nonexistent" in await complaint(shared, faulty, ca_bundle="/nonexistent")
