"""Listings that a restart may reuse, and may forget."""

import math
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import trio

from fusefs.cache import listing_cache
from fusefs.cache.file_cache import FileCache
from fusefs.cache.listing_cache import ListingCache
from fusefs.cache.quota import Quota
from fusefs.store.interface import ListPage, ObjectInfo
from tests.support.waiting import eventually


def page(*keys: str, token: str | None = None) -> ListPage:
    objects = [ObjectInfo(key, 1, '"e"', 5, "GLACIER") for key in keys]
    return ListPage(objects, ["p/d/"], token, keys[-1])


@asynccontextmanager
async def listings(
    directory: Path, identity: str = "store", ttl_s: float = 60
) -> AsyncIterator[ListingCache]:
    cache = FileCache(directory, identity, Quota(directory, None, lambda _: 0, lambda _: 0))
    memory = cache.listings(ttl_s)
    assert isinstance(memory, ListingCache)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        yield memory
        nursery.cancel_scope.cancel()
    await cache.aclose(sync=False)


def stored(directory: Path) -> list[str]:
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as db:
        return [place for (place,) in db.execute("SELECT place FROM pages ORDER BY number")]


async def remember(directory: Path, *pages: tuple[str, str, ListPage], ttl_s: float = 60) -> None:
    async with listings(directory, ttl_s=ttl_s) as memory:
        for prefix, after, one in pages:
            memory.save(prefix, after, one)
        prefix, after, _ = pages[-1]
        await eventually(lambda: f"{prefix}\0{after}" in stored(directory))


async def test_a_listing_is_remembered_over_a_restart(tmp_path: Path) -> None:
    await remember(tmp_path, ("p/", "", page("p/ä", token="t")), ("p/", "p/ä", page("p/b")))
    async with listings(tmp_path) as memory:
        first, second = await memory.load("p/", ""), await memory.load("p/", "p/ä")
        assert first is not None
        assert second is not None
        assert (first[0], second[0]) == (page("p/ä", token=""), page("p/b"))
        assert 0 <= first[1] < 60
        # Each is used once.
        assert await memory.load("p/", "") is None


@pytest.mark.parametrize("ttl_s", [60, math.inf])
async def test_a_listing_whose_age_is_not_known_is_used_only_if_it_may_be_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    await remember(tmp_path, ("p/", "", page("p/a")), ttl_s=ttl_s)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 100)  # the clock was set back
    async with listings(tmp_path, ttl_s=ttl_s) as memory:
        assert (await memory.load("p/", "") is not None) == math.isinf(ttl_s)


async def test_a_listing_of_another_store_is_not_used(tmp_path: Path) -> None:
    await remember(tmp_path, ("p/", "", page("p/a")))
    async with listings(tmp_path, "another") as memory:
        assert await memory.load("p/", "") is None


@pytest.mark.parametrize("change", ["page = x'01'", "page = 'text'", "page = 7", "place = 'q'"])
async def test_a_remembered_listing_that_makes_no_sense_is_forgotten(
    tmp_path: Path, change: str
) -> None:
    await remember(tmp_path, ("p/", "", page("p/a")))
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db, db:
        db.execute(f"UPDATE pages SET {change}")
    async with listings(tmp_path) as memory:
        assert await memory.load("p/", "") is None


async def test_a_listing_of_another_place_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    await remember(tmp_path, ("p/", "", page("p/a")))
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as db, db:
        db.execute("UPDATE pages SET place = ?", ("q/\0",))
    async with listings(tmp_path) as memory:
        assert await memory.load("q/", "") is None


async def test_the_oldest_listings_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_cache, "MOST_PAGES", 2)
    pages = [(prefix, "", page(f"{prefix}a")) for prefix in ("o/", "p/", "q/")]
    await remember(tmp_path, *pages)
    assert stored(tmp_path) == ["p/\0", "q/\0"]


async def test_what_is_older_than_the_ttl_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await remember(tmp_path, ("p/", "", page("p/a")))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    async with listings(tmp_path) as memory:
        assert await memory.load("p/", "") is None
    assert stored(tmp_path) == []
