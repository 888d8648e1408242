"""What a store honours: found by trying, kept for a day, and nothing left in the bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusefs.store import capabilities, probing
from fusefs.store.capabilities import PROBE_NAME, Capabilities
from fusefs.store.errors import AccessDeniedError
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import opened

pytestmark = pytest.mark.usefixtures("as_owner")

PROBES = f"{PROBE_NAME}/*"
HONOURED = Capabilities(conditions=True, checksums=True)


async def test_this_server_honours_all_of_it_and_nothing_is_made(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
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
    bucket: Bucket, faulty: FaultyS3, operation: str, header: str, missing: str
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.add(operation, PROBES, ignored_header=header)
        found = await probing.probe(store, "", in_parts=operation == "COMPLETE")
    assert found.missing == [missing]
    assert keys(bucket, with_probes=True) == []


async def test_a_condition_that_is_not_implemented_is_not_honoured(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.add("PUT", PROBES, times=1, code="NotImplemented")
        assert (await probing.probe(store, "", in_parts=False)).missing == ["conditions"]


async def test_where_nothing_may_be_written_nothing_is_found(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with opened(bucket, faulty.endpoint_url) as store:
        faulty.clear()
        faulty.add(key=PROBES, code="AccessDenied")
        with pytest.raises(AccessDeniedError):
            await probing.probe(store, "", in_parts=False)
    assert len(faulty.requests(key=PROBES)) == 1


def test_what_was_found_is_kept_for_a_day_and_for_one_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Capabilities(conditions=True, checksums=False)
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
    capabilities.save(tmp_path, "here", HONOURED)
    [path] = tmp_path.iterdir()
    record = json.loads(path.read_text())
    for content in (text, *(json.dumps({**record, "found": found}) for found in ({"x": 1}, [], 1))):
        path.write_text(content)
        assert capabilities.load(tmp_path, "here") is None
