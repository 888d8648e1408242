"""Room: what is reserved, what goes first, and what may not go."""

import errno
import mmap
import os
import sqlite3
import time
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.disk import Disk
from fusefs.cache.downloader import NotKeptError
from fusefs.linux.clock import steady_time
from tests.support.local_cache import Parts, cache_in, version
from tests.support.machine.disks import small_disk
from tests.support.semantics import states
from tests.support.waiting import eventually

MIB = 1 << 20
UNLINK = Disk.unlink


def kept(parts: Parts, *keys: str, size: int = MIB) -> list[str]:
    """Those of the keys whose version is in the cache."""
    found = [(key, parts.cache.find(version(key, size))) for key in keys]
    return [key for key, file in found if file is not None and file.is_complete]


async def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        for key in "abc":
            await parts.fetch(version(key, MIB))
        await parts.cache.record()
        await parts.fetch(version("a", MIB))
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        await parts.evictor.tend()
        assert kept(parts, *"abc")[0] == "a"
        assert kept(parts, "b") == []


async def test_when_open_files_fill_it_more_is_refused(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        file = parts.cache.pin(version("open", 2 * MIB))
        await parts.fetch(version("open", 2 * MIB))
        with pytest.raises(NotKeptError):
            await parts.fetch(version("a", MIB))
        warning = parts.cache.trouble.recent
        assert warning is not None
        assert "too small for the open files" in warning
        assert "does not work" not in warning
        parts.cache.unpin(file)
        await parts.fetch(version("a", MIB))


async def test_a_limit_that_the_disk_does_not_allow_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        async with cache_in(disk / "cache", limit=64 * MIB, floor=4 * MIB) as parts:
            assert parts.quota.limit <= parts.quota.allowed <= 12 * MIB
            assert parts.quota.limit_why is not None
            assert "less than --cache-size 64MiB" in parts.quota.limit_why
        async with cache_in(disk / "cache", limit=2 * MIB, floor=4 * MIB) as parts:
            assert (parts.quota.limit, parts.quota.limit_why) == (2 * MIB, None)
            assert parts.quota.allowed == 2 * MIB


async def test_what_is_on_its_way_counts(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=3 * MIB) as parts:
        parts.bucket.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.fetch, version("a", MIB))
            nursery.start_soon(parts.fetch, version("b", MIB))
            await eventually(lambda: parts.quota.reserved == 2 * MIB)
            assert not await parts.evictor.reserve(2 * MIB)
            assert await parts.evictor.reserve(MIB)
            parts.quota.release(MIB)
            parts.bucket.let_go()
        assert (parts.quota.reserved, parts.quota.used) == (0, 2 * MIB)


@states("The cache leaves 10% of its disk's inodes free.")
async def test_the_floor_of_free_inodes_is_kept(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16, inodes=400) as disk:
        async with cache_in(disk / "cache", inode_floor=40) as parts:
            keys = [f"{number:03}" for number in range(200)]
            for key in keys:
                await parts.fetch(version(key, 10))
                assert os.statvfs(disk).f_favail >= 40
            assert kept(parts, *keys[:20], size=10) == keys[:20]
            assert parts.cache.trouble.recent is None
            # Somebody else takes what is left.
            for number in range(os.statvfs(disk).f_favail - 20):
                (disk / f"{number}").touch()
            parts.quota._free_known_until = 0.0
            await parts.evictor.tend()
            assert os.statvfs(disk).f_favail >= 40
            assert kept(parts, *keys[:20], size=10) == keys[:20]


async def test_a_disk_that_counts_no_inodes_has_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    fields = list(status)
    fields[5:8] = [0, 0, 0]  # f_files, f_ffree and f_favail, as btrfs tells them
    monkeypatch.setattr("fusefs.cache.quota.os.statvfs", lambda _path: os.statvfs_result(fields))
    async with cache_in(tmp_path, inode_floor=0) as parts:
        await parts.fetch(version("a", MIB))
        assert kept(parts, "a") == ["a"]


async def test_a_disk_that_is_taken_away_ends_nothing(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await parts.fetch(version("a", MIB))

    def statvfs(path: Path) -> os.statvfs_result:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr("fusefs.cache.quota.os.statvfs", statvfs)
    for _ in range(2):
        parts.quota._free_known_until = 0.0
        await parts.evictor.tend()
    assert caplog.text.count("its free space is not known") == 1
    assert kept(parts, "a") == ["a"]


async def test_a_lowered_limit_is_kept_without_a_reader(parts: Parts) -> None:
    for key in "abcd":
        await parts.fetch(version(key, MIB))
    parts.quota._limit = 2 * MIB
    await parts.evictor.tend()
    assert parts.quota.used <= 2 * MIB
    assert kept(parts, *"abcd") == ["a", "b"]


async def test_a_catalog_that_cannot_be_written_costs_no_more_than_the_room_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async with cache_in(tmp_path, limit=4 * MIB) as parts:
        for key in "abcd":
            await parts.fetch(version(key, MIB))
        await parts.cache.record()
        monkeypatch.setattr(parts.cache._catalog, "remove", fail)
        await parts.fetch(version("e", MIB))
        assert len(kept(parts, *"abcd")) == 3
        assert parts.quota.used == 4 * MIB
        monkeypatch.undo()
        await parts.cache.record()
        assert len(parts.cache._catalog.newest(1000)) == 4
        assert parts.quota.used == 4 * MIB


async def test_a_mapped_file_counts_until_it_is_let_go(parts: Parts) -> None:
    await parts.fetch(version("a", MIB))
    [path] = parts.files()
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    parts.quota._limit = 0
    await parts.evictor.tend()
    assert parts.files() == []
    assert parts.quota.used == MIB
    before = bytes(mapping[:16])
    await parts.evictor.tend()
    assert (bytes(mapping[:16]), parts.quota.used) == (before, MIB)
    mapping.close()
    await parts.evictor.tend()
    assert parts.quota.used == 0


async def test_a_file_that_another_mount_has_open_stays(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as one, cache_in(tmp_path) as other:
        a = version("a", MIB)
        await one.fetch(a)
        await one.cache.record()
        file = other.cache.pin(a)
        assert await other.cache.ensure_open(file)
        one.quota._limit = 0
        await one.evictor.tend()
        assert len(one.files()) == 1
        other.cache.unpin(file)
        one.evictor._try_again_at = 0.0  # as if that was ten seconds ago
        await one.evictor.tend()
        assert one.files() == []


async def test_what_other_mounts_have_open_is_not_tried_for_each_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def unlink(disk: Disk, name: str, generation: str) -> int | None:
        tried.append(name)
        return UNLINK(disk, name, generation)

    monkeypatch.setattr(Disk, "unlink", unlink)
    async with cache_in(tmp_path) as other, cache_in(tmp_path, limit=8 * MIB) as one:
        for number in range(8):
            file = other.cache.pin(version(f"{number}", MIB))
            await other.downloader.wait_for(file, 0, MIB)
        await other.cache.record()
        await one.cache.record()
        for _ in range(5):
            assert not await one.evictor.reserve(MIB)
        assert len(tried) == 8


async def test_where_all_is_in_use_a_mount_that_is_alone_does_not_read_its_catalog_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    async with cache_in(tmp_path, limit=MIB) as one:
        oldest = one.cache._catalog.oldest
        monkeypatch.setattr(
            one.cache._catalog, "oldest", lambda after: read.append(after) or oldest(after)
        )
        held = one.cache.pin(version("open", MIB))
        await one.downloader.wait_for(held, 0, MIB)
        assert not await one.evictor.reserve(MIB)
        assert read == []
        async with cache_in(tmp_path) as other:
            await other.fetch(version("a", MIB))
        one.evictor._learn_at = 0.0  # as if that was long ago
        assert not await one.evictor.reserve(MIB)
        assert len(read) == 2  # a page, and the end
        assert one.cache.evicted == 1
        one.cache.unpin(held)


async def test_a_twentieth_of_the_time_is_spent_on_what_other_mounts_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    learned = 0

    async def load_oldest() -> bool:
        nonlocal learned
        learned += 1
        mock_clock.jump(3.0)
        return False

    async with cache_in(tmp_path, limit=0) as parts:
        monkeypatch.setattr(parts.cache.residency, "load_oldest", load_oldest)
        for pause_s, times in ((0, 1), (59, 1), (2, 2)):
            mock_clock.jump(pause_s)
            assert not await parts.evictor.reserve(MIB)
            assert learned == times


async def test_what_was_closed_since_a_job_began_is_not_evicted_for_it(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        held = parts.cache.pin(version("open before", MIB))
        await parts.downloader.wait_for(held, 0, MIB)
        began = steady_time()
        parts.cache.unpin(held)
        await parts.fetch(version("a", MIB))
        assert not await parts.evictor.reserve(MIB, keep_used_since=began)
        assert held.is_complete


async def test_what_was_used_before_the_clock_was_set_back_is_evicted_for_a_job(
    tmp_path: Path,
) -> None:
    async with cache_in(tmp_path) as parts:
        for key in "ab":
            await parts.fetch(version(key, MIB))
        await parts.cache.record()
        in_a_year = steady_time() + 365 * 86400
        files = parts.cache.files()
        parts.cache._catalog.touch([(in_a_year, file.name, file.generation) for file in files])
        parts.cache._catalog_writer._used.clear()
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        assert await parts.evictor.reserve(MIB, keep_used_since=steady_time())
        assert len(kept(parts, *"ab")) == 1


async def test_what_is_kept_open_for_a_first_open_is_evicted_for_a_later_job(
    tmp_path: Path,
) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        for key in ("a", "b"):
            ahead = parts.cache.pin(version(key, MIB))
            await parts.downloader.wait_for(ahead, 0, MIB)
            parts.cache.keep_open(ahead, parts.downloader.nursery)
            parts.cache.unpin(ahead)
        assert await parts.evictor.reserve(2 * MIB, keep_used_since=steady_time())


async def test_a_reader_that_joins_a_job_has_the_room_of_a_reader(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts, trio.open_nursery() as nursery:
        began = time.time()
        for key in "ab":
            await parts.fetch(version(key, MIB))
        new = version("new", MIB)
        file = parts.cache.pin(new)
        async with parts.evictor._evicting:
            nursery.start_soon(parts.downloader.fill, file, 0, MIB, began)  # nothing older is there
            await wait_all_tasks_blocked()
            nursery.start_soon(parts.fetch, new)
            await wait_all_tasks_blocked()
        await eventually(lambda: file.is_complete)
        parts.cache.unpin(file)


async def test_a_job_that_joins_what_is_fetched_ahead_has_the_room_of_a_job(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts, trio.open_nursery() as nursery:
        await parts.fetch(version("a", MIB))
        held = parts.cache.pin(version("held", MIB - 10_000))
        await parts.downloader.wait_for(held, 0, held.size)
        file = parts.cache.pin(version("new", 20_000))
        async with parts.evictor._evicting:
            assert parts.downloader.want(file, 0, file.size)
            await wait_all_tasks_blocked()
            nursery.start_soon(parts.downloader.fill, file, 0, file.size, time.time() + 1)
            await wait_all_tasks_blocked()
        await eventually(lambda: file.is_complete)
        assert kept(parts, "a") == []
        for used in (held, file):
            parts.cache.unpin(used)


async def test_a_cancelled_wait_for_room_takes_none(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        await parts.fetch(version("a", MIB))
        async with parts.evictor._evicting, trio.open_nursery() as nursery:
            nursery.start_soon(parts.evictor.reserve, 2 * MIB)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert parts.quota.reserved == 0
        assert kept(parts, "a") == ["a"]
