"""Cached copies compared by request (`fusefs verify`) and in the background (the scrub)."""

import random
from pathlib import Path

import pytest
import trio

from fusefs.cache.integrity import scrub
from fusefs.cache.integrity.scrub import Scrub
from tests.support.local_cache import Parts, cache_in, version
from tests.support.machine.damage import cached, flip
from tests.support.mounting import Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.waiting import eventually

MIB = 1 << 20
SMALL = random.Random(1).randbytes(50_000)
LARGE = version("large", 17 * MIB + 5)
OTHER = version("other", 100_000)


@states(
    "`fusefs verify PATH` compares what is cached at or below a path with its checksums, as it is"
    " on the disk; it fails if something that differs cannot be fetched again, or something could"
    " not be compared."
)
def test_what_differs_is_named_and_fetched_again(bucket: Bucket, mounter: Mounter) -> None:
    for name in ("dir/one", "dir/two", "beside"):
        bucket.put(name, SMALL)
    made = mounter()
    assert (made.path / "dir/one").read_bytes() == SMALL
    (copy,) = cached(made.cache)
    flip(copy, 30_000)
    for name in ("dir/two", "beside"):
        assert (made.path / name).read_bytes() == SMALL
    beside = fusefs("verify", made.path / "beside")
    assert "1 files" in beside.stdout
    assert "0 differed" in beside.stdout
    found = fusefs("verify", made.path / "dir")
    assert "dir/one: the cached copy differed" in found.stdout
    assert "2 files" in found.stdout
    assert "1 differed" in found.stdout
    assert all(path.read_bytes() == SMALL for path in cached(made.cache))
    assert len(cached(made.cache)) == 3
    assert (made.path / "dir/one").read_bytes() == SMALL
    assert "0 differed" in fusefs("verify", made.path).stdout
    assert made.status()["integrity"]["differed_files"] == 1


def test_what_cannot_be_fetched_again_makes_it_fail(
    bucket: Bucket, mounter: Mounter, faulty: FaultyS3
) -> None:
    faulty.clear()
    bucket.put("file", SMALL)
    made = mounter("--retry-time", "1s", endpoint_url=faulty.endpoint_url)
    assert (made.path / "file").read_bytes() == SMALL
    (copy,) = cached(made.cache)
    flip(copy, 100)
    faulty.add("GET", status=500)
    try:
        failed = fusefs("verify", made.path, check=False)
    finally:
        faulty.clear()
    assert failed.returncode == 1
    assert "could not be fetched again" in failed.stdout
    assert (made.path / "file").read_bytes() == SMALL


async def scrubbed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Scrub:
    """The scrub of a cache, after its first round."""
    monkeypatch.setattr(scrub, "START_AFTER_S", 0.0)
    cache = parts.cache
    made = Scrub(cache.residency.pages, cache.measure, cache.integrity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await eventually(lambda: made.describe()["state"] == "done")
        nursery.cancel_scope.cancel()
    return made


@states(
    "Larger files are compared with their checksums in the background, once after each start, and"
    " all files once a week."
)
async def test_the_scrub_drops_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(LARGE)
        await parts.fetch(OTHER)
        files = parts.files()
    for path in files:
        flip(path, 70_000)
    async with cache_in(tmp_path) as parts:
        made = await scrubbed(parts, monkeypatch)
        assert made.describe()["done_files"] == parts.cache.integrity.differed == 1
        assert parts.cache.find(LARGE) is None
        assert parts.cache.find(OTHER) is not None
        await made.scrub(0)
        assert parts.cache.integrity.differed == 2
        assert parts.cache.find(OTHER) is None
        await parts.fetch(LARGE)


async def test_the_scrub_keeps_what_is_right_and_sums_what_had_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(LARGE)
        await parts.cache.record()
        parts.cache._catalog._db.execute("DROP TABLE sums")  # as in an old catalog
    async with cache_in(tmp_path) as parts:
        await scrubbed(parts, monkeypatch)
        file = parts.cache.find(LARGE)
        assert file.is_checked
        (path,) = parts.files()
        flip(path, 5)
        await parts.cache.integrity.examine(file)
        assert parts.cache.find(LARGE) is None


async def test_a_file_that_goes_while_it_is_examined_is_left(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OTHER)
        file = parts.cache.find(OTHER)
        assert file is not None
        parts.files()[0].unlink()
        examined = await parts.cache.integrity.examine(file)
        assert (examined.fault, examined.is_whole) == (None, False)
