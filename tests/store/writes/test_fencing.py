"""Conditions and tokens: what a store honours, and what is sent late, twice, or over another's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusefs.store import capabilities, probing
from fusefs.store.capabilities import PROBE_NAME, Capabilities
from fusefs.store.errors import StaleVersionError
from fusefs.store.fencing import CHANGE, ChangeToken, TokenSource, without_token
from fusefs.store.interface import IF_ABSENT, Expect, IfMatch, Write
from fusefs.store.s3 import copy
from fusefs.store.s3.requester import ChangeUnderWay
from fusefs.store.s3.store import S3Store
from tests.support.machine.local_file import LocalFile
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import METADATA, PART, REVISE, each_way, put

MakeFile = Callable[[int], LocalFile]


def test_a_token_is_read_as_it_was_written_and_nothing_else_is() -> None:
    source = TokenSource()
    token = source.next()
    assert (token.number, source.next().number) == (1, 2)
    assert ChangeToken.parse({CHANGE: str(token)}) == token
    for text in ("", "1", "x-1", f"{token}x", f"{token.mount}-", f"{token.mount}-{10**17}"):
        assert ChangeToken.parse({CHANGE: text}) is None
    assert ChangeToken.parse(None) is None
    assert TokenSource().mount != source.mount


@each_way
async def test_a_change_is_known_by_the_token_that_its_caller_took(
    direct: S3Store, make_file: MakeFile, size: int, operation: str
) -> None:
    token = direct.tokens.next()
    info = await put(direct, "file", make_file(size), Expect(None), token=token)
    assert (await direct.head("file")).token == info.token == token
    described = await direct.copy(info.version, "file", Write(metadata={"a": "1"}))
    assert described.token == (await direct.head("file")).token
    assert described.token not in (None, token)
    renamed = await direct.copy(described, "new", Write(condition=Expect(None)))
    assert (await direct.head("new")).token == renamed.token == described.token


@pytest.mark.parametrize(
    ("fault", "is_doubtful"),
    [
        ({"status": 502, "body": b""}, True),
        ({"status": 524, "body": b""}, True),
        ({"status": 503, "body": b"upstream connect error"}, True),
        ({"code": "SlowDown"}, False),
    ],
)
async def test_a_gateway_that_gives_up_does_not_say_that_a_change_was_refused(
    store: S3Store, faulty: FaultyS3, fault: dict[str, Any], is_doubtful: bool
) -> None:
    """524: Cloudflare got no answer in time from the server, which goes on."""
    change = ChangeUnderWay(["file"])
    store.requester.changes.add(change)
    faulty.add("DELETE", times=1, **fault)
    await store.delete("file")
    assert change.is_doubtful == is_doubtful
    assert store.counters()["throttled"] == (fault.get("status", 503) == 503)


@each_way
async def test_a_write_whose_answer_was_lost_is_known_again(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, size: int, operation: str
) -> None:
    last = "COMPLETE" if operation == "PART" else "PUT"
    for condition in (Expect(None), None, IF_ABSENT):
        faulty.add(last, lose_answer=True, times=1)
        file = make_file(size)
        if condition == IF_ABSENT:
            bucket.delete("file")
        old = condition or IfMatch((await store.head("file")).etag)
        info = await put(store, "file", file, old)
        assert without_token(info.metadata or {}) == METADATA
        assert (await store.head("file")).etag == info.etag
        assert stored(bucket, "file") == file.data


@each_way
async def test_another_clients_object_is_replaced_by_who_writes_last(
    store: S3Store, bucket: Bucket, make_file: MakeFile, size: int, operation: str
) -> None:
    """Whatever the mount expected: nothing, another object, or one that is gone."""
    for expected in (Expect(None), Expect('"0123"')):
        bucket.put("file", b"theirs")
        file = make_file(size)
        info = await put(store, "file", file, expected)
        assert stored(bucket, "file") == file.data
        assert (await store.head("file")).etag == info.etag
    bucket.delete("file")
    await put(store, "file", file, Expect(info.etag))
    assert stored(bucket, "file") == file.data


async def test_a_server_that_refuses_the_etag_that_it_tells_gets_the_change_without_one(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    info = await put(store, "file", make_file(10))
    faulty.add("PUT", code="PreconditionFailed", times=1)
    file = make_file(20)
    await put(store, "file", file, Expect(info.etag))
    assert "if-match" not in faulty.requests("PUT")[-1].headers
    faulty.add("DELETE", code="PreconditionFailed", times=1)
    await store.delete("file", (await store.head("file")).etag)
    assert keys(bucket) == []


async def test_a_condition_that_is_not_implemented_is_left_out_from_then_on(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    for operation in ("PUT", "COPY", "DELETE"):
        faulty.add(operation, times=1, code="NotImplemented")
    info = await put(store, "a", make_file(10), Expect(None))
    await put(store, "b", make_file(10), Expect(None))
    assert ["if-none-match" in one.headers for one in faulty.requests("PUT")] == [
        True,
        False,
        False,
    ]
    await store.copy(info, "c", Write(condition=Expect(None)))
    await store.delete("a", info.etag)
    await store.delete("b", '"other"')
    assert keys(bucket) == ["c"]
    assert store.fence.describe()["missing"] == [
        "If-Match of DELETE",
        "If-None-Match of CopyObject",
        "If-None-Match of PUT",
    ]


@pytest.mark.parametrize("in_parts", [False, True])
async def test_a_copy_goes_over_what_is_there_by_then(
    direct: S3Store,
    bucket: Bucket,
    make_file: MakeFile,
    monkeypatch: pytest.MonkeyPatch,
    in_parts: bool,
) -> None:
    if in_parts:
        monkeypatch.setattr(copy, "COPY_LIMIT", 100)
    file = make_file(2 * PART if in_parts else 1000)
    source = await put(direct, "source", file)
    for expected in (Expect(None), Expect('"0123"')):
        bucket.put("copy", b"theirs")
        for revise in (None, REVISE):
            await direct.copy(source, "copy", Write(revise=revise, condition=expected))
            assert stored(bucket, "copy") == file.data
    bucket.delete("copy")
    await direct.copy(source, "copy", Write(condition=Expect('"0123"')))
    assert stored(bucket, "copy") == file.data


async def test_a_copy_over_an_expected_object_still_wants_its_source(
    direct: S3Store, make_file: MakeFile
) -> None:
    old = await put(direct, "source", make_file(100))
    await put(direct, "source", make_file(100))
    there = await put(direct, "copy", make_file(10))
    for expected in (Expect(None), Expect(there.etag), IfMatch(there.etag)):
        with pytest.raises(StaleVersionError):
            await direct.copy(old, "copy", Write(condition=expected))
    assert (await direct.head("copy")).etag == there.etag
    with pytest.raises(StaleVersionError):
        await direct.copy(old, "new", Write(condition=IF_ABSENT))


async def test_changed_attributes_whose_answer_was_lost_are_known_again(
    store: S3Store, faulty: FaultyS3, make_file: MakeFile
) -> None:
    info = await put(store, "file", make_file(3 * PART))
    faulty.add("COPY", lose_answer=True, times=1)
    changed = await store.copy(info.version, "file", Write(metadata={"mode": "1"}))
    assert (await store.head("file")).token == changed.token


@pytest.mark.parametrize("adopts", [False, True])
async def test_a_repeated_delete_removes_nothing_of_anothers(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, adopts: bool
) -> None:
    etag = bucket.put("file", b"ours")
    faulty.add("DELETE", lose_answer=True, times=1)
    faulty.add("DELETE", times=1, before=lambda: bucket.put("file", b"theirs"))
    await store.delete("file", etag, adopts=adopts)
    assert len(faulty.requests("DELETE")) == 2
    assert stored(bucket, "file") == b"theirs"


async def test_a_delete_goes_over_another_object_only_where_it_adopts(
    direct: S3Store, bucket: Bucket
) -> None:
    bucket.put("file", b"theirs")
    await direct.delete("file", '"0123"')
    assert keys(bucket) == ["file"]
    await direct.delete("file", '"0123"', adopts=True)
    assert keys(bucket) == []


async def test_of_many_only_those_that_are_meant_are_deleted(
    store: S3Store, bucket: Bucket
) -> None:
    etags = {key: bucket.put(key, key.encode()) for key in ("a", "b", "c", "odd\x01", "dir/")}
    bucket.put("b", b"theirs")
    bucket.delete("c")
    assert await store.delete_many([*etags, "unknown"], etags) == []
    assert keys(bucket) == ["b"]


async def test_many_deletes_that_are_repeated_remove_nothing_of_anothers(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    etags = {key: bucket.put(key, b"ours") for key in ("a", "b")}
    faulty.add("DELETE MANY", lose_answer=True, times=1)
    faulty.add("DELETE MANY", times=1, before=lambda: bucket.put("b", b"theirs"))
    assert await store.delete_many(etags, etags) == []
    assert keys(bucket) == ["b"]


async def test_etags_of_deletes_that_a_store_ignores_are_not_relied_on(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    """A store that honours no If-Match of DELETE: what DeleteObjects refuses stays."""
    etags = {key: bucket.put(key, b"ours") for key in ("a", "b")}
    bucket.put("b", b"theirs")
    faulty.add("DELETE", ignored_header="if-match")
    assert await store.delete_many(etags, etags) == []
    assert keys(bucket) == ["b"]


PROBES = f"{PROBE_NAME}/*"
HONOURED = Capabilities(conditions=True, checksums=True)


async def test_this_server_honours_all_of_it_and_nothing_is_made(
    store: S3Store, bucket: Bucket, faulty: FaultyS3
) -> None:
    for in_parts in (False, True):
        assert await probing.probe(store, "some/", in_parts=in_parts) == HONOURED
    assert keys(bucket, with_probes=True) == []
    sent = [one.operation for one in faulty.requests(key=f"some/{PROBES}")]
    assert sent[:4] == ["PUT", "HEAD", "PUT", "BEGIN"]
    assert "DELETE MANY" not in sent


@pytest.mark.parametrize(
    ("operation", "header", "missing"),
    [
        ("PUT", "if-match", "conditions"),
        ("COMPLETE", "if-match", "conditions"),
        ("PUT", "x-amz-checksum-crc32", "checksums"),
    ],
)
async def test_what_a_store_ignores_is_found(
    store: S3Store, bucket: Bucket, faulty: FaultyS3, operation: str, header: str, missing: str
) -> None:
    faulty.add(operation, PROBES, ignored_header=header)
    found = await probing.probe(store, "", in_parts=operation == "COMPLETE")
    assert found.missing == [missing]
    assert keys(bucket, with_probes=True) == []


async def test_a_condition_that_is_not_implemented_is_not_honoured(
    store: S3Store, faulty: FaultyS3
) -> None:
    faulty.add("PUT", PROBES, times=1, code="NotImplemented")
    assert (await probing.probe(store, "", in_parts=False)).missing == ["conditions"]


def test_what_was_found_is_kept_for_a_day_and_for_one_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Capabilities(conditions=True, checksums=False)
    assert capabilities.load(tmp_path, "here/bucket") is None
    capabilities.save(tmp_path, "here/bucket", found)
    assert capabilities.load(tmp_path, "here/bucket") == found
    assert capabilities.load(tmp_path, "here/other") is None
    monkeypatch.setattr(capabilities, "KEPT_S", 0.0)
    assert capabilities.load(tmp_path, "here/bucket") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"x": 1}', "\0", '"x"', '{"conditions": [], "checksums": 7}'],
)
def test_a_damaged_record_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    capabilities.save(tmp_path, "here", HONOURED)
    [path] = tmp_path.iterdir()
    path.write_text(text)
    assert capabilities.load(tmp_path, "here") is None
