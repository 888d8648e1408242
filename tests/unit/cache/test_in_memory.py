"""A cache with more files than are in memory: the catalog has the others."""

from __future__ import annotations

from pathlib import Path

from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import Parts, cache_in, version

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
        assert file.is_complete
        assert download.error is None
        parts.cache.unpin(file)
        assert parts.bucket.requested == []


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


async def test_a_pinned_file_outside_of_memory_is_never_evicted(tmp_path: Path) -> None:
    objects = some(20)
    async with cache_in(tmp_path, limit=20 * SIZE, most_in_memory=3) as parts:
        await parts.cache.retention.add([objects[0].key, objects[7].key])
        await fill(parts, objects)
        assert len(parts.cache.files()) == 3
        assert not await parts.evictor.reserve(20 * SIZE)
        left = [one.key for one in objects if (await parts.cache.look_up([one]))[0] is not None]
        assert left == [objects[0].key, objects[7].key]
        assert await parts.cache.retained.count("") == (2, 2 * SIZE)


async def test_a_file_outside_of_memory_goes_along_with_a_rename(tmp_path: Path) -> None:
    objects, new = some(10), version("new", SIZE)
    async with cache_in(tmp_path, most_in_memory=2) as parts:
        await fill(parts, objects)
        assert await parts.cache.move(objects[0], new)
        file = parts.cache.pin(new)
        assert await parts.cache.ensure_open(file)
        assert file.is_complete
        parts.cache.unpin(file)


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
