"""The cache when an object gets another key: what was kept of it is kept on."""

from __future__ import annotations

from pathlib import Path

import trio

from fusefs.store.errors import NotFoundError
from tests.support.local_cache import CHUNK, cache_in, content, recording, version
from tests.support.waiting import eventually

MIB = 1 << 20
OLD = version("old", MIB)
NEW = version("new", MIB)


async def test_what_was_cached_is_cached_under_the_new_key(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        assert await parts.cache.move(OLD, NEW)
        assert parts.cache.find(OLD) is None
        assert await parts.read(NEW, 0, MIB) == content(OLD)
        assert len(parts.files()) == 1
        assert len(parts.bucket.requested) == 1


async def test_a_restart_finds_it_under_the_new_key(tmp_path: Path) -> None:
    """Also where both names reach the catalog in one batch, or the catalog had the old one."""
    other, newer, newest = version("other", MIB), version("newer", MIB), version("newest", MIB)
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        await parts.cache.record()
        await parts.fetch(other)
        await parts.cache.move(OLD, NEW)
        await parts.cache.move(NEW, newest)
        await parts.cache.move(other, newer)
        used = parts.quota.used
        await parts.cache.record()
        assert parts.quota.used == used
    async with cache_in(tmp_path) as parts:
        assert parts.quota.used == used
        assert await parts.read(newest, 0, MIB) == content(OLD)
        assert await parts.read(newer, 0, MIB) == content(other)
        assert parts.bucket.requested == []


async def test_a_restart_finds_what_was_renamed_while_it_was_recorded(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        async with recording(parts):
            assert await parts.cache.move(OLD, NEW)
        await parts.cache.record()
        assert parts.quota.used == MIB
    async with cache_in(tmp_path) as parts:
        assert await parts.read(NEW, 0, MIB) == content(OLD)
        assert parts.bucket.requested == []
        assert len(parts.cache) == 1


async def test_what_is_missing_comes_from_the_new_key(tmp_path: Path) -> None:
    old, new = version("old", 8 * MIB), version("new", 8 * MIB)
    async with cache_in(tmp_path) as parts:
        file = parts.cache.pin(old)
        await parts.read_pinned(file, 4 * MIB, 5 * MIB)
        await parts.quiet()
        await parts.cache.move(old, new)
        assert parts.cache.pin(new) is file
        assert await parts.read_pinned(file, 4 * MIB, 5 * MIB) == content(old)[4 * MIB : 5 * MIB]
        await parts.read_pinned(file, 0, 1)
        assert [key for key, *_ in parts.bucket.requested] == ["old", "new"]


async def test_a_download_that_is_under_way_goes_on_from_the_new_key(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
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


async def test_a_file_that_was_moved_and_evicted_leaves_nothing(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        await parts.cache.record()
        await parts.cache.move(OLD, NEW)
        (file,) = parts.cache.files()
        await parts.cache.evict(file)
        assert parts.files() == []
        await parts.cache.record()
        assert parts.quota.used == 0


async def test_a_move_waits_for_an_eviction(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        (file,) = parts.cache.files()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.cache.evict, file)
            await trio.lowlevel.checkpoint()
            assert await parts.cache.move(OLD, NEW)
        assert parts.files() == []
        assert parts.cache.find(NEW) is None


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


async def test_a_copy_that_has_a_file_in_use_keeps_it(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(OLD)
        await parts.fetch(NEW)
        file = parts.cache.pin(NEW)
        assert not await parts.cache.move(OLD, NEW)
        parts.cache.unpin(file)
        # A file that is not in use gives way.
        assert await parts.cache.move(OLD, NEW)
        assert await parts.read(NEW, 0, MIB) == content(OLD)
        assert len(parts.files()) == 1
