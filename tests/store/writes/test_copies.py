"""Copies on the server, on a real one: what they keep, what they replace, and what they cost."""

import pytest

from fusefs.store.errors import ExistsError, NotFoundError, StaleVersionError, UnsupportedError
from fusefs.store.fencing import CHANGE, without_token
from fusefs.store.interface import IF_ABSENT, Expect, ObjectInfo, ObjectVersion, Revision, Write
from fusefs.store.s3 import copy, multipart
from fusefs.store.s3.address import Call
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import MakeFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import KEYS, METADATA, PART, REVISE, digest, opened, put


@pytest.fixture(params=[False, True], ids=["whole", "in parts"])
def copied_in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(copy, "COPY_LIMIT", PART)
        monkeypatch.setattr(multipart, "COPY_PART", PART)
    return bool(request.param)


@pytest.mark.usefixtures("copied_in_parts")
@pytest.mark.parametrize("has_listed", [True, False])
async def test_a_copy_has_what_its_source_has(
    bucket: Bucket, make_file: MakeFile, has_listed: bool
) -> None:
    file = make_file(3 * PART + 5)
    async with opened(bucket, bucket.server, has_listed=has_listed) as store:
        source = await put(store, KEYS[0], file)
        copied = await store.copy(source.version, "a copy/ü")
        seen = await store.head("a copy/ü")
    assert copied == seen
    assert (without_token(seen.metadata or {}), seen.content_type) == (METADATA, "text/x-test")
    assert digest(stored(bucket, "a copy/ü")) == digest(file.data)


async def test_what_is_too_large_for_one_copy_is_not_copied_from_a_similar_name(
    direct: S3Store, bucket: Bucket, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceph's gateway would take that for the source of the parts, and what is renamed be lost."""
    monkeypatch.setattr(copy, "LARGEST_COPY", PART)
    monkeypatch.setattr(multipart, "COPY_PART", PART)
    file = make_file(2 * PART)
    source = await put(direct, "a%20b", file)
    await direct.copy(source.version, "copy")
    assert digest(stored(bucket, "copy")) == digest(file.data)
    bucket.put("a b", b"another")
    with pytest.raises(UnsupportedError):
        await direct.copy(source.version, "other")
    assert "other" not in keys(bucket)


@pytest.mark.parametrize("key", ["it's/~a+b %20&=?#*()!@:,;$[]", *KEYS])
async def test_what_was_listed_is_copied_with_one_request(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, key: str
) -> None:
    bucket.put(key, b"x", Metadata={"mode": "1"}, StorageClass="STANDARD_IA")
    [listed] = (await store.list_page("", delimiter="")).objects
    faulty.clear()
    copied = await store.copy(listed, key + "2")
    assert [request.operation for request in faulty.requests()] == ["COPY"]
    seen = await store.head(key + "2")
    assert (copied.version, copied.mtime_ns) == (seen.version, seen.mtime_ns)
    assert copied.storage_class == seen.storage_class == "STANDARD_IA"
    assert (copied.metadata, seen.metadata) == (None, {"mode": "1"})


@pytest.mark.usefixtures("copied_in_parts")
async def test_a_copy_with_other_metadata_keeps_the_rest(
    direct: S3Store, bucket: Bucket, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    kept = {"ContentType": "a/b", "CacheControl": "no-cache", "ContentEncoding": "x"}
    etag = bucket.put("source", file.data, Metadata={"old": "1"}, Tagging="a=b%26c&d=", **kept)
    await direct.copy(
        ObjectVersion("source", etag, file.size), "copy", Write(metadata={"new": "2"})
    )
    assert without_token((await direct.head("copy")).metadata or {}) == {"new": "2"}
    answer = bucket.client.head_object(Bucket=bucket.name, Key="copy")
    assert {name: answer[name] for name in kept} == kept
    tags = bucket.client.get_object_tagging(Bucket=bucket.name, Key="copy")["TagSet"]
    assert {tag["Key"]: tag["Value"] for tag in tags} == {"a": "b&c", "d": ""}


@pytest.mark.usefixtures("copied_in_parts")
async def test_a_copy_without_room_for_a_token_is_known_though_its_answer_was_lost(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    etag = bucket.put("source", file.data, Metadata={"long": "x" * 2000})
    faulty.add("COMPLETE", lose_answer=True, times=1)
    source = ObjectVersion("source", etag, file.size)
    copied = await store.copy(source, "copy", Write(condition=Expect(None)))
    assert copied == await store.head("copy")


async def test_letters_with_the_bytes_of_odd_blanks_are_kept(
    direct: S3Store, bucket: Bucket
) -> None:
    name = 'attachment; filename="\xd0\xa0\xd1\x85"'  # two Cyrillic letters
    call = Call("PUT", "PUT", "source", headers={"content-disposition": name}, body=b"x")
    await direct.requester.send(call, lambda _: None)
    await direct.copy(await direct.head("source"), "copy", Write(metadata={"new": "2"}))
    copied = bucket.client.head_object(Bucket=bucket.name, Key="copy")
    assert copied["ContentDisposition"] == name


async def test_what_is_missing_or_of_another_version_is_not_copied(
    direct: S3Store, bucket: Bucket, make_file: MakeFile
) -> None:
    old = await put(direct, "source", make_file(100))
    await put(direct, "source", make_file(100))
    for source in (old, old.version):
        with pytest.raises(StaleVersionError):
            await direct.copy(source, "copy")
    for missing in (ObjectVersion("missing", '"00"', 1), ObjectInfo("missing", 1, '"00"', 0)):
        with pytest.raises(NotFoundError):
            await direct.copy(missing, "copy")
    assert keys(bucket) == ["source"]


@pytest.mark.usefixtures("copied_in_parts")
async def test_copies_are_told_apart(direct: S3Store, bucket: Bucket, make_file: MakeFile) -> None:
    """Other clients write other contents with the same token."""
    for file in (make_file(2 * PART), make_file(2 * PART)):
        etag = bucket.put("source", file.data, Metadata={CHANGE: f"{1:016}-1"})
        version = ObjectVersion("source", etag, file.size)
        await direct.copy(version, "copy", Write(condition=Expect(None)))
        assert stored(bucket, "copy") == file.data


@pytest.mark.usefixtures("copied_in_parts")
async def test_where_there_was_to_be_nothing_nothing_is_replaced(
    direct: S3Store, bucket: Bucket, make_file: MakeFile
) -> None:
    file = make_file(2 * PART)
    source = await put(direct, "source", file)
    await put(direct, "there", make_file(5))
    for revise in (REVISE, None):
        with pytest.raises(ExistsError):
            await direct.copy(source, "there", Write(revise=revise, condition=IF_ABSENT))
    await direct.copy(source, "new", Write(condition=IF_ABSENT))
    assert len(stored(bucket, "there")) == 5
    assert stored(bucket, "new") == file.data


@pytest.mark.parametrize("revise", [REVISE, None])
async def test_a_copy_whose_answer_was_lost_is_not_in_its_own_way(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, revise: Revision | None
) -> None:
    etag = bucket.put("source", b"x")
    faulty.add("COPY", lose_answer=True, times=1)
    source = ObjectInfo("source", 1, etag, 0)
    await store.copy(source, "copy", Write(revise=revise, condition=IF_ABSENT))
    assert len(faulty.requests("COPY")) == 2
    with pytest.raises(ExistsError):
        await store.copy(source, "copy", Write(revise=revise, condition=IF_ABSENT))


async def test_a_store_without_conditions_of_copies_copies(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    etag = bucket.put("source", b"x")
    faulty.add("COPY", code="NotImplemented", times=1)
    await store.copy(ObjectInfo("source", 1, etag, 0), "copy", Write(condition=IF_ABSENT))
    assert stored(bucket, "copy") == b"x"
