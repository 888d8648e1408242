"""Writing to a store that fails in every way: no wrong object, no lost one, no false conflict."""

import errno

import pytest
import trio

from fusefs.store.errors import (
    AccessDeniedError,
    CredentialsError,
    StoreError,
    ThrottledError,
    UnsupportedError,
)
from fusefs.store.interface import IF_ABSENT, UploadLog
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import download
from tests.support.store_writing import PART, WAYS, digest, each_way, opened, put
from tests.support.waiting import eventually


@each_way
@pytest.mark.parametrize(
    "fault",
    [
        {"code": "SlowDown"},
        {"code": "InternalError"},
        {"code": "RequestTimeout"},
        {"cut_request_after": 500},
        {"corrupt": True},
        {"lose_answer": True},
        {"code": "OperationAborted", "status": 409},
        {"status": 200, "body": b""},
    ],
    ids=lambda fault: next(iter(fault.values())) if "code" in fault else next(iter(fault)),
)
async def test_what_failed_is_sent_again(
    store: S3Store,
    bucket: Bucket,
    faulty: FaultyS3,
    make_file: MakeFile,
    size: int,
    operation: str,
    fault: dict[str, object],
) -> None:
    file = make_file(size)
    rule = faulty.add(operation, times=2, **fault)
    info = await put(store, "file", file)
    assert store.counters()["retries"] == rule.used == 2
    assert info.version == (await store.head("file")).version
    assert digest(stored(bucket, "file")) == digest(file.data)
    # No other part was sent twice.
    assert len(faulty.requests(operation)) == (3 if operation == "PART" else 1) + 2


async def test_a_file_that_changes_while_it_is_sent_is_sent_as_it_is_now(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(WAYS[1][0])
    faulty.add("PUT", times=1, code="BadDigest", before=lambda: file.change(5, b"changed"))
    await put(store, "file", file)
    assert digest(stored(bucket, "file")) == digest(file.data)


@each_way
async def test_a_server_that_says_nothing_gets_the_request_again(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    file = make_file(size)
    faulty.add(operation, times=1, stall=True)
    async with opened(bucket, faulty, read_timeout_s=1.0) as store:
        await put(store, "file", file)
    assert digest(stored(bucket, "file")) == digest(file.data)


@pytest.mark.parametrize("operation", ["BEGIN", "COMPLETE"])
@pytest.mark.parametrize("fault", [{"code": "SlowDown"}, {"cut_request_after": 0}])
async def test_the_ends_of_an_upload_are_tried_again(
    store: S3Store,
    bucket: Bucket,
    faulty: FaultyS3,
    make_file: MakeFile,
    operation: str,
    fault: dict[str, object],
) -> None:
    file = make_file(2 * PART)
    faulty.add(operation, times=2, **fault)
    await put(store, "file", file)
    assert digest(stored(bucket, "file")) == digest(file.data)


@each_way
async def test_a_store_that_goes_on_failing_is_given_up(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    rule = faulty.add(operation, code="SlowDown")
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        with pytest.raises(ThrottledError):
            await put(store, "file", make_file(size))
        faulty.remove(rule)
        assert await store.list_uploads("") == []
    assert keys(bucket) == []


@each_way
async def test_what_is_forbidden_is_not_tried_again(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    faulty.add(operation, code="AccessDenied")
    async with opened(bucket, faulty, max_connections=1) as store:
        with pytest.raises(AccessDeniedError):
            await put(store, "file", make_file(size))
        assert store.counters()["retries"] == 0


@each_way
async def test_writes_that_collide_are_tried_again(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    file = make_file(size)
    ends = "COMPLETE" if operation == "PART" else "PUT"
    faulty.add(ends, times=2, code="ConditionalRequestConflict")
    await put(store, "file", file, IF_ABSENT)
    assert digest(stored(bucket, "file")) == digest(file.data)


@each_way
async def test_a_store_without_conditions_says_so(
    store: S3Store, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    ends = "COMPLETE" if operation == "PART" else "PUT"
    faulty.add(ends, code="NotImplemented")
    with pytest.raises(UnsupportedError) as caught:
        await put(store, "file", make_file(size), IF_ABSENT)
    assert store.counters()["retries"] == 0
    assert caught.value.errno == errno.EOPNOTSUPP


@each_way
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_an_upload_waits_for_credentials(
    bucket: Bucket,
    faulty: FaultyS3,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    operation: str,
    code: str,
) -> None:
    monkeypatch.setattr("fusefs.store.s3.access.RECONNECT_EVERY_S", 0.0)
    file = make_file(size)
    rule = faulty.add(operation, code=code)
    async with opened(bucket, faulty) as store, trio.open_nursery() as nursery:
        nursery.start_soon(put, store, "file", file)
        await eventually(lambda: store.counters()["retries"] > 0)
        faulty.remove(rule)
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_credentials_that_stay_rejected_are_an_error_of_their_own(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    faulty.add("PUT", code="InvalidAccessKeyId")
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        with pytest.raises(CredentialsError):
            await put(store, "file", make_file(10))


async def test_a_read_does_not_wait_for_rejected_credentials(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("file", b"there")
    faulty.add("GET", code="InvalidAccessKeyId")
    info = await store.head("file")
    with pytest.raises(CredentialsError):
        await download(store, info.version, 0, 5)
    assert store.counters()["retries"] == 0


def refusal(code: str, key: str) -> bytes:
    error = f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>"
    return f"<DeleteResult>{error}</DeleteResult>".encode()


async def test_what_is_gone_already_is_deleted(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    """AWS says nothing of it; Google's store does."""
    faulty.add("DELETE", code="NoSuchKey")
    await store.delete("gone")
    await store.delete("dir/")
    faulty.clear()
    faulty.add("DELETE", code="NoSuchBucket")
    with pytest.raises(StoreError, match="no such bucket"):
        await store.delete("there")


async def test_of_many_deletes_only_those_that_failed_are_tried_again(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    for key in ("one", "two"):
        bucket.put(key, b"x")
    faulty.add("DELETE MANY", times=2, status=200, body=refusal("InternalError", "two"))
    assert await store.delete_many(["one", "two"]) == []
    assert store.counters()["retries"] == 2
    # The server that failed deleted nothing, and "one" was not requested again.
    assert keys(bucket) == ["one"]


async def test_what_could_not_be_deleted_is_reported_with_its_reason(
    store: S3Store, faulty: FaultyS3
) -> None:
    faulty.add("DELETE MANY", status=200, body=refusal("AccessDenied", "kept"))
    [failure] = await store.delete_many(["gone", "kept"])
    assert failure.key == "kept"
    assert isinstance(failure.error, AccessDeniedError)


@pytest.mark.parametrize("body", [b"", b"<html>Sign in</html>"], ids=["empty", "page"])
async def test_an_answer_that_does_not_tell_of_deletes_is_no_success(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, body: bytes
) -> None:
    for key in ("one", "two"):
        bucket.put(key, b"x")
    faulty.add("DELETE MANY", times=1, status=200, body=body)
    assert await store.delete_many(["one", "two"]) == []
    assert store.counters()["retries"] == 1
    assert keys(bucket) == []


async def test_many_deletes_have_the_md5_that_some_stores_demand(
    store: S3Store, faulty: FaultyS3
) -> None:
    assert await store.delete_many(["one", "two"]) == []
    [request] = faulty.requests("DELETE MANY")
    assert len(request.headers["content-md5"]) == 24


async def test_many_deletes_that_fail_together_are_reported_one_by_one(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    faulty.add("DELETE*", code="SlowDown")
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        failures = await store.delete_many(["a", "b\x01", "c"])
    assert sorted(failure.key for failure in failures) == ["a", "b\x01", "c"]
    assert all(isinstance(failure.error, ThrottledError) for failure in failures)


class Log(UploadLog):
    """What is on record of the uploads that a store makes by itself."""

    def __init__(self) -> None:
        self.begun_ids: list[str] = []
        self.open: set[str] = set()
        self.left: list[tuple[str, str]] = []

    def begun(self, _key: str, upload_id: str) -> None:
        self.begun_ids.append(upload_id)
        self.open.add(upload_id)

    def ended(self, upload_id: str) -> None:
        self.open.remove(upload_id)

    def add(self, key: str, upload_id: str) -> None:
        self.left.append((key, upload_id))


@pytest.mark.parametrize("outcome", ["done", "aborted", "left"])
async def test_an_upload_of_the_stores_own_is_on_record_until_nothing_is_left_of_it(
    store: S3Store, faulty: FaultyS3, make_file: MakeFile, outcome: str
) -> None:
    if outcome != "done":
        faulty.add("PART", code="AccessDenied")
    if outcome == "left":
        faulty.add("ABORT", code="AccessDenied")
    file, log = make_file(2 * PART), Log()
    if outcome == "done":
        await store.put_file("file", file.fd, file.size, log=log)
    else:
        with pytest.raises(AccessDeniedError):
            await store.put_file("file", file.fd, file.size, log=log)
    [upload_id] = log.begun_ids
    assert log.open == ({upload_id} if outcome == "left" else set())
    assert log.left == ([("file", upload_id)] if outcome == "left" else [])
