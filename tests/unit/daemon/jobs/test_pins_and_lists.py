"""Pins, lists and removals of copies that meet each other, failed requests or odd paths."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fusefs.cache.retention import HashSet
from fusefs.daemon.jobs.cache_warmer import JobSpec
from fusefs.store.errors import StoreError
from tests.support.local_cache import info
from tests.support.semantics import states
from tests.support.waiting import eventually
from tests.support.warm_jobs import LIST, WideBucket, jobs_in


@states(
    "What is unpinned while a list or a pattern is being pinned is not pinned by that afterwards."
)
@pytest.mark.parametrize("path", ["list", "**/f*"])
async def test_what_is_unpinned_while_it_is_being_pinned_stays_so(
    tmp_path: Path, path: str
) -> None:
    keys = [f"d/{number:03}/f" for number in range(200)] + ["e/f"]
    bucket = WideBucket(keys, page_size=2)
    spec = JobSpec(path, is_pinned=True, list_name=LIST if path == "list" else "")
    async with jobs_in(tmp_path, bucket) as jobs:
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        bucket.hold()
        job = await jobs.warmer.start(spec)
        await eventually(lambda: job.files > 0)
        unpinning = jobs.copies.unpinning("d", is_new=True)
        await unpinning.ended.wait()
        bucket.let_go()
        await job.ended.wait()
        retention = jobs.parts.cache.retention
        assert await retention.count("d") == 0
        assert await retention.count("e") == 1
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        again = await jobs.warmer.start(spec)
        await again.ended.wait()
        assert await retention.count("d") == 200


async def test_a_forced_drop_leaves_what_is_open_pinned(tmp_path: Path) -> None:
    async with jobs_in(tmp_path, WideBucket(["d/a"])) as jobs:
        parts = jobs.parts
        await parts.cache.retention.add(["d"])
        await parts.fetch(info("d/a").version)
        file = parts.cache.pin(info("d/a").version)  # as a program does that opens it
        await parts.cache.record()
        job = jobs.copies.job("d", is_new=True, drops=True, is_forced=True)
        await eventually(lambda: job.has_ended)
        assert job.in_use.files == 1
        parts.cache.unpin(file)
        assert not await parts.evictor.drop(file), "it is evicted for nothing"


async def test_a_list_counts_each_file_once_where_a_request_fails(tmp_path: Path) -> None:
    keys = [f"d/{number:03}" for number in range(40)]
    bucket, lists = WideBucket(keys, page_size=20), 0

    def refuse(what: str, _key: str) -> None:
        nonlocal lists
        lists += what == "LIST"
        if what == "LIST" and lists == 2:
            raise StoreError("S3 asks to slow down")

    bucket.before = refuse
    async with jobs_in(tmp_path, bucket) as jobs:
        await jobs.warmer.append(LIST, 0, "\n".join(keys) + "\n")
        job = await jobs.warmer.start(JobSpec("list", list_name=LIST))
        await job.ended.wait()
    assert job.files == 40
    assert job.done_files + job.failed_files == 40
    assert job.done_files > 0
    assert not any(keys[0] in name for name in job.failed), "it has been fetched"


async def test_a_line_of_what_the_mount_does_not_show_is_named(tmp_path: Path) -> None:
    async with jobs_in(tmp_path, WideBucket(["a//b", "c", "e/f"])) as jobs:
        await jobs.warmer.append(LIST, 0, "a//b\nc\ne\n")
        job = await jobs.warmer.start(JobSpec("list", list_name=LIST))
        await job.ended.wait()
    assert job.failed_files == 1
    assert "a//b" in job.failed[0]


@pytest.mark.parametrize("pattern", [".*", "*", "**"])
async def test_no_pattern_unpins_the_whole_mount(tmp_path: Path, pattern: str) -> None:
    async with jobs_in(tmp_path, WideBucket(["a"])) as jobs:
        retention = jobs.parts.cache.retention
        await retention.add([""])
        unpinning = jobs.copies.unpinning(pattern, is_new=True)
        await unpinning.ended.wait()
        assert await retention.count("") == 1


async def test_a_path_that_no_key_can_be_is_not_there(tmp_path: Path) -> None:
    path = "\udcff"  # as Python shows such a byte of the command line
    async with jobs_in(tmp_path, WideBucket(["a"])) as jobs:
        await jobs.parts.cache.retention.add(["a"])
        unpinning = jobs.copies.unpinning(path, is_new=True)
        await unpinning.ended.wait()
        job = jobs.copies.job(path, is_new=True)
        await eventually(lambda: job.has_ended)
        warming = await jobs.warmer.start(JobSpec(path))
        await warming.ended.wait()
    assert (unpinning.pins, unpinning.why) == (0, None)
    assert job.why == warming.error == "there is no such file or directory in the bucket"


def test_pins_are_counted_while_a_thread_removes_many() -> None:
    keys = [str(number) for number in range(20_001)]
    pins, counts = HashSet([keys]), set()

    def count(_frame: FrameType, _event: str, _arg: Any) -> Any:
        counts.add(len(pins))
        return count

    def trace(frame: FrameType, _event: str, _arg: Any) -> Any:
        return count if frame.f_code.co_name == "_tidy" else None

    sys.settrace(trace)
    try:
        pins.remove(keys)
    finally:
        sys.settrace(None)
    assert counts == {0}
