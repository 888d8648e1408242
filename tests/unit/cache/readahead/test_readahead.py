"""Windows and siblings: what is fetched ahead, and what is not."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from fusefs.cache import file_cache
from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download
from fusefs.cache.ranges import RangeMap
from fusefs.cache.readahead.demand import PERIOD_S, Demand
from fusefs.cache.readahead.next_files import NextFiles
from fusefs.cache.readahead.path_meter import LEAST_WIDTH, PathMeter
from fusefs.cache.readahead.siblings import (
    FILES_PER_SECOND,
    FOLDER_AFTER,
    MOST_WAITING,
    SMALL,
    UNREAD_EACH,
    Siblings,
)
from fusefs.cache.readahead.window import FIRST_WINDOW, TOLERANCE, Readahead
from fusefs.store.interface import ObjectInfo, ObjectVersion
from tests.support.local_cache import Parts, cache_in, content, version
from tests.support.waiting import eventually

MIB = 1 << 20
WINDOW = LEAST_WIDTH * PART  # of a path that nothing is known of


class RecordingDownloader:
    """A downloader that records what is wanted; nothing arrives until `bring`."""

    room = 1 << 40

    def __init__(self, file: CacheFile) -> None:
        self.file = file
        self.path = PathMeter(64, PART)
        self.ranges: list[tuple[int, int]] = []
        self.downloads: list[Download] = []

    def want(self, file: CacheFile, start: int, stop: int) -> list[Download]:
        assert file is self.file
        self.ranges.append((start, stop))
        download = Download(file, start, stop, lambda _change: None)
        download.wanted = 1
        self.downloads.append(download)
        return [download]

    def bring(self) -> None:
        """Everything that was wanted arrives."""
        for download in self.downloads:
            self.file.present.add(download.start, download.stop)
            download.finish(None)


def readahead_of(size: int) -> tuple[Readahead, RecordingDownloader]:
    downloader = RecordingDownloader(CacheFile("x", size))
    return Readahead(downloader, downloader.file), downloader  # type: ignore[arg-type]


def read_all(window: Readahead, start: int, stop: int, step: int = 128 << 10) -> None:
    for at in range(start, stop, step):
        window.reads(at, min(at + step, stop))


def test_the_first_read_at_the_start_asks_for_what_follows() -> None:
    window, downloader = readahead_of(1 << 30)
    window.reads(0, 4096)
    assert downloader.ranges == [(4096, 4096 + FIRST_WINDOW)]


def test_reading_in_order_doubles_the_window_up_to_its_largest() -> None:
    window, downloader = readahead_of(1 << 40)
    ahead = [0]
    for at in range(0, 4 * WINDOW, MIB):
        window.reads(at, at + MIB)
        ahead.append(max(stop for _, stop in downloader.ranges) - at - MIB)
    assert max(ahead) > WINDOW - PART
    assert max(ahead) <= WINDOW
    # Never further behind than half of the window.
    assert min(ahead[len(ahead) // 2 :]) >= WINDOW // 2 - PART - MIB


def test_a_reader_in_order_gets_the_whole_width_of_a_path_that_needs_more() -> None:
    window, downloader = readahead_of(1 << 40)
    downloader.path.note_first(MIB, 0.03)
    downloader.path.note_rest(7 * MIB, 7 * MIB / 15e6)  # a slow connection: many fill the path
    width = downloader.path.width
    assert width > 4 * LEAST_WIDTH
    ahead = []
    for at in range(0, 4 * width * PART, MIB):
        window.reads(at, at + MIB)
        ahead.append(max(stop for _, stop in downloader.ranges) - at - MIB)
        # What may come in vain is bounded by what was read.
        assert ahead[-1] <= max(FIRST_WINDOW, 8 * (at + MIB))
    assert (width - 1) * PART < max(ahead) <= width * PART


def test_a_jump_makes_the_window_small_again() -> None:
    window, downloader = readahead_of(1 << 40)
    read_all(window, 0, 256 * MIB)
    downloader.ranges.clear()
    window.reads(1 << 33, (1 << 33) + 4096)
    assert downloader.ranges == []
    window.reads((1 << 33) + 4096, (1 << 33) + 8192)
    assert downloader.ranges == [((1 << 33) + 8192, (1 << 33) + 8192 + FIRST_WINDOW)]


def test_random_reads_ask_for_nothing_ahead() -> None:
    window, downloader = readahead_of(1 << 40)
    for number in range(1, 200):
        at = number * 7919 * 64 * MIB % (1 << 40)
        window.reads(at, at + 4096)
    assert downloader.ranges == []


def test_reads_slightly_out_of_order_count_as_in_order() -> None:
    window, downloader = readahead_of(1 << 30)
    step = 128 << 10
    for at in range(0, 64 * MIB, 4 * step):
        for shift in (2, 0, 3, 1):
            window.reads(at + shift * step, at + (shift + 1) * step)
    assert max(stop for _, stop in downloader.ranges) > 64 * MIB + 8 * MIB


def test_a_complete_file_needs_nothing_ahead() -> None:
    window, downloader = readahead_of(10 * MIB)
    downloader.file.present.add(0, 10 * MIB)
    read_all(window, 0, 10 * MIB)
    assert downloader.ranges == []


def test_closing_loses_interest_in_everything_under_way() -> None:
    window, downloader = readahead_of(1 << 30)
    read_all(window, 0, 32 * MIB)
    window.close()
    assert not any(download.wanted for download in downloader.downloads)


@given(
    st.integers(1, 300 * MIB),
    st.lists(
        st.tuples(
            st.one_of(
                st.just(0), st.integers(-TOLERANCE - 9, TOLERANCE + 9), st.integers(0, 1 << 29)
            ),
            st.integers(1, MIB),
            st.booleans(),
        ),
        max_size=60,
    ),
)
@settings(deadline=None, max_examples=200)
def test_a_window_asks_for_each_byte_once_and_for_none_behind_the_end(
    size: int, reads: list[tuple[int, int, bool]]
) -> None:
    window, downloader = readahead_of(size)
    at, jumped = 0, 0
    for distance, length, arrives in reads:
        start = min(max(0, at + distance), size - 1)
        stop = min(size, start + length)
        if abs(start - at) > TOLERANCE:
            jumped = len(downloader.ranges)
        window.reads(start, stop)
        at = stop if abs(start - at) > TOLERANCE else max(at, stop)
        if arrives:
            downloader.bring()
    for start, stop in downloader.ranges:
        assert 0 <= start < stop <= size
        assert stop - start <= WINDOW + PART + TOLERANCE + MIB
    seen = RangeMap()
    for start, stop in downloader.ranges[jumped:]:
        assert seen.add(start, stop) == stop - start


class OneFolder:
    """A listing of one folder."""

    def __init__(self, files: list[ObjectInfo]) -> None:
        self._files = files

    def files(self, _prefix: str, behind: str) -> Iterator[ObjectInfo]:
        yield from (info for info in self._files if info.key > behind)
        yield from (info for info in self._files if info.key <= behind)

    def next_folder(self, _prefix: str) -> str | None:
        return None


def infos(count: int, size: int = 1000) -> list[ObjectInfo]:
    return [ObjectInfo(f"d/{number:03}", size, '"1"', 0) for number in range(count)]


@asynccontextmanager
async def held(tmp_path: Path) -> AsyncIterator[Parts]:
    """A cache whose bucket does not answer until `let_go`."""
    async with cache_in(tmp_path) as parts:
        parts.bucket.hold()
        yield parts
        parts.bucket.let_go()
        await parts.quiet()


def start_reading(parts: Parts, info: ObjectInfo) -> None:
    file = parts.cache.pin(info.version)
    parts.downloader.want(file, 0, info.size)
    parts.cache.unpin(file)


def requested_keys(parts: Parts) -> set[str]:
    return {key for key, _, _ in parts.bucket.requested}


async def test_a_few_files_of_a_directory_bring_others(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        files = infos(50)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(files))
        for info in files[: FOLDER_AFTER - 1]:
            siblings.opened("d/", info, was_there=False)
        await wait_all_tasks_blocked()
        assert requested_keys(parts) == set()
        siblings.opened("d/", files[FOLDER_AFTER - 1], was_there=False)
        await eventually(lambda: len(requested_keys(parts)) >= FOLDER_AFTER)
        siblings.close()


@pytest.mark.parametrize(
    ("latency_s", "most"), [(0.001, LEAST_WIDTH), (0.01, 20), (0.1, MOST_WAITING)]
)
@pytest.mark.parametrize("beyond", [0, 1])
async def test_siblings_wait_where_many_readers_wait(
    tmp_path: Path, latency_s: float, most: int, beyond: int
) -> None:
    readers = most + beyond
    async with held(tmp_path) as parts:
        parts.downloader.path.latency_s = latency_s
        parts.downloader.most_small = 128
        files = infos(100)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(files))
        async with trio.open_nursery() as nursery:
            for number in range(readers):
                awaited = version(f"awaited-{number}", 1000)
                nursery.start_soon(parts.downloader.wait_for, parts.cache.pin(awaited), 0, 1000)
            await wait_all_tasks_blocked()
            assert parts.downloader.demand.count == readers
            for info in files[:FOLDER_AFTER]:
                siblings.opened("d/", info, was_there=False)
            await wait_all_tasks_blocked()
            others = {key for key in requested_keys(parts) if key.startswith("d/")}
            assert bool(others) == (beyond == 0)
            parts.bucket.let_go()
        assert parts.downloader.demand.count == 0
        # The next open is the reason to begin, unless there were many readers a moment ago.
        await trio.sleep(2 * PERIOD_S if beyond else 0)
        siblings.opened("d/", files[FOLDER_AFTER], was_there=False)
        await eventually(lambda: len(requested_keys(parts)) >= readers + LEAST_WIDTH)
        siblings.close()


def test_readers_that_have_just_been_answered_count_for_a_while() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    for by in (1, 1, 1, -1, -1, -1):
        demand.change(by)
    assert (demand.count, demand.peak) == (0, 3)
    now = 1.5 * PERIOD_S
    demand.change(1)
    assert (demand.count, demand.peak) == (1, 3), "the most of the period before"
    now = 3 * PERIOD_S
    assert demand.peak == 1
    demand.change(-1)
    assert demand.peak == 1
    now = 6 * PERIOD_S
    assert demand.peak == 0


async def test_siblings_are_bounded_by_how_many_were_opened(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        others = [ObjectInfo(f"d/{number}-", 1000, '"1"', 0) for number in range(10)]
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(infos(500)))
        for info in others:
            siblings.opened("d/", info, was_there=False)
        await eventually(lambda: len(requested_keys(parts)) == 10 * UNREAD_EACH)
        await parts.quiet()
        assert len(requested_keys(parts)) == 10 * UNREAD_EACH
        siblings.close()


async def test_siblings_that_are_opened_bring_more(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = infos(200)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(files))
        for info in files[:20]:
            siblings.opened("d/", info, was_there=False)
            await parts.quiet()
        useful = 20 - FOLDER_AFTER
        expected = useful + UNREAD_EACH * 20
        await eventually(lambda: len(requested_keys(parts)) == expected)
        siblings.close()


async def test_siblings_behind_the_reader_come_first(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = infos(200)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(files))
        for info in files[100 : 100 + FOLDER_AFTER]:
            siblings.opened("d/", info, was_there=False)
        following = files[100 + FOLDER_AFTER :][: UNREAD_EACH * FOLDER_AFTER]
        await eventually(lambda: requested_keys(parts) == {info.key for info in following})
        siblings.close()


async def test_as_many_siblings_are_under_way_as_the_distance_calls_for(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        parts.downloader.path.latency_s = 0.03
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(infos(500)))
        others = [ObjectInfo(f"d/{number}-", 1000, '"1"', 0) for number in range(FOLDER_AFTER)]
        for info in others:
            siblings.opened("d/", info, was_there=False)
        siblings._folders["d/"].useful = 400
        parts.downloader.most_small = 100
        siblings.opened("d/", others[0], was_there=False)
        await eventually(lambda: len(requested_keys(parts)) == round(0.03 * FILES_PER_SECOND))
        siblings.close()


async def test_a_folder_that_was_fetched_whole_begins_the_next_one(tmp_path: Path) -> None:
    class TwoFolders(OneFolder):
        def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
            for info in super().files(prefix, behind):
                yield ObjectInfo(info.key.replace("d/", prefix), info.size, info.etag, 0)

        def next_folder(self, prefix: str) -> str | None:
            return "e/" if prefix == "d/" else None

    async with cache_in(tmp_path) as parts:
        files = infos(20)
        siblings = Siblings(parts.downloader, parts.cache, TwoFolders(files))
        for info in files:
            siblings.opened("d/", info, was_there=False)
            await parts.quiet()
        await eventually(lambda: any(key.startswith("e/") for key in requested_keys(parts)))
        siblings.close()


async def test_files_without_room_are_next_without_a_chain_of_them(tmp_path: Path) -> None:
    """Each file that is refused comes first the next time; nothing grows with how many were."""
    order = [ObjectInfo(f"d/{number:04}", 1000, '"1"', 0) for number in range(400)]
    async with cache_in(tmp_path, limit=100_000) as parts:
        for number in range(100):
            await parts.fetch(version(f"before {number}", 1000))
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(order))
        for info in order[:300]:
            was_there = parts.cache.find(info.version) is not None
            siblings.opened("d/", info, was_there=was_there)
            await parts.fetch(info.version)
            await parts.quiet()
        folder = siblings._folders["d/"]
        assert inspect.isgenerator(folder.order)
        assert folder.refused in order[300:]
        siblings.close()


async def test_large_and_empty_files_are_no_siblings(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        order = infos(10, SMALL + 1) + infos(10, 0)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(order))
        for number in range(10):
            siblings.opened("d/", ObjectInfo(f"other{number}", 10, '"1"', 0), was_there=False)
        await wait_all_tasks_blocked()
        assert requested_keys(parts) == set()
        siblings.close()


async def test_closed_siblings_end_their_downloads(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        parts.bucket.hold()
        files = infos(50)
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(files))
        for info in files[:FOLDER_AFTER]:
            siblings.opened("d/", info, was_there=False)
        await eventually(lambda: bool(parts.bucket.running))
        siblings.close()
        await parts.quiet()
        assert parts.quota.reserved == 0
        assert parts.files() == []
        assert len(parts.cache) == 0


async def test_a_reader_goes_on_when_the_window_that_wanted_it_has_closed(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        big = version("big", 64 * MIB)
        parts.bucket.hold()
        file = parts.cache.pin(big)
        window = Readahead(parts.downloader, file)
        window.reads(0, MIB)
        await eventually(lambda: bool(parts.bucket.running))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_read, parts, big, MIB, 2 * MIB)
            await wait_all_tasks_blocked()
            window.close()
            parts.bucket.let_go()
        parts.cache.unpin(file)
        await parts.quiet()
        assert not parts.bucket.overlapped


async def check_read(parts: Parts, big: ObjectVersion, start: int, stop: int) -> None:
    assert await parts.read(big, start, stop) == content(big)[start:stop]


async def test_reading_in_order_never_asks_twice_for_what_is_under_way(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        big = version("big", 40 * MIB + 77)
        file = parts.cache.pin(big)
        window = Readahead(parts.downloader, file)
        for at in range(0, big.size, MIB):
            stop = min(at + MIB, big.size)
            window.reads(at, stop)
            await check_read(parts, big, at, stop)
        window.close()
        await parts.quiet()
        parts.cache.unpin(file)
        assert not parts.bucket.overlapped
        assert sum(stop - start for _, start, stop in parts.bucket.requested) == big.size


def test_several_stretches_of_one_handle_have_windows_of_their_own() -> None:
    readahead, downloader = readahead_of(1 << 40)
    starts = [number << 34 for number in range(4)]
    for at in range(0, 64 * MIB, MIB):
        for start in starts:
            readahead.reads(start + at, start + at + MIB)
    for start in starts:
        mine = [stop for begin, stop in downloader.ranges if start <= begin < start + (1 << 34)]
        assert max(mine) > start + 64 * MIB
    # What the first jumps ended, as they could have been those of a single reader, came again.
    assert all(download.wanted for download in downloader.downloads[-4 * len(starts) :])


def test_a_reader_that_goes_on_elsewhere_leaves_nothing_under_way() -> None:
    readahead, downloader = readahead_of(1 << 40)
    read_all(readahead, 0, 32 * MIB)
    readahead.reads(1 << 33, (1 << 33) + 4096)
    assert not any(download.wanted for download in downloader.downloads)


def test_reading_backwards_brings_what_comes_before() -> None:
    readahead, downloader = readahead_of(1 << 30)
    for at in range(1 << 29, (1 << 29) - 32 * MIB, -MIB):
        readahead.reads(at - MIB, at)
    low = min(start for start, _ in downloader.ranges)
    assert low < (1 << 29) - 32 * MIB - FIRST_WINDOW
    # Where reads in order are guessed nothing is wanted twice.
    seen = RangeMap()
    for start, stop in downloader.ranges:
        assert seen.add(start, stop) == stop - start


def test_equal_steps_bring_the_next_ones_and_nothing_between() -> None:
    readahead, downloader = readahead_of(1 << 40)
    step, length = 50 * MIB, 128 << 10
    for number in range(20):
        readahead.reads(number * step + MIB, number * step + MIB + length)
    wanted = {start for start, _ in downloader.ranges if start > 4 * step}
    assert {number * step + MIB for number in range(5, 22)} <= wanted
    assert all(start % step == MIB for start in wanted)
    assert all(stop - start == length for start, stop in downloader.ranges if start > step)


@pytest.mark.parametrize("run", [24 * MIB, 100 * MIB])
def test_long_runs_with_equal_steps_share_the_width_as_parts_do(run: int) -> None:
    window, downloader = readahead_of(1 << 40)
    most = 0
    for at in range(0, 20 * 2 * run, 2 * run):
        read_all(window, at, at + run, MIB)
        wanted = [each for each in downloader.downloads if each.wanted]
        most = max(most, sum(max(0, each.stop - max(each.start, at + run)) for each in wanted))
    # The window in order, and a run.
    assert run <= most <= WINDOW + max(run, WINDOW)


def test_a_share_that_gets_smaller_brings_no_more_steps() -> None:
    readahead, downloader = readahead_of(1 << 40)
    step = 50 * MIB
    for number in range(20):
        readahead.reads(number * step, number * step + MIB)
    others = [Readahead(downloader, downloader.file) for _ in range(7)]  # type: ignore[arg-type]
    for other in others:
        downloader.path.share(other)
    before = len(downloader.ranges)
    for number in range(20, 40):
        readahead.reads(number * step, number * step + MIB)
    assert len(downloader.ranges) < before + 40


def test_unequal_steps_bring_nothing() -> None:
    readahead, downloader = readahead_of(1 << 40)
    at = 1 << 30
    for number in range(1, 30):
        at += number * 20 * MIB
        readahead.reads(at, at + 4096)
    assert downloader.ranges == []


async def test_a_file_that_is_read_all_over_is_fetched_whole(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=1 << 30) as parts:
        big = version("big", 40 * MIB + 5)
        file = parts.cache.pin(big)
        parts.downloader.path.rate = 1e6
        readahead = Readahead(parts.downloader, file)
        at = 24 * MIB
        readahead.reads(at, at + 4096)
        readahead.waited(10.0, 11.0)  # of the 5 s that all of it would take
        await parts.quiet()
        assert not parts.bucket.requested
        readahead.reads(2 * MIB, 2 * MIB + 4096)
        readahead.waited(10.2, 10.9)  # at the same time
        assert not parts.bucket.requested
        await parts.downloader.wait_for(file, 0, 9 * MIB)  # less than a quarter
        count = len(parts.bucket.requested)
        readahead.waited(12.0, 13.0)
        await parts.quiet()
        assert len(parts.bucket.requested) == count
        await parts.downloader.wait_for(file, 9 * MIB, 11 * MIB)
        readahead.waited(13.0, 13.1)
        await eventually(lambda: file.is_complete)
        readahead.close()
        parts.cache.unpin(file)
        assert not parts.bucket.overlapped


async def test_a_file_that_is_read_in_long_stretches_is_fetched_whole_early(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=1 << 30) as parts:
        file = parts.cache.pin(version("big", 100 * MIB))
        parts.downloader.path.rate = 1e6
        readahead = Readahead(parts.downloader, file)
        for at in (80, 30, 60, 10):
            read_all(readahead, at * MIB, (at + 2) * MIB)
        readahead.reads(45 * MIB, 45 * MIB + 4096)
        readahead.waited(10.0, 20.0)
        await eventually(lambda: file.is_complete)
        readahead.close()
        parts.cache.unpin(file)


async def test_a_file_that_would_fill_the_cache_is_not_fetched_whole(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=60 * MIB) as parts:
        file = parts.cache.pin(version("big", 40 * MIB))
        parts.downloader.path.rate = 1e6
        readahead = Readahead(parts.downloader, file)
        readahead.reads(24 * MIB, 24 * MIB + 4096)
        file.present.add(0, 10 * MIB)
        readahead.waited(10.0, 10.0 + 100)
        await parts.quiet()
        assert not parts.bucket.requested
        readahead.close()
        parts.cache.unpin(file)


async def test_a_closed_reader_ends_the_fetching_of_its_whole_file(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        file = parts.cache.pin(version("big", 200 * MIB))
        parts.downloader.path.rate = 1e6
        readahead = Readahead(parts.downloader, file)
        readahead.reads(24 * MIB, 24 * MIB + 4096)
        file.present.add(0, 50 * MIB)
        readahead.waited(10.0, 10.0 + 1000)
        await eventually(lambda: bool(parts.bucket.running))
        readahead.close()
        parts.cache.unpin(file)
        await parts.quiet()
        assert not parts.bucket.running


def shards(count: int) -> list[ObjectInfo]:
    return [ObjectInfo(f"d/{number:03}.tar", 128 * MIB, '"1"', 0) for number in range(count)]


async def test_the_next_shard_is_begun_before_it_is_opened(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(5)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[1], 2 * PART + 5)
        await parts.quiet()
        assert sorted(parts.bucket.requested) == [
            (files[2].key, 0, PART),
            (files[2].key, PART, 2 * PART),
        ]
        next_files.close()


async def test_little_is_fetched_of_the_next_file_before_a_guess_was_right(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(5)
        small = [ObjectInfo(info.key, 60 * MIB, info.etag, 0) for info in files]
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", small[0], 8 * PART)
        await parts.quiet()
        assert not parts.bucket.requested
        next_files.go_on("d/", files[0], 8 * PART)
        await parts.quiet()
        assert len(parts.bucket.requested) == 128 * MIB // 8 // PART
        next_files.opened("d/", files[1].key, was_there=True)
        next_files.go_on("d/", small[1], 2 * PART)
        await parts.quiet()
        assert (files[2].key, PART, 2 * PART) in parts.bucket.requested
        next_files.close()


async def test_a_shard_that_is_open_is_passed_over(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(5)
        read = parts.cache.pin(files[1].version)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[0], PART)
        await parts.quiet()
        assert requested_keys(parts) == {files[2].key}
        parts.cache.unpin(read)
        next_files.close()


async def test_the_last_shard_has_none_behind_it(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(5)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[-1], PART)
        await parts.quiet()
        assert not parts.bucket.requested


async def test_wrong_guesses_of_the_next_shard_end_the_guessing(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(20)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[1], PART)
        for info in files[10:13]:
            next_files.opened("d/", info.key, was_there=False)
        next_files.go_on("d/", files[5], PART)
        await parts.quiet()
        assert requested_keys(parts) == {files[2].key}
        next_files.close()


async def test_siblings_that_were_evicted_unread_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_cache, "MOST_KEPT_OPEN", 0)  # for nothing that is open is evicted
    async with cache_in(tmp_path, limit=16 * MIB) as parts:
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(infos(400, 100 << 10)))

        async def miss(prefix: str, count: int) -> int:
            """Open files that are not there; return how many others have been requested."""
            for number in range(count):
                info = ObjectInfo(f"{prefix}{number}-", 1000, '"1"', 0)
                siblings.opened(prefix, info, was_there=False)
            await parts.quiet()
            return len(parts.bucket.requested)

        # A quarter of the cache is full of files that were not opened.
        most = 16 * MIB // 4 // (100 << 10) + 1
        assert await miss("d/", 10) == most
        for file in parts.cache.files():
            await parts.cache.evict(file)
        # The folder whose files were fetched in vain has to show that they are of use.
        assert await miss("d/", 1) == most
        assert await miss("e/", FOLDER_AFTER) > most
        siblings.close()


async def test_a_folder_that_is_read_no_more_holds_up_no_other(tmp_path: Path) -> None:
    async with cache_in(tmp_path, limit=16 * MIB) as parts:
        siblings = Siblings(parts.downloader, parts.cache, OneFolder(infos(400, 100 << 10)))
        for prefix in ("d/", "e/"):
            before = len(requested_keys(parts))
            for number in range(10):
                info = ObjectInfo(f"{prefix}{number}-", 1000, '"1"', 0)
                siblings.opened(prefix, info, was_there=False)
            await eventually(lambda more=before + 20: len(requested_keys(parts)) > more)
        siblings.close()


async def test_a_shard_that_was_begun_is_fetched_on_as_its_reader_comes_near(
    tmp_path: Path,
) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(5)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        for count in (1, 1, 2):
            next_files.go_on("d/", files[1], count * PART)
            await parts.quiet()
        assert sorted(parts.bucket.requested) == [
            (files[2].key, 0, PART),
            (files[2].key, PART, 2 * PART),
        ]
        # Another reader gets another file, and one that was opened has no second.
        next_files.go_on("d/", files[0], PART)
        next_files.opened("d/", files[2].key, was_there=True)
        next_files.go_on("d/", files[1], 2 * PART)
        await parts.quiet()
        assert requested_keys(parts) == {files[1].key, files[2].key}
        next_files.close()


async def test_opening_a_shard_goes_on_with_what_is_under_way(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        files = shards(5)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[1], PART)
        await eventually(lambda: bool(parts.bucket.running))
        next_files.opened("d/", files[2].key, was_there=True)
        next_files.close()
        await wait_all_tasks_blocked()
        assert parts.bucket.running == [(files[2].key, 0, PART)]


async def test_guesses_that_were_wrong_are_tried_again_after_a_while(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        files = shards(60)
        next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
        next_files.go_on("d/", files[1], PART)
        for info in files[50:53]:
            next_files.opened("d/", info.key, was_there=False)
        for info in files[5:30]:
            next_files.go_on("d/", info, PART)
        await parts.quiet()
        assert 2 <= len(requested_keys(parts)) <= 5
        next_files.close()
