"""Pins: which files are never evicted, for how long, and by whom."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import trio

from fusefs.cache import catalog_writer
from fusefs.cache.cached_file import CacheFile
from fusefs.cache.retention import RECORD, Retention, covers
from fusefs.daemon.jobs.local_copies import LocalCopies
from fusefs.daemon.jobs.selection import Selector
from fusefs.store.interface import ObjectVersion
from tests.support.local_cache import Parts, cache_in, version

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
    pins = frozenset({"a/b", "c"})
    assert all(covers(pins, key) for key in ("a/b", "a/b/", "a/b/x/y", "c", "c/d"))
    assert not any(covers(pins, key) for key in ("a", "a/", "a/bc", "a/b.x", "cd", "d/c", ""))
    assert covers(frozenset({""}), "anything/at all")


async def test_a_pinned_file_is_not_evicted_until_it_is_unpinned(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        await parts.cache.add_pins(["a"])
        await fill(parts, "ab")
        await empty(parts)
        assert kept(parts, "ab") == "a"
        await parts.cache.remove_pins(["a"], "a")
        await empty(parts)
        assert kept(parts, "a") == ""


async def test_an_unpin_that_the_catalog_did_not_take_fails_and_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with cache_in(tmp_path, limit=4 * MIB) as parts, trio.open_nursery() as nursery:
        await parts.cache.add_pins(["a"])
        await fill(parts, "a")
        bucket = parts.bucket
        copies = LocalCopies(
            parts.cache, parts.evictor, Selector(bucket, ""), "", nursery, lambda _key: (0, 0)
        )
        with monkeypatch.context() as patch:
            patch.setattr(parts.cache._catalog, "release", full)
            patch.setattr(catalog_writer, "is_damage", lambda _error: False)
            with pytest.raises(OSError, match="can't be written"):
                await copies.unpin("a")
        await copies.unpin("a")
        await empty(parts)
        assert kept(parts, "a") == ""


async def test_a_mounts_pins_are_counted_without_those_of_other_mounts(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=8 * MIB) as parts:
        other = ObjectVersion("other/file", '"1"', MIB)
        await parts.cache.add_pins(["mine", "other"])
        for pinned in (ObjectVersion("mine/file", '"1"', MIB), other):
            await parts.fetch(pinned)
        # Another bucket's mount with this directory.
        parts.cache._catalog.retain("another bucket", {"mine/theirs": "theirs"}, 0.0)
        theirs = CacheFile("theirs", MIB)
        theirs.present.add(0, MIB)
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                copies = LocalCopies(
                    parts.cache,
                    parts.evictor,
                    Selector(parts.bucket, "mine/"),
                    "mine/",
                    nursery,
                    lambda _key: (0, 0),
                )
                found = await copies.describe_pins()
            assert found == {"paths": 1, "files": 1, "bytes": MIB}
            parts.cache._files["theirs"] = theirs
            await parts.cache.learn()
            assert theirs.is_retained


async def test_pins_outlive_a_restart(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        await parts.cache.add_pins(["a"])
        await fill(parts, "ab")
    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        await empty(parts)
        assert kept(parts, "ab") == "a"


async def test_another_mount_evicts_no_file_that_is_pinned(tmp_path: Path) -> None:
    async with (
        cache_in(tmp_path, limit=4 * MIB) as parts,
        cache_in(tmp_path, limit=4 * MIB) as others,
    ):
        await fill(parts, "ab")
        await parts.cache.record()
        await others.cache.learn()
        await parts.cache.add_pins(["a"])
        await fill(parts, "a")
        await parts.cache.record()
        await empty(others)
        names = {file.name for file in others.cache.files()}
        assert parts.cache.name_of(version("a", MIB)) in names
        assert parts.cache.name_of(version("b", MIB)) not in names
        # And once it is unpinned, it does.
        await parts.cache.remove_pins(["a"], "a")
        await others.cache.learn()
        await empty(others)
        names = {file.name for file in others.cache.files()}
        assert parts.cache.name_of(version("a", MIB)) not in names


async def test_of_a_pinned_object_the_newest_version_is_retained(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.cache.add_pins(["a"])
        old, new = ObjectVersion("a", '"1"', 100), ObjectVersion("a", '"2"', 100)
        for one in (old, new):
            await parts.fetch(one)
            await parts.cache.record()
        retained = [parts.cache.find(one) for one in (old, new)]
        assert [file is not None and file.is_retained for file in retained] == [False, True]


async def test_what_another_pin_covers_stays_retained(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        await parts.cache.add_pins(["", "a"])
        await fill(parts, "ab")
        await parts.cache.remove_pins([""], "")
        await empty(parts)
        assert kept(parts, "ab") == "a"


async def test_a_file_is_retained_by_the_name_it_gets(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.cache.add_pins(["in"])
        old, new = version("out/a", 100), version("in/a", 100)
        await parts.fetch(old)
        assert await parts.cache.move(old, new)
        file = parts.cache.find(new)
        assert file is not None
        assert file.is_retained
        assert await parts.cache.move(new, old)
        assert not file.is_retained


def test_the_record_is_of_all_buckets_and_read_again_when_it_changes(tmp_path: Path) -> None:
    one, two = Retention(tmp_path, "one"), Retention(tmp_path, "two")
    same = Retention(tmp_path, "one")
    one.add(["a", "b"])
    two.add(["c"])
    one.remove(["b"])
    same.refresh()
    assert (one.pins, two.pins, same.pins) == ({"a"}, {"c"}, {"a"})
    (tmp_path / RECORD).write_text("damaged")
    same.refresh()
    assert same.pins == {"a"}
