"""Downloads: joined, woken as bytes arrive, ended when unwanted, and never half done."""

import errno
import itertools
import math
import os
import random
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.cached_file import BLOCK, MOST_RANGES, CacheFile, OpenFile
from fusefs.cache.downloader import FIRST_BYTES, PART, NotKeptError
from fusefs.store.errors import StaleVersionError, UnreachableError
from tests.support.local_cache import CHUNK, LIMIT_S, Parts, cache_in, content, version
from tests.support.waiting import eventually

MIB = 1 << 20
BIG = version("big", 20 * MIB + 123)


async def test_a_first_read_brings_the_first_bytes_and_a_jump_a_block(parts: Parts) -> None:
    await parts.read(BIG, 0, 10)
    await parts.read(BIG, 10 * MIB + 5, 10 * MIB + 10)
    await parts.quiet()
    first, second = parts.bucket.requested
    assert first == ("big", 0, FIRST_BYTES)
    assert second[1] == 10 * MIB + 5
    assert second[2] - second[1] <= 2 * BLOCK


def test_random_reads_of_a_large_file_are_noted_in_few_ranges() -> None:
    file = CacheFile("large", 1 << 40)
    file.arrived(0, 1 << 30)
    reads = [file.first_read(at, at + 4096) for at in range(0, 1 << 30, 16 << 10)]
    assert set(reads[:MOST_RANGES]) == {4096}
    assert set(reads[MOST_RANGES:]) == {4096, 0}, "of each block the first read"
    assert len(list(file.read)) <= 2 * MOST_RANGES


async def test_a_read_asks_only_for_what_is_missing(parts: Parts) -> None:
    await parts.read(BIG, 4 * MIB, 5 * MIB)
    await parts.read(BIG, 3 * MIB, 6 * MIB)
    await parts.quiet()
    requested = sorted((start, stop) for _, start, stop in parts.bucket.requested)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(requested))


async def test_a_range_is_wanted_ahead_in_parts(parts: Parts) -> None:
    file = parts.cache.pin(BIG)
    started = parts.downloader.want(file, 0, BIG.size)
    # A second interest joins the downloads, and no range is requested twice.
    assert parts.downloader.want(file, 0, BIG.size) == started
    await parts.quiet()
    assert file.is_complete
    parts.cache.unpin(file)
    assert sorted(parts.bucket.requested) == [
        ("big", 0, PART),
        ("big", PART, 2 * PART),
        ("big", 2 * PART, BIG.size),
    ]


async def test_a_download_ends_with_its_last_reader(parts: Parts) -> None:
    parts.bucket.hold()
    scopes = [trio.CancelScope(), trio.CancelScope()]

    async def read(scope: trio.CancelScope) -> None:
        with scope:
            await parts.read(BIG, 0, 10)

    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(read, scope)
        await eventually(lambda: len(parts.bucket.running) == 1)
        await wait_all_tasks_blocked()
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        assert parts.downloader.under_way == 1
        scopes[1].cancel()
    await parts.quiet()
    assert parts.quota.reserved == 0
    assert parts.files() == []


async def test_who_comes_when_a_download_was_given_up_gets_another(parts: Parts) -> None:
    parts.bucket.hold()
    file = parts.cache.pin(BIG)
    [download] = parts.downloader.want(file, 0, MIB)
    await eventually(lambda: len(parts.bucket.running) == 1)
    download.unwant()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.read_pinned, file, 0, 10)
        await wait_all_tasks_blocked()
        parts.bucket.let_go()
    await parts.quiet()
    parts.cache.unpin(file)


async def test_a_small_file_given_up_while_it_is_created_is_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = version("small", 4 * CHUNK)
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        file = parts.cache.pin(small)
        [download] = parts.downloader.want(file, 0, small.size)
        create = parts.cache.disk.create

        async def give_up_and_come_back() -> None:
            download.unwant()
            nursery.start_soon(parts.read_pinned, file, 0, small.size)
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()

        def create_slowly(name: str, size: int) -> OpenFile:
            found = create(name, size)
            monkeypatch.undo()
            trio.from_thread.run(give_up_and_come_back)
            return found

        monkeypatch.setattr(parts.cache.disk, "create", create_slowly)
        # So slow a disk that it is used in threads.
        monkeypatch.setattr(parts.downloader.disk_latency, "_slow_until", math.inf)
        await eventually(lambda: file.is_complete)
        await parts.quiet()
        assert len(parts.files()) == 1
        assert parts.quota.used == small.size
        parts.cache.unpin(file)


async def test_what_had_arrived_of_a_download_that_was_given_up_is_kept(parts: Parts) -> None:
    file = parts.cache.pin(BIG)
    [download] = parts.downloader.want(file, 0, MIB)
    parts.bucket.fault = lambda _key, at: download.unwant() if at == 4 * CHUNK else None
    await parts.quiet()
    assert file.present.covers(0, 4 * CHUNK)
    assert not file.is_complete
    assert parts.quota.reserved == 0
    assert parts.quota.used == file.present.total
    parts.cache.unpin(file)


@pytest.mark.parametrize("error", [StaleVersionError("changed"), UnreachableError("gone")])
async def test_an_error_of_the_store_is_reported_to_every_reader(
    parts: Parts, error: Exception
) -> None:
    def fail(_key: str, offset: int) -> None:
        if offset >= MIB // 2:
            raise error

    parts.bucket.fault = fail
    a, failed = version("a", MIB), 0

    async def read() -> None:
        nonlocal failed
        with pytest.raises(type(error)):
            await parts.read(a, 0, MIB)
        failed += 1

    # A reader whose bytes came before the error is served.
    assert await parts.read(a, 0, 100) == content(a)[:100]
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(read)
    await parts.quiet()
    assert failed == 5
    # What came before is right, and kept.
    assert await parts.read(a, 0, MIB // 2) == content(a)[: MIB // 2]
    assert parts.quota.reserved == 0


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE]
)
async def test_a_disk_that_takes_no_more_sends_readers_past_the_cache(
    parts: Parts, number: int
) -> None:
    def fail(_key: str, offset: int) -> None:
        if offset >= MIB // 2:
            raise OSError(number, os.strerror(number))

    parts.bucket.fault = fail
    a = version("a", MIB)
    with trio.fail_after(LIMIT_S), pytest.raises(NotKeptError):
        await parts.read(a, 0, MIB)
    await parts.quiet()
    assert parts.quota.reserved == 0
    parts.bucket.fault = lambda _key, _offset: None
    assert await parts.downloader.read_unkept(a, 5, MIB) == content(a)[5:]
    # What had arrived stays, unless the file itself may be bad.
    assert (parts.cache.find(a) is None) == (number == errno.EIO)


async def test_a_directory_that_takes_no_file_sends_readers_past_the_cache(
    parts: Parts, tmp_path: Path
) -> None:
    (tmp_path / "objects").rmdir()
    with pytest.raises(NotKeptError):
        await parts.read(version("a", MIB), 0, 10)
    assert parts.cache.trouble.recent is not None
    assert parts.quota.reserved == 0


async def test_an_open_file_keeps_its_descriptor_and_a_closed_one_gives_it_back(
    parts: Parts,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        await parts.fetch(version(f"a{number}", CHUNK))
    await parts.quiet()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


async def _disturbed(parts: Parts, file: CacheFile, dice: random.Random) -> None:
    """A reader that is cancelled at some checkpoint, or is not."""
    start = dice.randrange(file.size)
    stop = min(file.size, start + dice.randrange(1, MIB))
    patience = dice.randrange(30)
    parts.cache.pin_again(file)
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    for _ in range(patience):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                if dice.random() < 0.7:
                    nursery.start_soon(cancel)
                found = await parts.read_pinned(file, start, stop)
                assert file.version is not None
                assert found == content(file.version)[start:stop]
                nursery.cancel_scope.cancel()
    finally:
        parts.cache.unpin(file)


@pytest.mark.parametrize("seed", range(5))
async def test_readers_cancelled_anywhere_leave_no_half_state(parts: Parts, seed: int) -> None:
    dice = random.Random(seed)
    versions = [version(f"f{number}", 3 * MIB + number) for number in range(4)]
    files = [parts.cache.pin(one) for one in versions]
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(_disturbed, parts, dice.choice(files), dice)
                for _ in range(dice.randrange(4)):
                    await trio.lowlevel.checkpoint()
    await parts.quiet()
    assert all(file.pins == 1 and not file.downloads for file in files)
    assert parts.quota.reserved == 0
    assert parts.quota.used == sum(file.present.total for file in files)
    for file in files:
        parts.cache.unpin(file)
    for one in versions:
        await parts.fetch(one)
    await parts.cache.record()
    assert parts.quota.uncommitted == 0
    assert parts.quota.used == sum(one.size for one in versions)


async def test_many_readers_of_a_range_cost_one_request(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(parts.fetch, version("a", MIB))
    assert parts.bucket.requested == [("a", 0, MIB)]
