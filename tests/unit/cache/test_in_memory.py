"""Cached files that are not in memory, and those that are renamed."""

from pathlib import Path

import pytest
import trio

from fusefs.store.errors import NotFoundError
from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import CHUNK, Parts, cache_in, content, recording, version
from tests.support.waiting import eventually

SIZE = 10_000


def some(count: int) -> list[ObjectVersion]:
    return [version(f"{number:03}", SIZE) for number in range(count)]


async def fill(parts: Parts, versions: list[ObjectVersion]) -> None:
    """Fetch objects, and go on to where those are in memory that may be."""
    for one in versions:
        await parts.fetch(one)
    await settle(parts)
    parts.bucket.requested.clear()


async def settle(parts: Parts) -> None:
    await parts.cache.record()
    await parts.cache.residency.unload(lambda _file: None)


async def test_few_files_are_in_memory_and_none_is_fetched_again(tmp_path: Path) -> None:
    objects = some(40)
    async with cache_in(tmp_path, most_in_memory=5) as parts:
        await fill(parts, objects)
        for _ in range(2):
            assert len(parts.cache.files()) == 5
            for one in objects:
                await parts.fetch(one)
            await settle(parts)
        assert (parts.bucket.requested, len(parts.cache)) == ([], 40)
    async with cache_in(tmp_path, most_in_memory=5) as parts:
        assert len(parts.cache.files()) == 5
        for one in objects:
            await parts.fetch(one)
        assert parts.bucket.requested == []


async def test_what_is_fetched_ahead_is_not_fetched_where_the_catalog_has_it(
    tmp_path: Path,
) -> None:
    objects = some(10)
    async with cache_in(tmp_path, most_in_memory=2) as parts:
        await fill(parts, objects)
        file = parts.cache.pin(objects[0])
        [download] = parts.downloader.want(file, 0, SIZE)
        await parts.quiet()
        parts.cache.unpin(file)
        assert (file.is_complete, download.error, parts.bucket.requested) == (True, None, [])


async def test_the_least_recently_used_are_evicted_though_they_are_not_in_memory(
    tmp_path: Path,
) -> None:
    objects = some(20)
    async with cache_in(tmp_path, limit=20 * SIZE, most_in_memory=3) as parts:
        await fill(parts, objects)
        assert await parts.evictor.reserve(6 * SIZE)
        there = await parts.cache.look_up(objects)
        kept = [one.key for one, file in zip(objects, there, strict=True) if file is not None]
        # The last ones are in memory, and were kept last; of the others the first go.
        assert len(kept) <= 14
        assert parts.quota.used <= 14 * SIZE
        assert not {"000", "001"} & set(kept) or not {"018", "019"} & set(kept)
        assert len(parts.files()) == len(kept)


async def test_a_file_that_is_pinned_or_in_use_is_never_evicted(tmp_path: Path) -> None:
    objects = some(20)
    async with cache_in(tmp_path, limit=20 * SIZE, most_in_memory=3) as parts:
        await parts.cache.retention.add([objects[0].key, objects[7].key])
        await fill(parts, objects)
        assert len(parts.cache.files()) == 3
        await parts.cache.look_up(objects[5:6] * 2)  # as of a plan that has a path twice
        parts.cache.pin(objects[5])
        assert not await parts.evictor.reserve(20 * SIZE)
        left = [one.key for one in objects if (await parts.cache.look_up([one]))[0] is not None]
        assert (left, len(parts.files())) == (["000", "005", "007"], 3)


async def test_copies_of_versions_that_the_bucket_has_no_more_are_removed(tmp_path: Path) -> None:
    objects = some(10)
    async with cache_in(tmp_path, most_in_memory=2) as parts:
        await fill(parts, objects)
        held = parts.cache.pin(objects[0])
        assert await parts.cache.ensure_open(held)
        for one in objects[:9]:
            parts.cache.obsolete(one)
        await parts.evictor.tend()
        await parts.cache.record()
        assert len(parts.files()) == 2  # one is in use, one is not obsolete
        parts.cache.unpin(held)
        await parts.evictor.tend()
        await parts.cache.record()
        assert (len(parts.files()), len(parts.cache), parts.quota.used) == (1, 1, SIZE)


MIB = 1 << 20
OLD = version("old", MIB)
NEW = version("new", MIB)


async def test_a_restart_finds_it_under_the_new_key(tmp_path: Path) -> None:
    """Also where both names reach the catalog in one batch, or the catalog had the old one."""
    again, against = version("again", MIB), version("against", MIB)
    other, newer, newest = version("other", MIB), version("newer", MIB), version("newest", MIB)
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        await parts.cache.record()
        await parts.fetch(other)
        await parts.cache.move(OLD, NEW)
        await parts.cache.move(NEW, newest)
        await parts.cache.move(other, newer)
        await parts.fetch(again)
        async with recording(parts):
            assert await parts.cache.move(again, against)
        used = parts.quota.used
        await parts.cache.record()
        assert parts.quota.used == used
    async with cache_in(tmp_path) as parts:
        assert parts.quota.used == used
        assert await parts.read(newest, 0, MIB) == content(OLD)
        assert await parts.read(newer, 0, MIB) == content(other)
        assert await parts.read(against, 0, MIB) == content(again)
        assert parts.bucket.requested == []
        assert len(parts.cache) == 3


async def test_no_query_looks_for_the_large_files_among_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.cache.catalog.PAGE", 2)
    async with cache_in(tmp_path) as parts:
        await fill(parts, [*some(5), OLD])
        assert sorted([len(page) async for page in parts.cache.residency.pages(SIZE)]) == [0, 0, 1]


async def test_what_is_missing_comes_from_the_new_key(parts: Parts) -> None:
    old, new = version("old", 8 * MIB), version("new", 8 * MIB)
    file = parts.cache.pin(old)
    await parts.read_pinned(file, 4 * MIB, 5 * MIB)
    await parts.quiet()
    await parts.cache.move(old, new)
    assert parts.cache.pin(new) is file
    assert await parts.read_pinned(file, 4 * MIB, 5 * MIB) == content(old)[4 * MIB : 5 * MIB]
    await parts.read_pinned(file, 0, 1)
    assert [key for key, *_ in parts.bucket.requested] == ["old", "new"]


async def test_a_download_that_is_under_way_goes_on_from_the_new_key(parts: Parts) -> None:
    file = parts.cache.pin(OLD)
    await parts.cache.ensure_open(file)

    def fault(key: str, offset: int) -> None:
        if key == "old" and offset == 2 * CHUNK:
            parts.bucket.hold()
        if key == "old" and offset == 3 * CHUNK:
            raise NotFoundError(key)

    async def move() -> None:
        await eventually(lambda: file.present.total == 3 * CHUNK)
        await parts.cache.move(OLD, NEW)
        parts.bucket.let_go()

    parts.bucket.fault = fault
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            await parts.read_pinned(file, 0, MIB)
    assert parts.bucket.requested == [("old", 0, MIB), ("new", 3 * CHUNK, MIB)]
    parts.cache.unpin(file)


async def test_a_file_that_was_moved_and_evicted_leaves_nothing(parts: Parts) -> None:
    await parts.fetch(OLD)
    await parts.cache.record()
    await parts.cache.move(OLD, NEW)
    await parts.cache.evict(*parts.cache.files())
    await parts.cache.record()
    assert (parts.files(), parts.quota.used) == ([], 0)


async def test_a_move_waits_for_an_eviction(parts: Parts) -> None:
    await parts.fetch(OLD)
    (file,) = parts.cache.files()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.cache.evict, file)
        await trio.lowlevel.checkpoint()
        assert await parts.cache.move(OLD, NEW)
    assert (parts.files(), parts.cache.find(NEW)) == ([], None)


async def test_a_file_stays_while_a_move_is_about_to_go_on(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts, cache_in(tmp_path) as other:
        await parts.fetch(OLD)
        await parts.cache.record()
        held = other.cache.pin(OLD)
        assert await other.cache.ensure_open(held)
        file = parts.cache.find(OLD)
        assert file is not None

        async def evict() -> None:
            await parts.cache.evict(file)
            # The move has been given the lock, and did not run yet.
            await parts.cache.evict(file)
            parts.cache.put_back(file)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(evict)
            await trio.lowlevel.checkpoint()
            assert await parts.cache.move(OLD, NEW)
        assert parts.cache.find(NEW) is file
        assert parts.cache.next_victim() is file
        other.cache.unpin(held)


async def test_a_copy_that_has_a_file_in_use_keeps_it(parts: Parts) -> None:
    await parts.fetch(OLD)
    await parts.fetch(NEW)
    file = parts.cache.pin(NEW)
    assert not await parts.cache.move(OLD, NEW)
    parts.cache.unpin(file)
    # A file that is not in use gives way.
    assert await parts.cache.move(OLD, NEW)
    assert await parts.read(NEW, 0, MIB) == content(OLD)
    assert len(parts.files()) == 1
