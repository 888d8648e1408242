"""The cache directory: what comes and goes, what a restart finds, and whose it is."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.cache import files as cache_files
from fusefs.cache.directory import CacheDirectoryError, prepare_directory
from fusefs.cache.disk import is_unused
from fusefs.cache.fetch import NotKeptError
from fusefs.cache.file import CacheFile
from fusefs.cache.metadata import RememberedPages
from fusefs.cache.sweep import ORPHAN_AGE_S
from fusefs.store.base import ListPage, ObjectInfo
from tests.support.disks import small_disk
from tests.support.local_cache import Parts, cache_in, content, until, version

MIB = 1 << 20
A = version("a", MIB)


async def test_what_was_fetched_is_not_fetched_again(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        await parts.fetch(A)
        assert len(parts.bucket.asked) == 1


async def test_what_was_fetched_is_there_after_a_restart(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        await parts.read(version("big", 9 * MIB), 4 * MIB, 5 * MIB)
        await parts.quiet()
    async with cache_in(tmp_path) as parts:
        assert parts.space.used >= 2 * MIB
        await parts.fetch(A)
        await parts.read(version("big", 9 * MIB), 4 * MIB, 5 * MIB)
        assert parts.bucket.asked == []


async def test_another_version_of_a_key_is_another_file(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        other = version("a", MIB, '"2"')
        await parts.fetch(A)
        await parts.fetch(other)
        assert content(A) != content(other)
        assert len(parts.files()) == 2


async def test_a_file_that_got_nothing_leaves_nothing(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        file = parts.cache.pin(A)
        assert await parts.cache.ensure_open(file)
        parts.cache.unpin(file)
        assert parts.files() == []
        assert parts.cache.find(A) is None


async def test_a_file_cut_behind_our_back_is_fetched_again(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
    [path] = (tmp_path / "objects").glob("*/*")
    os.truncate(path, 100)
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        assert parts.bucket.asked == [("a", 0, MIB)]


async def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "cache") as parts:
        await parts.fetch(A)
    [path] = (tmp_path / "cache" / "objects").glob("*/*")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    async with cache_in(tmp_path / "cache") as parts:
        with pytest.raises(NotKeptError):
            await parts.fetch(A)


async def test_what_was_recorded_survives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "live") as parts:
        await parts.fetch(A)
        await parts.cache.record()
        await parts.read(version("b", MIB), 0, 10)  # not yet on record
        shutil.copytree(tmp_path / "live", tmp_path / "killed", copy_function=os.link)
        async with cache_in(tmp_path / "killed") as successor:
            await successor.fetch(A)
            await successor.fetch(version("b", MIB))
            assert {key for key, _, _ in successor.bucket.asked} == {"b"}


async def test_files_without_a_row_are_swept_when_they_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        await parts.cache.record()
        [known] = parts.files()
        old, new = (known.with_name(known.parent.name + digit * 30 + ".00000000") for digit in "ab")
        for path in (old, new):
            path.write_bytes(b"left by a daemon that was killed")
        long_ago = time.time() - 2 * ORPHAN_AGE_S
        for path in (old, known):
            os.utime(path, (long_ago, long_ago))
        await parts.cache.sweep()
        assert parts.files() == sorted([known, new])


async def test_two_mounts_see_what_either_fetched(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as one, cache_in(tmp_path) as other:
        await one.fetch(A)
        for parts in (one, other):
            await parts.cache.record()  # each does so by itself every other second
        await other.fetch(A)
        assert other.bucket.asked == []
        assert len(one.files()) == 1


async def test_what_another_mount_evicted_is_fetched_again(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as one, cache_in(tmp_path) as other:
        await one.fetch(A)
        for parts in (one, other):
            await parts.cache.record()
        await other.fetch(A)
        file = other.cache.find(A)
        assert file is not None
        assert await other.cache.evict(file) == -1
        await one.fetch(A)
        assert len(one.bucket.asked) == 2
        await one.cache.record()
        assert one.space.used == MIB


async def test_a_file_that_two_mounts_fetch_at_once_is_right_for_both(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as one, cache_in(tmp_path) as other:
        async with trio.open_nursery() as nursery:
            for parts in (one, other):
                nursery.start_soon(parts.fetch, A)
        for parts in (one, other, one, other):
            await parts.cache.record()
            try:
                await parts.fetch(A)
            except NotKeptError:
                assert await parts.fetcher.read_unkept(A, 0, MIB) == content(A)
        assert one.space.reserved == other.space.reserved == 0
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        assert parts.bucket.asked == []
        assert parts.space.used == MIB


async def test_the_keeper_of_the_catalog_records_and_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "RECORD_EVERY_S", 0.01)
    monkeypatch.setattr(cache_files, "SYNC_AFTER_S", 0.0)
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        nursery.start_soon(parts.cache.run)
        await parts.fetch(A)
        await until(lambda: [row.is_synced for row in parts.cache._catalog.rows()] == [True])
        nursery.cancel_scope.cancel()


async def test_opening_is_all_or_nothing_however_it_is_cancelled(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        before = set(os.listdir("/proc/self/fd"))
        for patience in range(40):
            file = parts.cache.pin(A)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(parts.cache.ensure_open, file)
                for _ in range(patience):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            parts.cache.unpin(file)
            assert file.fd == -1
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
        await parts.fetch(A)
        assert len(parts.bucket.asked) == 1


def test_a_file_is_unused_when_nobody_has_it_open_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDWR)
    assert is_unused(fd)
    with path.open("rb"):
        assert not is_unused(fd)
    assert is_unused(fd)
    os.close(fd)


# The directory itself


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    prepare_directory(tmp_path / "new" / "cache")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(CacheDirectoryError, match="another user"):
        prepare_directory(tmp_path / "cache")


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CacheDirectoryError, match="not empty"):
        prepare_directory(tmp_path)


@pytest.mark.parametrize("mark", [b"", b"fusefs cache 99\n", b"\xff\xfe"])
def test_a_directory_of_another_format_is_refused(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "format").write_bytes(mark)
    with pytest.raises(CacheDirectoryError, match="remove it"):
        prepare_directory(tmp_path)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(CacheDirectoryError, match="can't use"):
        prepare_directory(tmp_path / "cache")


# Listings


def page(*keys: str, token: str | None = None) -> ListPage:
    objects = [ObjectInfo(key, 1, '"e"', 5, "GLACIER") for key in keys]
    return ListPage(objects, ["p/d/"], token, keys[-1])


async def remembered(directory: Path, *pages: tuple[str, str, ListPage], ttl_s: float = 60) -> None:
    memory = RememberedPages(directory, "store", ttl_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        for prefix, after, one in pages:
            memory.save(prefix, after, one)
        await trio.testing.wait_all_tasks_blocked()
        await until(lambda: len(memory._cache) == len(pages))
        nursery.cancel_scope.cancel()
    memory.close()


async def test_a_listing_is_remembered_over_a_restart(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/ä", token="t")), ("p/", "p/ä", page("p/b")))
    memory = RememberedPages(tmp_path, "store", 60)
    first, second = await memory.load("p/", ""), await memory.load("p/", "p/ä")
    assert first is not None
    assert second is not None
    assert first[0] == page("p/ä", token="")
    assert second[0] == page("p/b")
    assert 0 <= first[1] < 60
    memory.close()


async def test_a_remembered_listing_is_told_once(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")))
    memory = RememberedPages(tmp_path, "store", 60)
    assert await memory.load("p/", "") is not None
    assert await memory.load("p/", "") is None
    memory.close()


async def test_a_listing_of_another_store_is_not_told(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")))
    memory = RememberedPages(tmp_path, "another", 60)
    assert await memory.load("p/", "") is None
    memory.close()


async def test_a_remembered_listing_that_makes_no_sense_is_forgotten(tmp_path: Path) -> None:
    await remembered(tmp_path, ("p/", "", page("p/a")), ("q/", "", page("q/a")))
    memory = RememberedPages(tmp_path, "store", 60)
    memory._cache.set(memory._key("p/", ""), {"objects": [[1]], "fetched_at": "x"})
    memory._cache.set(memory._key("q/", ""), "no page")
    assert await memory.load("p/", "") is None
    assert await memory.load("q/", "") is None
    memory.close()


# Everything at once

SIZES = [300_000, MIB, 3 * MIB + 17]
OBJECTS = [version(f"o{number}", SIZES[number % 3]) for number in range(6)]
STEP = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(
        st.just("read"), st.integers(0, 5), st.integers(0, 2**31), st.integers(1, 800_000),
        st.integers(0, 60),
    ),
    st.tuples(st.just("limit"), st.integers(0, 8 * MIB)),
    st.tuples(st.just("record")),
    st.tuples(st.just("tend")),
)  # fmt: skip


class Model:
    """Programs that open, read, cancel and close, while the limit changes."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.open: dict[int, list[CacheFile]] = {}

    async def step(self, action: str, *values: int) -> None:
        await getattr(self, "_" + action)(*values)

    async def _open(self, index: int) -> None:
        file = self.parts.cache.pin(OBJECTS[index])
        await self.parts.cache.ensure_open(file)
        self.open.setdefault(index, []).append(file)

    async def _close(self, index: int) -> None:
        for file in self.open.pop(index, []):
            self.parts.cache.unpin(file)

    async def _read(self, index: int, start: int, size: int, patience: int) -> None:
        one = OBJECTS[index]
        start %= one.size
        stop = min(one.size, start + size)

        async def give_up(scope: trio.CancelScope) -> None:
            for _ in range(patience):
                await trio.lowlevel.checkpoint()
            if patience < 30:
                scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up, nursery.cancel_scope)
            try:
                found = await self.parts.read(one, start, stop)
            except NotKeptError:
                found = bytes(await self.parts.fetcher.read_unkept(one, start, stop))
            assert found == content(one)[start:stop]

    async def _limit(self, limit: int) -> None:
        self.parts.space._limit = limit

    async def _record(self) -> None:
        await self.parts.cache.record()

    async def _tend(self) -> None:
        await self.parts.space.tend()

    async def check(self) -> None:
        """What must hold when nothing is under way."""
        parts = self.parts
        await parts.quiet()
        await parts.space.tend()
        assert parts.space.reserved == 0
        assert all(not file.downloads for file in parts.cache._files.values())
        present = sum(file.present.total for file in parts.cache._files.values())
        assert parts.space.used == present
        assert parts.bytes_on_disk() <= present + 4096 * 4 * len(parts.cache)
        held = sum(files[0].present.total for files in self.open.values())
        assert parts.space.used <= max(parts.space._limit or 0, held)


@given(st.lists(st.lists(STEP, min_size=1, max_size=4), max_size=12))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_programs_do_bytes_are_right_and_room_is_accounted_for(
    rounds: list[list[tuple]],
) -> None:
    async def run(directory: Path) -> None:
        async with cache_in(directory, limit=4 * MIB) as parts:
            model = Model(parts)
            for steps in rounds:
                # The steps of a round happen at once.
                async with trio.open_nursery() as nursery:
                    for step in steps:
                        nursery.start_soon(model.step, *step)
                await model.check()
            for index in range(len(OBJECTS)):
                await model.step("close", index)
            await model.check()
            used = parts.space.used
        async with cache_in(directory) as parts:
            assert parts.space.used == used
            for one in OBJECTS:
                await parts.fetch(one)

    with tempfile.TemporaryDirectory() as directory:
        trio.run(run, Path(directory))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as path:
        yield path


async def test_a_disk_that_fills_up_is_no_error(disk: Path) -> None:
    async with cache_in(disk) as parts:
        model = Model(parts)
        for index in list(range(6)) * 2:
            await model.step("open", index)
            await model.step("read", index, 0, 4 * MIB, 99)
        for index in range(6):
            await model.step("close", index)
        await parts.quiet()
        assert parts.space.reserved == 0
