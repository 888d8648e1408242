"""Writes whose answers are lost or lie: what happened is found out, or done again."""

from functools import partial

import pytest
import trio

from fusefs.store.errors import ExistsError, StoreError, UnreachableError
from fusefs.store.fencing import without_token
from fusefs.store.interface import IF_ABSENT, Write
from fusefs.store.s3 import copy
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import PART, digest, each_way, opened, put


@each_way
async def test_another_object_with_the_same_bytes_is_not_ones_own(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    file = make_file(size)
    ends = "COMPLETE" if operation == "PART" else "PUT"
    async with opened(bucket, bucket.server) as other, opened(bucket, faulty) as store:
        token = trio.lowlevel.current_trio_token()

        def overtake() -> None:
            send = partial(put, other, "file", file, metadata={"mtime": "2"})
            trio.from_thread.run(send, trio_token=token)

        faulty.add(ends, times=1, before=overtake, code="InternalError")
        with pytest.raises(ExistsError):
            await put(store, "file", file, IF_ABSENT)
        assert without_token((await store.head("file")).metadata or {}) == {"mtime": "2"}


async def test_a_head_decides_when_completing_gets_no_answer(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    faulty.add("COMPLETE", lose_answer=True)
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        info = await put(store, "file", file)
        assert info.version == (await store.head("file")).version
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_an_upload_that_was_not_completed_is_no_success(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    bucket.put("file", b"old")
    faulty.add("COMPLETE", cut_request_after=0)
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        with pytest.raises(UnreachableError):
            await put(store, "file", file)
        assert await store.list_uploads("") == []
    assert stored(bucket, "file") == b"old"


@pytest.mark.parametrize("body", [None, b"", b"\n\n"], ids=["error", "empty", "blank"])
@pytest.mark.parametrize(
    ("operation", "metadata"),
    [("COMPLETE", None), ("COPY", None), ("COPY", {"new": "1"}), ("PART COPY", None)],
)
async def test_an_error_with_status_200_is_an_error(
    store: S3Store,
    bucket: Bucket,
    faulty: FaultyS3,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    body: bytes | None,
    metadata: dict[str, str] | None,
) -> None:
    if operation == "PART COPY":
        monkeypatch.setattr(copy, "COPY_LIMIT", PART)
    file = make_file(2 * PART)
    rule = faulty.add(operation, times=2, status=200, code="InternalError", body=body)
    info = await put(store, "file", file)
    await store.copy(info.version, "copy", Write(metadata=metadata))
    assert rule.used == 2
    assert digest(stored(bucket, "copy")) == digest(file.data)


async def test_a_copy_at_a_time_that_is_none_is_done(
    store: S3Store, faulty: FaultyS3, make_file: MakeFile
) -> None:
    body = (
        b"<CopyObjectResult><ETag>&quot;e&quot;</ETag>"
        b"<LastModified>Mon, 23 Nov 2026 10:00:00 GMT</LastModified></CopyObjectResult>"
    )
    faulty.add("COPY", status=200, is_done=True, body=body)
    info = await put(store, "file", make_file(1000))
    assert (await store.copy(info, "copy")).etag == '"e"'


async def test_an_upload_that_only_fails_with_status_200_is_given_up(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    faulty.add("COMPLETE", status=200, code="InternalError")
    async with opened(bucket, faulty, retry_time_s=0.5) as store:
        with pytest.raises(UnreachableError):
            await put(store, "file", make_file(2 * PART))
        assert await store.list_uploads("") == []
    assert keys(bucket) == []


async def test_a_part_that_the_bucket_lost_is_an_error(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(3 * PART)
    faulty.add("PART", times=1, status=200, body=b"", headers={"etag": '"00"'})
    with pytest.raises(StoreError, match="does not have all the parts"):
        await put(store, "file", file)
    assert await store.list_uploads("") == []
    assert keys(bucket) == []
    await put(store, "file", file)
    assert digest(stored(bucket, "file")) == digest(file.data)
