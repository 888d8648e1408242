"""Uploads of files that change while they are sent: they grow, shrink, and get other bytes."""

import os

import pytest
import trio

from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.s3.multipart import Upload
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import LocalFile, MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import PART, digest, opened
from tests.support.waiting import eventually


@pytest.fixture
async def upload(store: S3Store) -> Upload:
    """An upload of "file" that has been begun."""
    return await store.begin_upload("file")


@pytest.fixture
def file(make_file: MakeFile) -> LocalFile:
    """A file of a part and a bit."""
    return make_file(PART + 1000)


async def test_the_last_part_of_a_file_that_has_grown_is_missing(
    upload: Upload, bucket: Bucket, file: LocalFile
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    assert upload.missing(file.size) == []
    file.append(1)
    with pytest.raises(ValueError, match="1 parts are missing"):
        await upload.complete(file.size)
    assert upload.missing(file.size) == [2]
    await upload.send(file.fd, [2], file.size)
    await upload.complete(file.size)
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_a_file_that_was_cut_short_is_complete_without_its_end(
    upload: Upload, bucket: Bucket, file: LocalFile
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    await upload.complete(PART)
    assert digest(stored(bucket, "file")) == digest(file.data[:PART])


async def test_a_part_that_is_written_to_again_is_sent_again(
    upload: Upload, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    file.change(5, b"changed")
    upload.drop(upload.part_at(5))
    assert [upload.has(number) for number in (1, 2)] == [False, True]
    assert [part.number for part in upload.state.parts] == [2]
    await upload.send(file.fd, upload.missing(file.size), file.size)
    await upload.complete(file.size)
    assert len(faulty.requests("PART")) == 3
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_two_who_send_one_part_wait_for_one_another(
    bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    rule = faulty.add("PART", times=1, stall=True)
    async with opened(bucket, faulty, read_timeout_s=60.0) as store:
        upload = await store.begin_upload("file")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload.send, file.fd, [1], file.size)
            await eventually(lambda: rule.used == 1)
            file.change(5, b"changed")
            upload.drop(1)
            nursery.start_soon(upload.send, file.fd, [1, 2], file.size)
            await eventually(lambda: upload.has(2))
            assert len(faulty.requests("PART")) == 2
            rule.release()
        await upload.complete(file.size)
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_a_part_that_changes_while_it_is_sent_is_sent_as_it_is_now(
    upload: Upload, bucket: Bucket, faulty: FaultyS3, file: LocalFile
) -> None:
    faulty.add("PART", times=1, code="BadDigest", before=lambda: file.change(5, b"changed"))
    for number in upload.missing(file.size):
        await upload.send(file.fd, [number], file.size)
    await upload.complete(file.size)
    assert digest(stored(bucket, "file")) == digest(file.data)


async def test_a_part_that_somebody_else_has_sent_is_not_sent_again(
    upload: Upload, faulty: FaultyS3, file: LocalFile
) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(upload.send, file.fd, [1], file.size)
    assert upload.has(1)
    assert len(faulty.requests("PART")) == 1


async def test_what_has_not_been_verified_is_missing(
    store: S3Store, upload: Upload, file: LocalFile
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    resumed = await store.resume_upload(upload.state)
    assert resumed.missing(file.size) == [1, 2]
    assert resumed.state == upload.state
    file.change(5, b"changed")
    await resumed.verify(file.fd, file.size)
    assert resumed.missing(file.size) == [1]
    assert [part.number for part in resumed.state.parts] == [2]


async def test_a_file_that_is_too_short_cannot_be_verified(
    store: S3Store, upload: Upload, file: LocalFile
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    resumed = await store.resume_upload(upload.state)
    size = file.size
    os.truncate(file.path, PART)
    with pytest.raises(StoreError, match="became shorter"):
        await resumed.verify(file.fd, size)


@pytest.mark.parametrize("is_longer", [False, True])
async def test_an_upload_that_was_completed_with_other_bytes_is_reported(
    store: S3Store, upload: Upload, bucket: Bucket, file: LocalFile, is_longer: bool
) -> None:
    await upload.send(file.fd, [1, 2], file.size)
    state = upload.state
    await upload.complete(file.size)
    if is_longer:
        os.truncate(file.path, PART)
    else:
        file.change(5, b"changed")
    resumed = await store.resume_upload(state)
    with pytest.raises(NotFoundError, match="other bytes"):
        await resumed.verify(file.fd, file.path.stat().st_size)
    assert keys(bucket) == ["file"]
