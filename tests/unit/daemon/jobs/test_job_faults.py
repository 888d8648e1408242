"""Jobs beside changes and faults: pins, lists and drops."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from fusefs.daemon.jobs import cache_warmer
from fusefs.daemon.jobs.cache_warmer import CacheWarmer, JobSpec
from fusefs.daemon.jobs.selection import Selector
from fusefs.posix.namespace.relocate import Relocator
from fusefs.settings.mount import MountSettings, MountSource
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from tests.support.local_cache import FRESH, LIST, Bucket, cache_in, info, jobs_in
from tests.support.semantics import states
from tests.support.waiting import eventually


def faulty(what: str, _key: str) -> None:
    if what == "LIST":
        raise AssertionError("a fault")


async def test_a_fault_ends_a_job_and_not_each_daemon_that_finds_it_on_record(
    tmp_path: Path,
) -> None:
    bucket = Bucket(["a"])
    bucket.before = faulty
    async with jobs_in(tmp_path, bucket) as jobs:
        job = await jobs.warmer.start(JobSpec("a"))
        await job.ended.wait()
        assert "fault" in (job.why or "")
        await eventually(lambda: jobs.warmer._record.read_text() == "[]")
        look = jobs.copies.job("a", is_new=True)
        await eventually(lambda: look.has_ended)
        assert "fault" in (look.why or "")


async def test_the_catalog_is_asked_for_many_cached_files_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket([f"dir/{number:02}" for number in range(60)])
    versions = {key: info(key).version for key in bucket.keys}
    async with jobs_in(tmp_path, bucket) as jobs:
        cache, queries = jobs.parts.cache, []
        for one in versions.values():
            await jobs.parts.fetch(one)
        load, cache.residency._most = cache.residency._load, 0
        monkeypatch.setattr(cache.residency, "_load", lambda read: queries.append(0) or load(read))

        async def unload() -> None:
            await cache.record()
            cache.order._latest.clear()
            await cache.residency.unload(lambda _file: None)

        await unload()
        job = await jobs.warmer.start(JobSpec("dir"))
        await job.ended.wait()
        assert (job.done_files, len(queries)) == (60, 1)
        await unload()
        mover = Relocator.__new__(Relocator)
        mover._cache = cache
        assert not await mover.move_cached({versions[key]: info(f"new/{key}") for key in versions})
        assert len(queries) == 2
        file = cache.pin(info("new/dir/59").version)
        assert await cache.ensure_open(file)
        assert file.is_complete
        cache.unpin(file)


async def test_what_was_pinned_stays_so_when_the_clock_is_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["dir/a", "dir/b"]
    bucket = Bucket(keys)
    async with jobs_in(tmp_path, bucket) as jobs:
        bucket.hold()
        job = await jobs.warmer.start(JobSpec("dir", is_pinned=True))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 100)
        bucket.let_go()
        await job.ended.wait()
        assert (job.why, job.done_files) == (None, 2)
        cache = jobs.parts.cache
        names = {cache.name_of(info(key).version) for key in keys}
        assert cache._catalog.retained_of(names) == names


async def test_what_another_mount_has_evicted_is_shown_as_missing_and_fetched_again(
    tmp_path: Path,
) -> None:
    keys = ["dir/a", "dir/b"]
    bucket = Bucket(keys)
    async with jobs_in(tmp_path, bucket) as jobs, cache_in(tmp_path / "cache") as other:
        parts = jobs.parts
        for key in keys:
            await parts.fetch(info(key).version)
        await parts.cache.record()
        await other.cache.residency.load_oldest()
        file = other.cache.find(info("dir/a").version)
        assert file is not None
        assert await other.evictor.drop(file)
        await parts.cache.record()
        bucket.requested.clear()
        shown = jobs.copies.job("dir", is_new=True)
        await eventually(lambda: shown.has_ended)
        assert (shown.counts["files"], shown.counts["local_files"]) == (2, 1)
        job = await jobs.warmer.start(JobSpec("dir"))
        await job.ended.wait()
        assert (job.done_files, job.fetched_bytes) == (2, 1)
        assert bucket.requested == [("dir/a", 0, 1)]


async def test_what_another_mount_has_open_is_counted_once_by_a_drop(tmp_path: Path) -> None:
    bucket = Bucket(["dir/a", "dir/b"])
    async with jobs_in(tmp_path, bucket) as jobs, cache_in(tmp_path / "cache") as other:
        for key in bucket.keys:
            await jobs.parts.fetch(info(key).version)
        await jobs.parts.cache.record()
        held = other.cache.pin(info("dir/a").version)
        assert await other.cache.ensure_open(held)
        job = jobs.copies.job("dir", is_new=True, drops=True)
        await eventually(lambda: job.has_ended)
        assert (job.counts["dropped_files"], job.counts["in_use_files"]) == (1, 1)
        assert job.in_use == ["dir/a"]
        other.cache.unpin(held)


async def test_an_empty_file_is_as_local_as_any_that_was_fetched(tmp_path: Path) -> None:
    class WithAnEmptyOne(Bucket):
        def _listed(self, key: str) -> ObjectInfo:
            return replace(info(key), size=0 if key.endswith("empty") else 1)

    bucket = WithAnEmptyOne(["dir/a", "dir/empty"])
    async with jobs_in(tmp_path, bucket) as jobs:
        warming = await jobs.warmer.start(JobSpec("dir"))
        await warming.ended.wait()
        assert warming.done_files == 2
        shown = jobs.copies.job("dir", is_new=True)
        await eventually(lambda: shown.has_ended)
        counts = [shown.counts[name] for name in ("files", "local_files", "local_bytes")]
        assert counts == [2, 2, 1]
        dropping = jobs.copies.job("dir", is_new=True, drops=True)
        await eventually(lambda: dropping.has_ended)
        assert (dropping.counts["dropped_files"], dropping.counts["in_use_files"]) == (1, 0)


class SlowFiller:
    """A cluster cache that stores nothing before its time."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.waiting = 0

    async def finish(self, _file: object, _start: int, _stop: int) -> int:
        self.waiting += 1
        await self.gate.wait()
        return 0


async def test_a_slow_cluster_cache_does_not_keep_a_job_from_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_warmer, "MOST_UNSTORED", 4)
    bucket = Bucket([f"key-{number:02}" for number in range(20)])
    settings = MountSettings(
        source=MountSource("bucket"), mountpoint=tmp_path / "mnt", cache_dir=tmp_path
    )
    store, filler = cast(Any, bucket), SlowFiller()
    heads = cast(Any, SimpleNamespace(lacks_version=lambda _info: False))
    async with cache_in(tmp_path / "cache", bucket=bucket) as parts:
        parts.downloader.most_small = 8
        warmer = CacheWarmer(
            store, parts.cache, parts.downloader, settings, Selector(store, ""), cast(Any, filler)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(warmer.run, FRESH, heads)
            job = await warmer.start(JobSpec(""))
            await eventually(lambda: filler.waiting == 12)
            await trio.testing.wait_all_tasks_blocked()
            assert (filler.waiting, job.done_files) == (12, 0), "eight, and four ahead"
            warmer.cancel("")
            await job.ended.wait()
            job = await warmer.start(JobSpec(""))
            filler.gate.set()
            await job.ended.wait()
            assert (job.done_files, job.unshared_blocks) == (20, 0)
            nursery.cancel_scope.cancel()


@states(
    "What is unpinned while a list or a pattern is being pinned is not pinned by that afterwards."
)
@pytest.mark.parametrize("path", ["list", "**/f*"])
async def test_what_is_unpinned_while_it_is_being_pinned_stays_so(
    tmp_path: Path, path: str
) -> None:
    keys = [f"d/{number:03}/f" for number in range(200)] + ["e/f"]
    bucket = Bucket(keys, page_size=2)
    spec = JobSpec(path, is_pinned=True, list_name=LIST if path == "list" else "")
    async with jobs_in(tmp_path, bucket) as jobs:
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        bucket.hold()
        job = await jobs.warmer.start(spec)
        await eventually(lambda: job.files > 0)
        unpinning = jobs.copies.unpinning("d", is_new=True)
        await unpinning.ended.wait()
        [recorded] = jobs.warmer._read()  # as the next daemon does
        assert recorded.is_unpinned("d/000/f")
        bucket.let_go()
        await job.ended.wait()
        retention = jobs.parts.cache.retention
        assert await retention.count("d") == 0
        assert await retention.count("e") == 1
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        again = await jobs.warmer.start(spec)
        await again.ended.wait()
        assert await retention.count("d") == 200


async def test_a_list_counts_each_file_once_where_a_request_fails(tmp_path: Path) -> None:
    keys = [f"d/{number:03}" for number in range(40)]
    bucket = Bucket(keys)

    def refuse(what: str, key: str) -> None:
        if what == "LIST" or (what == "HEAD" and key == keys[1]):
            raise StoreError("S3 asks to slow down")

    bucket.before = refuse
    async with jobs_in(tmp_path, bucket) as jobs:
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        job = await jobs.warmer.start(JobSpec("list", list_name=LIST))
        await job.ended.wait()
    assert job.files == 40
    assert (job.done_files, job.failed_files) == (39, 1)
    assert keys[1] in job.failed[0]


async def test_a_line_of_what_the_mount_does_not_show_is_named(tmp_path: Path) -> None:
    async with jobs_in(tmp_path, Bucket(["a//b", "c", "e/f"])) as jobs:
        await jobs.warmer.append(LIST, 0, "a//b\nc\ne\n")
        job = await jobs.warmer.start(JobSpec("list", list_name=LIST))
        await job.ended.wait()
    assert job.failed_files == 1
    assert "a//b" in job.failed[0]


@pytest.mark.parametrize("pattern", [".*", "*", "**"])
async def test_no_pattern_unpins_the_whole_mount(tmp_path: Path, pattern: str) -> None:
    async with jobs_in(tmp_path, Bucket(["a"])) as jobs:
        retention = jobs.parts.cache.retention
        await retention.add([""])
        unpinning = jobs.copies.unpinning(pattern, is_new=True)
        await unpinning.ended.wait()
        assert await retention.count("") == 1


async def test_a_path_that_no_key_can_be_is_not_there(tmp_path: Path) -> None:
    path = "\udcff"  # as Python shows such a byte of the command line
    async with jobs_in(tmp_path, Bucket(["a"])) as jobs:
        await jobs.parts.cache.retention.add(["a"])
        unpinning = jobs.copies.unpinning(path, is_new=True)
        await unpinning.ended.wait()
        job = jobs.copies.job(path, is_new=True)
        await eventually(lambda: job.has_ended)
        warming = await jobs.warmer.start(JobSpec(path))
        await warming.ended.wait()
    assert (unpinning.pins, unpinning.why) == (0, None)
    assert job.why == warming.why == "there is no such file or directory in the bucket"
