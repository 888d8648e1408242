"""The cache: what comes and goes, what a restart finds, and what two mounts of it see."""

import os
import shutil
import time
from pathlib import Path

import pytest
import trio

from fusefs.cache import file_cache as cache_files
from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import ORPHAN_AGE_S, is_unused
from fusefs.cache.downloader import NotKeptError
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.passthrough import PassthroughFiles
from tests.support.local_cache import Parts, cache_in, content, recording, version
from tests.support.waiting import eventually

MIB = 1 << 20
A = version("a", MIB)


async def test_a_file_that_got_nothing_leaves_nothing(parts: Parts) -> None:
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
        assert parts.bucket.requested == [("a", 0, MIB)]


async def test_a_file_in_the_place_of_a_cached_one_is_removed(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        [path] = parts.files()
        await parts.fetch(version("b", MIB))
    shutil.copy(path, tmp_path / "restored")
    os.replace(tmp_path / "restored", path)
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        await parts.cache.record()
        assert parts.bucket.requested == [("a", 0, MIB)]
        assert len(parts.files()) == 2
        assert parts.quota.used == 2 * MIB


async def test_of_a_copied_directory_what_is_opened_is_fetched_again(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "first") as parts:
        for key in "ab":
            await parts.fetch(version(key, MIB))
    copy = shutil.copytree(tmp_path / "first", tmp_path / "copy")
    async with cache_in(copy) as parts:
        await parts.fetch(A)
        assert parts.bucket.requested
        assert len(parts.files()) == 2, "the copy of its file is gone"
    async with cache_in(copy) as parts:
        await parts.fetch(A)
        assert parts.bucket.requested == []


async def test_a_dropped_file_is_taken_from_the_kernel_when_no_program_has_it_open(
    tmp_path: Path,
) -> None:
    class Noted(PassthroughFiles):
        def drop(self, file: CacheFile) -> None:
            let_go.append(file)

    let_go: list[CacheFile] = []
    async with cache_in(tmp_path, backing=Noted()) as parts:
        await parts.fetch(A)
        await parts.fetch(version("b", MIB))
        idle, used = parts.cache.find(A), parts.cache.pin(version("b", MIB))
        assert idle is not None
        parts.cache.discard(idle)  # by the scrub, say
        parts.cache.discard(used)
        # Else its blocks would stay in use until the daemon ends.
        assert let_go == [idle]
        parts.cache.unpin(used)
        assert let_go == [idle, used]


async def test_a_dropped_file_that_is_read_on_leaves_its_successor_alone(parts: Parts) -> None:
    await parts.fetch(A)
    held = parts.cache.pin(A)
    parts.cache.discard(held)  # its bytes are wrong
    await parts.fetch(A)
    parts.cache.pin_again(held)
    assert parts.downloader.want(held, 0, MIB)
    await parts.quiet()
    await parts.fetch(A)
    for _ in range(2):
        parts.cache.unpin(held)
    await parts.fetch(A)
    assert len(parts.bucket.requested) == 2


async def test_what_arrives_for_a_dropped_file_costs_its_successor_no_row(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        await parts.cache.record()
        held = parts.cache.pin(A)
        parts.cache.discard(held)  # its bytes are wrong
        await parts.fetch(A)
        parts.cache.arrived(held, 0, 10, [Sum(0, 10, 0)])  # of a download that was under way
        parts.cache.unpin(held)
        await parts.cache.record()
        assert parts.quota.used == MIB
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        assert parts.bucket.requested == []
        assert parts.quota.used == MIB


async def test_what_was_uploaded_is_not_taken_while_its_version_is_fetched(tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.write_bytes(content(A))
    async with cache_in(tmp_path / "cache") as parts:
        parts.bucket.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.fetch, A)
            await eventually(lambda: parts.bucket.requested != [])
            with staged.open("rb") as file:
                assert not parts.cache.adopt_uploaded(A, str(staged), file.fileno())
            parts.bucket.let_go()
        assert staged.exists()
        await parts.fetch(A)
        assert len(parts.files()) == len(parts.bucket.requested) == 1


async def test_a_file_that_is_dropped_while_it_is_recorded_leaves_no_row(parts: Parts) -> None:
    await parts.fetch(A)
    file = parts.cache.find(A)
    assert file is not None
    async with recording(parts):
        parts.cache.discard(file)
    await parts.cache.record()
    assert parts.cache._catalog.newest(1000) == []
    assert (parts.quota.committed, parts.quota.uncommitted) == (0, 0)


@pytest.mark.parametrize("is_dropped", [True, False])
async def test_a_file_without_checksums_yet_is_not_passed_on_and_stays(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, *, is_dropped: bool
) -> None:
    await parts.fetch(A)
    file = parts.cache.pin(A)
    assert await parts.cache.ensure_open(file)

    def sums_in(*_: object) -> list[Sum]:
        if is_dropped:
            file.lose()
        return []

    with monkeypatch.context() as patch:
        patch.setattr("fusefs.cache.integrity.verify.sums_in", sums_in)
        assert await parts.cache.integrity.read(file, 0, MIB) is None
    assert parts.cache.find(A) is file
    assert is_dropped or await parts.cache.integrity.read(file, 0, MIB) is not None
    parts.cache.unpin(file)


async def test_a_dropped_file_is_not_learned_from_the_catalog(tmp_path: Path) -> None:
    theirs = version("b", MIB)
    async with cache_in(tmp_path) as parts, cache_in(tmp_path) as other:
        await other.fetch(theirs)
        await other.cache.record()
        await parts.fetch(A)
        await parts.cache.record()
        file = parts.cache.find(A)
        assert file is not None
        parts.cache.discard(file)
        await parts.cache.residency.load_oldest()
        assert parts.cache.find(theirs) is not None
        assert parts.cache.find(A) is None


async def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    async with cache_in(tmp_path / "cache") as parts:
        await parts.fetch(A)
    [path] = (tmp_path / "cache" / "objects").glob("*/*")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    async with cache_in(tmp_path / "cache") as parts:
        with pytest.raises(NotKeptError):
            await parts.fetch(A)


async def test_files_without_a_row_are_swept_when_they_are_old(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await parts.fetch(A)
    await parts.cache.record()
    [known] = parts.files()
    old, new = (known.with_name(known.parent.name + digit * 30 + ".00000000") for digit in "ab")
    foreign = known.with_name(known.parent.name + "\udcff.00000000")  # no UTF-8
    for path in (old, new, foreign):
        path.write_bytes(b"left by a daemon that was killed")
    long_ago = time.time() - 2 * ORPHAN_AGE_S
    for path in (old, known, foreign):
        os.utime(path, (long_ago, long_ago))
    await parts.cache.sweep()
    assert parts.files() == sorted([known, new, foreign])


async def test_what_another_mount_evicted_is_fetched_again(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as one, cache_in(tmp_path) as other:
        await one.fetch(A)
        for parts in (one, other):
            await parts.cache.record()
        await other.fetch(A)
        file = other.cache.find(A)
        assert file is not None
        await other.cache.evict(file)
        await one.fetch(A)
        assert len(one.bucket.requested) == 2
        await one.cache.record()
        assert one.quota.used == MIB


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
                assert await parts.downloader.read_unkept(A, 0, MIB) == content(A)
        assert one.quota.reserved == other.quota.reserved == 0
    async with cache_in(tmp_path) as parts:
        await parts.fetch(A)
        assert parts.bucket.requested == []
        assert parts.quota.used == MIB


async def test_the_keeper_of_the_catalog_records_and_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "RECORD_EVERY_S", 0.01)
    monkeypatch.setattr(cache_files, "SYNC_AFTER_S", 0.0)
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        nursery.start_soon(parts.cache.run)
        await parts.fetch(A)
        await eventually(
            lambda: [row.is_synced for row in parts.cache._catalog.newest(1000)] == [True]
        )
        nursery.cancel_scope.cancel()


async def test_a_file_with_many_ranges_is_recorded_when_much_is_new_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.cache.catalog_writer.MOST_RANGES", 1)
    async with cache_in(tmp_path, limit=15 * 64) as parts:
        file = parts.cache.pin(A)
        assert await parts.cache.ensure_open(file)
        for start, recorded in ((0, 10), (20, 10), (40, 30), (60, 30)):
            parts.cache.arrived(file, start, start + 10)
            await parts.cache.record()
            assert file.recorded == recorded
    async with cache_in(tmp_path) as parts:
        assert parts.quota.used == 40


async def test_a_file_in_use_is_opened_when_another_mount_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "RECORD_EVERY_S", 0.01)
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        await parts.fetch(A)
        used = parts.cache.pin(A)
        nursery.start_soon(parts.cache.run)
        async with cache_in(tmp_path) as other:
            await other.fetch(version("b", MIB))
            await other.cache.record()
            await eventually(lambda: used.fd >= 0)  # with the lock that keeps others off
        nursery.cancel_scope.cancel()


async def test_opening_is_all_or_nothing_however_it_is_cancelled(parts: Parts) -> None:
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
    assert len(parts.bucket.requested) == 1


def test_a_file_is_unused_when_no_process_has_it_open_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDWR)
    assert is_unused(fd)
    with path.open("rb"):
        assert not is_unused(fd)
    assert is_unused(fd)
    os.close(fd)
