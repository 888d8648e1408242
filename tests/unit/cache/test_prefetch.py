"""Windows and siblings: what is fetched ahead, and what is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download
from fusefs.cache.ranges import RangeMap
from fusefs.cache.readahead import (
    FIRST_WINDOW,
    LAST_WINDOW,
    SIBLINGS_AFTER,
    SMALL,
    TOLERANCE,
    Siblings,
    Window,
)
from fusefs.store.interface import ObjectInfo, ObjectVersion
from tests.support.local_cache import Parts, cache_in, content, version
from tests.support.waiting import eventually

MIB = 1 << 20


class RecordingFetcher:
    """A fetcher that records what is wanted; nothing arrives until `bring`."""

    def __init__(self, file: CacheFile) -> None:
        self.file = file
        self.ranges: list[tuple[int, int]] = []
        self.downloads: list[Download] = []

    def want(self, file: CacheFile, start: int, stop: int) -> list[Download]:
        assert file is self.file
        self.ranges.append((start, stop))
        download = Download(file, start, stop, lambda: None)
        download.wanted = 1
        self.downloads.append(download)
        return [download]

    def bring(self) -> None:
        """Everything that was wanted arrives."""
        for download in self.downloads:
            self.file.present.add(download.start, download.stop)
            download.finish(None)


def window_on(size: int) -> tuple[Window, RecordingFetcher]:
    fetcher = RecordingFetcher(CacheFile("x", size))
    return Window(fetcher, fetcher.file), fetcher  # type: ignore[arg-type]


def read_all(window: Window, start: int, stop: int, step: int = 128 << 10) -> None:
    for at in range(start, stop, step):
        window.reads(at, min(at + step, stop))


def test_the_first_read_at_the_start_asks_for_what_follows() -> None:
    window, fetcher = window_on(1 << 30)
    window.reads(0, 4096)
    assert fetcher.ranges == [(4096, 4096 + FIRST_WINDOW)]


def test_reading_in_order_doubles_the_window_up_to_its_largest() -> None:
    window, fetcher = window_on(1 << 40)
    ahead = [0]
    for at in range(0, 4 * LAST_WINDOW, MIB):
        window.reads(at, at + MIB)
        ahead.append(max(stop for _, stop in fetcher.ranges) - at - MIB)
    assert max(ahead) > LAST_WINDOW - PART
    assert max(ahead) <= LAST_WINDOW
    # Never further behind than half of the window.
    assert min(ahead[len(ahead) // 2 :]) >= LAST_WINDOW // 2 - PART - MIB


def test_a_jump_makes_the_window_small_again() -> None:
    window, fetcher = window_on(1 << 40)
    read_all(window, 0, 256 * MIB)
    fetcher.ranges.clear()
    window.reads(1 << 33, (1 << 33) + 4096)
    assert fetcher.ranges == []
    window.reads((1 << 33) + 4096, (1 << 33) + 8192)
    assert fetcher.ranges == [((1 << 33) + 8192, (1 << 33) + 8192 + FIRST_WINDOW)]


def test_random_reads_ask_for_nothing_ahead() -> None:
    window, fetcher = window_on(1 << 40)
    for number in range(1, 200):
        at = number * 7919 * 64 * MIB % (1 << 40)
        window.reads(at, at + 4096)
    assert fetcher.ranges == []


def test_reads_slightly_out_of_order_count_as_in_order() -> None:
    window, fetcher = window_on(1 << 30)
    step = 128 << 10
    for at in range(0, 64 * MIB, 4 * step):
        for shift in (2, 0, 3, 1):
            window.reads(at + shift * step, at + (shift + 1) * step)
    assert max(stop for _, stop in fetcher.ranges) > 64 * MIB + 8 * MIB


def test_a_complete_file_needs_nothing_ahead() -> None:
    window, fetcher = window_on(10 * MIB)
    fetcher.file.present.add(0, 10 * MIB)
    read_all(window, 0, 10 * MIB)
    assert fetcher.ranges == []


def test_closing_loses_interest_in_everything_under_way() -> None:
    window, fetcher = window_on(1 << 30)
    read_all(window, 0, 32 * MIB)
    window.close()
    assert not any(download.wanted for download in fetcher.downloads)


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
    window, fetcher = window_on(size)
    at, jumped = 0, 0
    for distance, length, arrives in reads:
        start = min(max(0, at + distance), size - 1)
        stop = min(size, start + length)
        if abs(start - at) > TOLERANCE:
            jumped = len(fetcher.ranges)
        window.reads(start, stop)
        at = stop if abs(start - at) > TOLERANCE else max(at, stop)
        if arrives:
            fetcher.bring()
    for start, stop in fetcher.ranges:
        assert 0 <= start < stop <= size
        assert stop - start <= LAST_WINDOW + PART + TOLERANCE + MIB
    seen = RangeMap()
    for start, stop in fetcher.ranges[jumped:]:
        assert seen.add(start, stop) == stop - start


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
    parts.fetcher.want(file, 0, info.size)
    parts.cache.unpin(file)


def requested_keys(parts: Parts) -> set[str]:
    return {key for key, _, _ in parts.bucket.requested}


async def test_a_few_files_of_a_directory_bring_others(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        files = infos(50)
        siblings = Siblings(parts.fetcher, parts.cache, iter(files))
        for info in files[: SIBLINGS_AFTER - 1]:
            siblings.opened(info, was_there=False)
        await wait_all_tasks_blocked()
        assert requested_keys(parts) == set()
        siblings.opened(files[SIBLINGS_AFTER - 1], was_there=False)
        await eventually(lambda: len(requested_keys(parts)) >= SIBLINGS_AFTER)
        siblings.close()


async def test_siblings_that_nobody_opens_stay_few(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        others = [ObjectInfo(f"e/{number}", 1000, '"1"', 0) for number in range(100)]
        siblings = Siblings(parts.fetcher, parts.cache, iter(infos(500)))
        for info in others:
            siblings.opened(info, was_there=False)
        await eventually(lambda: len(requested_keys(parts)) == SIBLINGS_AFTER)
        await wait_all_tasks_blocked()
        assert len(requested_keys(parts)) == SIBLINGS_AFTER
        siblings.close()


async def test_siblings_that_are_opened_bring_more(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        files = infos(200)
        siblings = Siblings(parts.fetcher, parts.cache, iter(files))
        for info in files[:60]:
            siblings.opened(info, was_there=False)
            start_reading(parts, info)
        await eventually(lambda: len(requested_keys(parts)) > 60 + 2 * SIBLINGS_AFTER)
        siblings.close()


async def test_large_and_empty_files_are_no_siblings(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        order = infos(10, SMALL + 1) + infos(10, 0)
        siblings = Siblings(parts.fetcher, parts.cache, iter(order))
        for number in range(10):
            siblings.opened(ObjectInfo(f"other{number}", 10, '"1"', 0), was_there=False)
        await wait_all_tasks_blocked()
        assert requested_keys(parts) == set()
        siblings.close()


async def test_closed_siblings_end_their_downloads(tmp_path: Path) -> None:
    async with cache_in(tmp_path) as parts:
        parts.bucket.hold()
        files = infos(50)
        siblings = Siblings(parts.fetcher, parts.cache, iter(files))
        for info in files[:8]:
            siblings.opened(info, was_there=False)
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
        window = Window(parts.fetcher, file)
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
        window = Window(parts.fetcher, file)
        for at in range(0, big.size, MIB):
            stop = min(at + MIB, big.size)
            window.reads(at, stop)
            await check_read(parts, big, at, stop)
        window.close()
        await parts.quiet()
        parts.cache.unpin(file)
        assert not parts.bucket.overlapped
        assert sum(stop - start for _, start, stop in parts.bucket.requested) == big.size
