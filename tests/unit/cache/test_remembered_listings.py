"""Listings that a restart may reuse, and may forget."""

from __future__ import annotations

import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import trio

from fusefs.cache import listing_cache
from fusefs.cache.listing_cache import ListingCache
from fusefs.store.interface import ListPage, ObjectInfo
from tests.support.waiting import eventually, until


def page(*keys: str, token: str | None = None) -> ListPage:
    objects = [ObjectInfo(key, 1, '"e"', 5, "GLACIER") for key in keys]
    return ListPage(objects, ["p/d/"], token, keys[-1])


@pytest.fixture(autouse=True)
def _opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_cache, "OPEN_AFTER_S", 0)


def stored(memory: ListingCache) -> int:
    return 0 if memory._cache is None else len(memory._cache)


async def remembered(directory: Path, *pages: tuple[str, str, ListPage], ttl_s: float = 60) -> None:
    memory = ListingCache(directory, "store", ttl_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        for prefix, after, one in pages:
            memory.save(prefix, after, one)
        await trio.testing.wait_all_tasks_blocked()
        await eventually(lambda: stored(memory) == len(pages))
        nursery.cancel_scope.cancel()
    memory.close()


async def test_a_listing_is_remembered_over_a_restart(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/ä", token="t")), ("p/", "p/ä", page("p/b")))
    memory = ListingCache(tmp_path, "store", 60)
    first, second = await memory.load("p/", ""), await memory.load("p/", "p/ä")
    assert first is not None
    assert second is not None
    assert first[0] == page("p/ä", token="")
    assert second[0] == page("p/b")
    assert 0 <= first[1] < 60
    memory.close()


@pytest.mark.parametrize("ttl_s", [60, math.inf])
async def test_a_listing_whose_age_is_not_known_is_used_only_if_it_may_be_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")), ttl_s=ttl_s)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 100)  # the clock was set back
    memory = ListingCache(tmp_path, "store", ttl_s)
    found = await memory.load("p/", "")
    assert (found is not None) == math.isinf(ttl_s)
    memory.close()


async def test_a_remembered_listing_is_used_once(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")))
    memory = ListingCache(tmp_path, "store", 60)
    assert await memory.load("p/", "") is not None
    assert await memory.load("p/", "") is None
    memory.close()


async def test_a_listing_of_another_store_is_not_used(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")))
    memory = ListingCache(tmp_path, "another", 60)
    assert await memory.load("p/", "") is None
    memory.close()


async def test_a_remembered_listing_that_makes_no_sense_is_forgotten(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")), ("q/", "", page("q/a")))
    memory = ListingCache(tmp_path, "store", 60)
    assert memory._cache is not None
    memory._cache.set(memory._key("p/", ""), {"objects": [[1]], "fetched_at": "x"})
    memory._cache.set(memory._key("q/", ""), "no page")
    assert await memory.load("p/", "") is None
    assert await memory.load("q/", "") is None
    memory.close()


async def test_a_key_that_the_disk_has_changed_is_forgotten(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")))
    with closing(sqlite3.connect(tmp_path / "cache.db")) as database, database:
        (key,) = database.execute("SELECT key FROM Cache").fetchone()
        damaged = bytes([*key[:5], key[5] ^ 0x40, *key[6:]])
        database.execute("UPDATE Cache SET key = ?", (damaged,))
    memory = ListingCache(tmp_path, "store", 60)
    assert await memory.load("p/", "") is None
    memory.close()


async def test_a_directory_that_another_mount_keeps_busy_ends_nothing(tmp_path: Path) -> None:
    await remembered(tmp_path, ("o/", "", page("o/a")))
    memory = ListingCache(tmp_path, "store", 60)
    assert memory._cache is not None
    memory._cache._timeout = 0.01  # else it waits for a minute
    with closing(sqlite3.connect(tmp_path / "cache.db", isolation_level=None)) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(memory.run)
            other.execute("BEGIN IMMEDIATE")
            memory.save("p/", "", page("p/a"))
            await trio.sleep(0.2)
            other.execute("ROLLBACK")
            memory.save("q/", "", page("q/a"))
            await eventually(lambda: stored(memory) == 2)
            nursery.cancel_scope.cancel()
    memory.close()


async def test_a_new_directory_is_opened_only_once_the_mount_has_answered_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(listing_cache, "OPEN_AFTER_S", 0.5)
    memory = ListingCache(tmp_path / "new", "store", 60)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        memory.save("p/", "", page("p/a"))
        assert await memory.load("p/", "") is None
        await trio.sleep(0.4)
        assert not (tmp_path / "new").exists()
        await trio.sleep(0.2)
        # A thread's work, which this clock does not see.
        await trio.to_thread.run_sync(lambda: until(lambda: stored(memory) == 1, "it is stored"))
        nursery.cancel_scope.cancel()
    memory.close()
