"""Uploads that stop and go on: cancelled, resumed by another process, aborted, partly copied."""

import json

import pytest
import trio

from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import without_token
from fusefs.store.interface import IF_ABSENT, Condition, IfMatch, ObjectInfo, UploadState, Write
from fusefs.store.s3.multipart import Upload
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import LocalFile, MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import METADATA, PART, digest, opened, put
from tests.support.waiting import eventually

# No answer; and what was sent comes to nothing.
HANG: dict[str, object] = {"stall": True, "code": "InternalError"}


@pytest.fixture
def file(make_file: MakeFile) -> LocalFile:
    """A file of four parts, the last a short one."""
    return make_file(3 * PART + 1000)


async def send(upload: Upload, file: LocalFile) -> None:
    """Send what is missing of the whole file."""
    await upload.send(file.fd, upload.missing(file.size), file.size)


async def finish(upload: Upload, file: LocalFile, condition: Condition = None) -> ObjectInfo:
    """Go on with an upload of another process to its end."""
    await upload.verify(file.fd, file.size)
    await send(upload, file)
    return await upload.complete(file.size, condition)


async def begun(bucket: Bucket, faulty: FaultyS3, file: LocalFile) -> UploadState:
    """Begin an upload and cancel it when two of its parts are there; the others hang."""
    rules = [faulty.add("PART", times=2), faulty.add("PART", **HANG)]
    async with opened(bucket, faulty) as store:
        upload = await store.begin_upload(
            "file", Write(metadata=METADATA, content_type="text/x-test")
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, upload, file)
            await eventually(lambda: len(upload.state.parts) == 2 and rules[1].used == 2)
            nursery.cancel_scope.cancel()
        state = upload.state
    faulty.clear()
    # As it would be on record.
    return UploadState.from_plain(json.loads(json.dumps(state.plain())))


async def test_another_process_sends_only_what_is_missing(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    state = await begun(bucket, faulty, file)
    upload = await store.resume_upload(state)
    assert upload.state == state
    info = await finish(upload, file, IF_ABSENT)
    assert info == await store.head("file")
    assert len(faulty.requests("PART")) == 2
    assert (without_token(info.metadata or {}), info.content_type) == (METADATA, "text/x-test")
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_a_part_that_is_on_record_but_not_in_the_bucket_is_sent(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    lost = faulty.add("PART", times=1, status=200, body=b"", headers={"etag": '"00"'})
    upload = await store.begin_upload("file")
    await send(upload, file)
    assert lost.used == 1
    resumed = await store.resume_upload(upload.state)
    assert len(resumed.state.parts) == 3
    await finish(resumed, file)
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_an_upload_that_was_completed_is_not_repeated(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    old = bucket.put("file", b"old")
    upload = await store.begin_upload("file", Write(metadata=METADATA, content_type=None))
    await send(upload, file)
    state = upload.state
    info = await upload.complete(file.size, IfMatch(old))
    faulty.clear()
    resumed = await store.resume_upload(state)
    assert await finish(resumed, file, IfMatch(old)) == info
    assert faulty.requests("PART") == faulty.requests("COMPLETE") == []


async def test_an_upload_that_was_aborted_cannot_be_resumed(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    state = await begun(bucket, faulty, file)
    await store.abort_upload(state.key, state.upload_id)
    await store.abort_upload(state.key, state.upload_id)
    with pytest.raises(NotFoundError):
        await store.resume_upload(state)
    assert keys(bucket) == []


async def test_uploads_are_listed_until_they_end(store: S3Store, file: LocalFile) -> None:
    uploads = [await store.begin_upload(key) for key in ("a/1", "a/2", "b/1")]
    listed = await store.list_uploads("a/")
    assert {(one.key, one.upload_id) for one in listed} == {
        (upload.state.key, upload.state.upload_id) for upload in uploads[:2]
    }
    await store.abort_upload("a/1", uploads[0].state.upload_id)
    await send(uploads[1], file)
    await uploads[1].complete(file.size)
    assert [one.key for one in await store.list_uploads("")] == ["b/1"]


async def test_a_cancelled_file_leaves_nothing_behind(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    rule = faulty.add("PART", **HANG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, store, "file", file)
        await eventually(lambda: rule.used == 3)  # one connection is kept for demands
        nursery.cancel_scope.cancel()
    faulty.clear()
    assert await store.list_uploads("") == []
    assert keys(bucket) == []


async def test_copied_parts_are_not_copied_again_after_a_restart(
    store: S3Store, bucket: Bucket, file: LocalFile
) -> None:
    old = await put(store, "file", file)
    upload = await store.begin_upload("new")
    for number, start in ((1, 0), (2, PART), (3, 2 * PART)):
        await upload.copy_part(number, old.version, start, start + PART)
    resumed = await store.resume_upload(upload.state)
    assert [part.number for part in resumed.state.parts] == [1, 2, 3]
    await resumed.verify(file.fd, file.size)
    assert resumed.missing(file.size) == [4]
    await send(resumed, file)
    await resumed.complete(file.size)
    assert digest(stored(bucket, "new")) == digest(file.data)


async def test_parts_of_another_version_are_not_copied(
    store: S3Store, bucket: Bucket, file: LocalFile
) -> None:
    old = await put(store, "file", file)
    bucket.put("file", b"another")
    upload = await store.begin_upload("file")
    with pytest.raises(StaleVersionError):
        await upload.copy_part(1, old.version, 0, PART)
    await store.abort_upload("file", upload.state.upload_id)
    assert stored(bucket, "file") == b"another"


MORE = "<IsTruncated>true</IsTruncated>"


@pytest.mark.parametrize(
    ("operation", "page"),
    [
        ("UPLOADS", MORE),
        ("UPLOADS", f"{MORE}<NextKeyMarker>a</NextKeyMarker>"),
        ("UPLOADS", "<Upload><Key>a</Key></Upload>"),
        ("PARTS", MORE),
        ("PARTS", f"{MORE}<NextPartNumberMarker>1</NextPartNumberMarker>"),
        ("PARTS", "<Part><PartNumber>1</PartNumber></Part>"),
    ],
)
async def test_an_odd_page_is_an_error_and_no_listing_without_an_end(
    store: S3Store, faulty: FaultyS3, operation: str, page: str
) -> None:
    root = {"UPLOADS": "ListMultipartUploadsResult", "PARTS": "ListPartsResult"}[operation]
    faulty.add(operation, status=200, body=f"<{root}>{page}</{root}>".encode())
    state = UploadState("file", "id", PART, METADATA)
    listing = store.list_uploads("") if operation == "UPLOADS" else store.resume_upload(state)
    with pytest.raises(StoreError):
        await listing
    assert len(faulty.requests(operation)) <= 2
