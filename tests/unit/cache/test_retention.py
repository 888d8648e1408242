"""Pins: which files are never evicted, for how long, and by whom."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import trio

from fusefs.cache import catalog, catalog_writer
from fusefs.cache import retention as retention_module
from fusefs.cache.file_cache import FileCache
from fusefs.cache.quota import Quota
from fusefs.cache.retention import Retention, covers
from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import Parts, cache_in, copies_of, version

MIB = 1 << 20


def kept(parts: Parts, keys: str, size: int = MIB) -> str:
    """Those of the keys whose version is in the cache."""
    found = [(key, parts.cache.find(version(key, size))) for key in keys]
    return "".join(key for key, file in found if file is not None and file.is_complete)


async def fill(parts: Parts, keys: str) -> None:
    for key in keys:
        await parts.fetch(version(key, MIB))


async def empty(parts: Parts) -> None:
    """Evict all that may be evicted."""
    parts.quota._limit = 0
    await parts.evictor.tend()


def test_a_pin_covers_its_key_and_what_is_below() -> None:
    pins = set(map(hash, ("a/b", "c")))
    assert all(covers(pins, key) for key in ("a/b", "a/b/", "a/b/x/y", "c", "c/d"))
    assert not any(covers(pins, key) for key in ("a", "a/", "a/bc", "a/b.x", "cd", "d/c", ""))
    assert covers({hash("")}, "anything/at all")


async def test_an_unpin_that_the_catalog_did_not_take_fails_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with cache_in(tmp_path, limit=4 * MIB) as parts, trio.open_nursery() as nursery:
        await parts.cache.retention.add(["a"])
        await fill(parts, "a")
        copies = copies_of(parts, nursery)
        with monkeypatch.context() as patch:
            patch.setattr(parts.cache._catalog, "release", full)
            patch.setattr(catalog_writer, "is_damage", lambda _error: False)
            job = copies.unpinning("a", is_new=True)
            await job.ended.wait()
            assert "can't be written" in str(job.why)
        job = copies.unpinning("a", is_new=True)
        await job.ended.wait()
        assert job.why is None
        await empty(parts)
        assert kept(parts, "a") == ""


async def test_another_mount_evicts_no_file_that_is_pinned(tmp_path: Path) -> None:
    async with (
        cache_in(tmp_path, limit=4 * MIB) as parts,
        cache_in(tmp_path, limit=4 * MIB) as others,
    ):
        await fill(parts, "ab")
        await parts.cache.record()
        await others.cache.residency.load_oldest()
        await parts.cache.retention.add(["a"])
        await fill(parts, "a")
        await parts.cache.record()
        await empty(others)
        names = {file.name for file in others.cache.files()}
        assert parts.cache.name_of(version("a", MIB)) in names
        assert parts.cache.name_of(version("b", MIB)) not in names
        # And once it is unpinned, it does.
        await parts.cache.retention.remove_pins("a")
        await others.cache.retention.learn()
        await empty(others)
        names = {file.name for file in others.cache.files()}
        assert parts.cache.name_of(version("a", MIB)) not in names


@pytest.mark.parametrize("is_obsolete", [False, True])
@pytest.mark.parametrize("is_of_another_mount", [False, True])
async def test_of_a_pinned_object_the_newest_version_is_retained(
    parts: Parts, tmp_path: Path, *, is_obsolete: bool, is_of_another_mount: bool
) -> None:
    await parts.cache.retention.add(["a"])
    old, new = ObjectVersion("a", '"1"', 100), ObjectVersion("a", '"2"', 100)
    await parts.fetch(old)
    await parts.cache.record()
    async with cache_in(tmp_path) as another:
        newest = another if is_of_another_mount else parts
        await newest.fetch(new)
        await another.cache.record()
        if is_obsolete:
            parts.cache.obsolete(old)
            await parts.evictor.tend()
        for mount, version_, is_retained in ((parts, old, False), (newest, new, True)):
            await mount.cache.retention.learn()
            file = mount.cache.find(version_)
            assert (file is not None and file.is_retained) == is_retained


async def test_what_another_pin_covers_stays_retained(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        await parts.cache.retention.add(["", "a"])
        await fill(parts, "ab")
        await parts.cache.retention.remove_pins("", lambda pin: pin == "")
        await empty(parts)
        assert kept(parts, "ab") == "a"


async def test_a_file_is_retained_by_the_name_it_gets(parts: Parts) -> None:
    await parts.cache.retention.add(["in"])
    old, new = version("out/a", 100), version("in/a", 100)
    await parts.fetch(old)
    assert await parts.cache.move(old, new)
    file = parts.cache.find(new)
    assert file.is_retained
    assert await parts.cache.move(new, old)
    assert not file.is_retained


@asynccontextmanager
async def retention(directory: Path, identity: str = "bucket") -> AsyncIterator[Retention]:
    found = FileCache(directory, identity, Quota(directory, None, lambda _size: 0))
    yield found.retention
    await found.aclose(sync=False)


async def test_the_record_is_of_all_buckets_and_what_other_mounts_change_is_noticed(
    tmp_path: Path,
) -> None:
    async with (
        retention(tmp_path, "one") as one,
        retention(tmp_path, "two") as two,
        retention(tmp_path, "one") as same,
    ):
        await one.add(["a", "b"])
        await two.add(["c"])
        assert (await same.refresh(), await same.refresh()) == (True, False)
        assert same.covers("b")
        assert await one.remove_pins("b", lambda _pin: True) == 1
        assert (await same.refresh(), await two.refresh()) == (True, True)
        pins = [[key for key in "abc" if pinned.covers(key)] for pinned in (one, two, same)]
        assert pins == [["a"], ["c"], ["a"]]
        assert [await pinned.count("") for pinned in (one, two, same)] == [1, 1, 1]


async def test_many_pins_are_added_page_by_page_and_removed_by_a_path_or_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "PAGE", 7)
    keys = [f"dir/{number}" for number in range(100)] + ["dir", "dir-1", "dir.x", "other/0"]
    async with retention(tmp_path) as here, retention(tmp_path) as there:
        for at in range(0, len(keys), 10):
            await here.add(keys[at : at + 20])
            await there.refresh()
        assert await here.count("dir") == 101
        assert await here.remove_pins("dir", lambda pin: pin.endswith("5")) == 10
        await here.add(["dir/5"])
        assert await here.remove_pins("dir/77", lambda _pin: True) == 1
        await there.refresh()
        gone = {f"dir/{number}" for number in (15, 25, 35, 45, 55, 65, 75, 85, 95, 77)}
        monkeypatch.setattr(retention_module, "covers", lambda pins, key: hash(key) in pins)
        for pinned in (here, there):
            assert [key for key in keys if not pinned.covers(key)] == sorted(gone, key=keys.index)
        assert await here.remove_pins("dir", lambda _pin: True) == 91
        await there.refresh()
        for pinned in (here, there):
            assert [key for key in keys if pinned.covers(key)] == ["dir-1", "dir.x", "other/0"]


@pytest.mark.parametrize("change", ["DELETE FROM removals", "UPDATE removals SET count = 'x'"])
async def test_a_damaged_record_begins_anew_with_the_catalog(tmp_path: Path, change: str) -> None:
    async with retention(tmp_path) as here:
        await here.add(["a"])
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as database, database:
            database.execute(change)
        assert await here.refresh()
        assert not here.covers("a")
        await here.add(["b"])
    async with retention(tmp_path) as later:
        assert [key for key in "ab" if later.covers(key)] == ["b"]
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as database, database:
            database.execute(change)
    async with retention(tmp_path) as later:
        assert await later.count("") == 0
        await later.add(["c"])


async def test_another_mount_learns_page_by_page_what_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "LOOKED_UP", 2)
    monkeypatch.setattr(catalog, "RETAINED_PAGE", 2)
    async with (
        cache_in(tmp_path, limit=8 * MIB) as parts,
        cache_in(tmp_path, limit=8 * MIB) as others,
    ):
        await parts.cache.retention.add("abcde")
        await fill(parts, "abcdefg")
        await parts.cache.record()
        await others.cache.record()
        assert len(await others.cache.look_up(version(key, MIB) for key in "abcdefg")) == 7

        def retained(parts: Parts) -> str:
            found = [(key, parts.cache.find(version(key, MIB))) for key in "abcdefg"]
            return "".join(key for key, file in found if file is not None and file.is_retained)

        assert retained(parts) == retained(others) == "abcde"
        assert await parts.cache.retention.remove_pins("", lambda pin: pin != "c") == 4
        await others.cache.retention.learn()
        assert retained(parts) == retained(others) == "c"
