"""What the store writes: contents, metadata, conditions, copies and deletes, on a real server."""

import errno
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from fusefs.store.engine.engine import FileBody
from fusefs.store.errors import ConflictError, ExistsError, StoreError
from fusefs.store.fencing import without_token
from fusefs.store.interface import IF_ABSENT, IfMatch, ObjectVersion
from fusefs.store.s3 import delete
from fusefs.store.s3 import put as writing
from fusefs.store.s3.access import Access
from fusefs.store.s3.address import Call
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import KEYS, METADATA, PART, digest, opened, put

SIZES = [0, 1, writing.SMALL, writing.SMALL + 1, PART - 1, PART, PART + 1, 2 * PART, 3 * PART + 17]


@pytest.mark.parametrize("key", KEYS)
async def test_a_file_arrives_as_it_is(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, key: str
) -> None:
    for size in SIZES:
        file = make_file(size)
        info = await put(direct, key, file)
        seen = await direct.head(key)
        assert digest(stored(bucket, key)) == digest(file.data)
        assert info.version == seen.version == ObjectVersion(key, info.etag, size)
        assert seen.metadata == info.metadata
        assert without_token(seen.metadata or {}) == METADATA
        assert seen.content_type == info.content_type == "text/x-test"
        assert abs(seen.mtime_ns - info.mtime_ns) < 60e9


async def test_a_file_of_many_parts_arrives_as_it_is(
    direct: S3Store, bucket: Bucket, make_file: MakeFile
) -> None:
    file = make_file(13 * PART + 1)
    info = await put(direct, "many", file)
    assert info == await direct.head("many")
    assert direct.counters()["puts"] == 14 + 2
    assert direct.counters()["bytes_sent"] == file.size
    assert digest(stored(bucket, "many")) == digest(file.data)


async def test_an_upload_does_not_hold_the_file_in_memory(
    direct: S3Store, make_file: MakeFile
) -> None:
    file = make_file(8 * PART)
    await put(direct, "warm", make_file(1))
    await put(direct, "warm", make_file(2 * PART))  # boto3 is imported by now
    tracemalloc.start()
    try:
        await put(direct, "large", file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * PART


async def test_only_the_first_bytes_of_a_file_are_sent(
    direct: S3Store, bucket: Bucket, make_file: MakeFile
) -> None:
    file = make_file(PART)
    await direct.put_file("short", file.fd, 1000)
    assert stored(bucket, "short") == file.data[:1000]


@pytest.mark.parametrize("size", [1000, writing.SMALL + 1, 2 * PART])
async def test_a_file_that_is_too_short_becomes_no_object(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, size: int
) -> None:
    file = make_file(size - 1)
    with pytest.raises(StoreError, match="became shorter"):
        await direct.put_file("short", file.fd, size)
    assert await direct.list_uploads("") == []
    assert keys(bucket) == []


@pytest.mark.parametrize("size", [1000, writing.SMALL + 1, 2 * PART])
async def test_a_file_that_cannot_be_read_becomes_no_object(
    direct: S3Store, bucket: Bucket, tmp_path: Path, size: int
) -> None:
    fd = os.open(tmp_path / "unreadable", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await direct.put_file("unreadable", fd, size)
    os.close(fd)
    assert keys(bucket) == []


@pytest.mark.parametrize("size", [10, 2 * PART])
async def test_metadata_named_as_headers_stay_metadata(
    direct: S3Store, make_file: MakeFile, size: int
) -> None:
    metadata = {"content-type": "mine", "cache-control": "mine too"}
    await put(direct, "named", make_file(size), metadata=metadata)
    seen = await direct.head("named")
    assert without_token(seen.metadata or {}) == metadata
    assert seen.content_type == "text/x-test"


async def test_metadata_that_are_no_headers_are_refused(
    direct: S3Store, make_file: MakeFile
) -> None:
    refused = (
        {"a": "ü"},
        {"a": " b"},
        {"a": ""},
        {"a": "b\nc: d"},
        {"a b": "c"},
        {"A": "b"},
        {"": "b"},
    )
    for file in (make_file(10), make_file(2 * PART)):
        for metadata in refused:
            with pytest.raises(ValueError, match="no metadata"):
                await put(direct, "refused", file, metadata=metadata)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("has_listed", [True, False])
async def test_a_head_tells_metadata_with_keys_in_lower_case(
    bucket: Bucket, key: str, has_listed: bool
) -> None:
    etag = bucket.put(key, b"x", Metadata={"Some-Key": "Some Value"}, StorageClass="STANDARD_IA")
    async with opened(bucket, bucket.server, has_listed=has_listed) as store:
        seen = await store.head(key)
        [listed] = (await store.list_page("", delimiter="")).objects
    assert without_token(seen.metadata or {}) == {"some-key": "Some Value"}
    assert listed == replace(seen, metadata=None, content_type=None)
    assert seen.version == ObjectVersion(key, etag, 1)


async def test_a_head_that_tells_nothing_is_requested_again(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    etag = bucket.put("file", b"x")
    rule = faulty.add("HEAD", times=2, status=200)
    assert (await store.head("file")).etag == etag
    assert rule.used == 2


def test_a_body_with_a_checksum_is_not_hashed_for_its_signature() -> None:
    access = Access(S3Settings("bucket", "https://127.0.0.1:9"))
    headers = {"x-amz-checksum-crc32": "AAAAAA=="}
    for query in ({}, {"uploadId": "1", "partNumber": 1}):
        call = Call("PUT", "PUT", "key", query, headers, FileBody(0, 0, 100))
        sent = dict(access.address.request(call, access.keys).headers)
        assert sent["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "x-amz-checksum-crc32" in sent["authorization"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", [10, 2 * PART])
async def test_a_new_object_is_made_only_where_there_is_none(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, size: int, key: str
) -> None:
    first, second = make_file(size), make_file(size)
    await put(direct, key, first, IF_ABSENT)
    with pytest.raises(ExistsError) as caught:
        await put(direct, key, second, IF_ABSENT)
    assert await direct.list_uploads("") == []
    assert caught.value.errno == errno.EEXIST
    assert stored(bucket, key) == first.data


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", [10, 2 * PART])
async def test_only_the_named_version_is_replaced(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, size: int, key: str
) -> None:
    first, second, third = make_file(100), make_file(size), make_file(size)
    old = await put(direct, key, first)
    await put(direct, key, second, IfMatch(old.etag))
    with pytest.raises(ConflictError) as caught:
        await put(direct, key, third, IfMatch(old.etag))
    assert caught.value.errno == errno.ESTALE
    assert stored(bucket, key) == second.data


@pytest.mark.parametrize("size", [10, 2 * PART])
async def test_a_version_that_was_deleted_is_not_replaced(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, size: int
) -> None:
    with pytest.raises(ConflictError) as caught:
        await put(direct, "gone", make_file(size), IfMatch('"00"'))
    assert caught.value.errno == errno.ESTALE
    assert keys(bucket) == []


async def test_many_objects_are_deleted_and_missing_ones_are_no_errors(
    direct: S3Store, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delete, "DELETES_AT_ONCE", 5)
    odd = ["a&b<c>", "quote\"'", "tab\there", "new\nline", "return\rhere", "odd\x01key", "ü 😀"]
    there = [f"dir/{number}" for number in range(10)] + odd
    for key in [*there, "stays"]:
        bucket.put(key, b"x")
    assert await direct.delete_many([*there, "missing", "missing too"]) == []
    # One of them is in no XML, and 18 take four batches.
    assert direct.counters()["deletes"] == 1 + 4
    assert keys(bucket) == ["stays"]
