"""What a store honours: found by trying, kept for a day, and nothing left in the bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fusefs.settings.types import ConditionalWrites
from fusefs.store import capabilities, probing
from fusefs.store.capabilities import ALL, PROBE_NAME, Capabilities
from fusefs.store.errors import AccessDeniedError
from fusefs.store.interface import Expect
from tests.support.machine.local_file import LocalFile
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import opened, put

MakeFile = Callable[[int], LocalFile]

pytestmark = pytest.mark.usefixtures("as_owner")


async def test_this_server_honours_all_of_it_and_nothing_is_left(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        assert await probing.probe(store, "some/") == replace(ALL, marker_metadata=False)
    assert keys(bucket, with_probes=True) == []
    assert len(faulty.requests()) < 58


@pytest.mark.parametrize(
    ("operation", "header", "missing"),
    [
        ("PUT", "if-none-match", {"put_if_none_match", "marker_if_none_match"}),
        ("PUT", "if-match", {"put_if_match", "marker_if_match"}),
        ("COPY", "if-none-match", {"copy_if_none_match"}),
        ("COPY", "if-match", {"copy_if_match"}),
        ("COMPLETE", "if-none-match", {"complete_if_none_match"}),
        ("DELETE", "if-match", {"delete_if_match", "marker_delete_if_match"}),
        ("PUT", "x-amz-checksum-crc32", {"checksums"}),
    ],
)
async def test_what_a_store_ignores_is_found(
    bucket: Bucket, faulty: FaultyS3, operation: str, header: str, missing: set[str]
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.add(operation, ignored_header=header)
        found = await probing.probe(store, "")
    assert set(found.missing) == missing | {"marker_metadata"}
    assert keys(bucket, with_probes=True) == []


async def test_a_condition_that_is_not_implemented_is_not_honoured(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.add("DELETE MANY", times=1, code="NotImplemented")
        found = await probing.probe(store, "")
    assert found.delete_many_etags is False


async def test_what_a_killed_probe_left_is_deleted_later(
    bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(f"{PROBE_NAME}/0123/object", b"?")
    bucket.put("kept", b"1")
    async with opened(bucket, faulty.endpoint_url) as store:
        await probing.probe(store, "")
        assert keys(bucket, with_probes=True) == [f"{PROBE_NAME}/0123/object", "kept"]
        monkeypatch.setattr(probing, "LEFT_NS", -1_000_000_000)
        await probing.probe(store, "")
    assert keys(bucket, with_probes=True) == ["kept"]


async def test_where_nothing_may_be_written_nothing_is_found(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.clear()
        faulty.add("PUT", code="AccessDenied")
        with pytest.raises(AccessDeniedError):
            await probing.probe(store, "")
    assert len(faulty.requests()) == 1


def test_what_was_found_is_kept_for_a_day_and_for_one_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Capabilities(put_if_match=True, checksums=False)
    assert capabilities.load(tmp_path, "here/bucket") is None
    capabilities.save(tmp_path, "here/bucket", found)
    assert capabilities.load(tmp_path, "here/bucket") == found
    assert capabilities.load(tmp_path, "here/other") is None
    monkeypatch.setattr(capabilities, "KEPT_NS", 0)
    assert capabilities.load(tmp_path, "here/bucket") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"found": {"x": 1}}', "\0", '"capabilities"'],
)
def test_a_damaged_record_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    capabilities.save(tmp_path, "here", ALL)
    [path] = tmp_path.iterdir()
    record = json.loads(path.read_text())
    path.write_text(text)
    assert capabilities.load(tmp_path, "here") is None
    path.write_text(json.dumps({**record, "found": {"unheard_of": True}}))
    assert capabilities.load(tmp_path, "here") is None
    path.write_text(json.dumps(record))
    assert capabilities.load(tmp_path, "here") == ALL


async def test_a_condition_that_the_store_ignores_is_not_sent(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        store.fence.capabilities = Capabilities(put_if_none_match=False, put_if_match=True)
        made = await put(store, "file", make_file(10), Expect(None))
        await put(store, "file", make_file(11), Expect(made.etag))
    [first, second] = faulty.requests("PUT")
    assert "if-none-match" not in first.headers
    assert second.headers["if-match"] == made.etag


@pytest.mark.parametrize("mode", list(ConditionalWrites))
async def test_the_setting_decides_what_is_sent(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, mode: ConditionalWrites
) -> None:
    async with opened(bucket, faulty.endpoint_url, conditional_writes=mode) as store:
        made = await put(store, "file", make_file(10), Expect(None))
        await store.delete("file", made.etag)
    is_sent = mode != ConditionalWrites.OFF
    assert ("if-none-match" in faulty.requests("PUT")[0].headers) == is_sent
    assert ("if-match" in faulty.requests("DELETE")[0].headers) == is_sent
