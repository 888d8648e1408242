"""Windows and next shards: what is fetched ahead, and what is not."""

from pathlib import Path

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Download
from fusefs.cache.ranges import RangeMap
from fusefs.cache.readahead.next_files import NextFiles
from fusefs.cache.readahead.path_meter import LEAST_WIDTH, PathMeter
from fusefs.cache.readahead.window import FIRST_WINDOW, TOLERANCE, Readahead
from fusefs.store.interface import ObjectInfo, ObjectVersion
from tests.support.local_cache import (
    OneFolder,
    Parts,
    cache_in,
    content,
    held,
    requested_keys,
    version,
)
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


async def test_a_reader_goes_on_when_the_window_that_wanted_it_has_closed(parts: Parts) -> None:
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


async def test_reading_in_order_never_asks_twice_for_what_is_under_way(parts: Parts) -> None:
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


async def test_little_is_fetched_of_the_next_file_before_a_guess_was_right(parts: Parts) -> None:
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


async def test_a_shard_that_is_open_is_passed_over(parts: Parts) -> None:
    files = shards(5)
    read = parts.cache.pin(files[1].version)
    next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
    next_files.go_on("d/", files[0], PART)
    await parts.quiet()
    assert requested_keys(parts) == {files[2].key}
    parts.cache.unpin(read)
    next_files.close()


async def test_the_last_shard_has_none_behind_it(parts: Parts) -> None:
    files = shards(5)
    next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
    next_files.go_on("d/", files[-1], PART)
    await parts.quiet()
    assert not parts.bucket.requested


async def test_wrong_guesses_of_the_next_shard_end_the_guessing(parts: Parts) -> None:
    files = shards(20)
    next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
    next_files.go_on("d/", files[1], PART)
    for info in files[10:13]:
        next_files.opened("d/", info.key, was_there=False)
    next_files.go_on("d/", files[5], PART)
    await parts.quiet()
    assert requested_keys(parts) == {files[2].key}
    next_files.close()


async def test_the_next_shard_is_begun_before_it_is_opened_and_fetched_on(parts: Parts) -> None:
    files = shards(5)
    next_files = NextFiles(parts.downloader, parts.cache, OneFolder(files))
    for ahead in (PART, PART, 2 * PART + 5):
        next_files.go_on("d/", files[1], ahead)
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


async def test_guesses_that_were_wrong_are_tried_again_after_a_while(parts: Parts) -> None:
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
