"""The other small files of a folder: which are fetched ahead, and how many."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache import file_cache
from fusefs.cache.downloader import DEMAND_PERIOD_S
from fusefs.cache.readahead.path_meter import LEAST_WIDTH
from fusefs.cache.readahead.siblings import (
    FILES_PER_SECOND,
    FOLDER_AFTER,
    FOLDERS_TURN,
    MOST_WAITING,
    SMALL,
    TURN,
    UNREAD_EACH,
    Siblings,
)
from fusefs.store.interface import ObjectInfo
from tests.support.local_cache import OneFolder, Parts, cache_in, held, requested_keys, version
from tests.support.waiting import eventually

MIB = 1 << 20


def infos(count: int, size: int = 1000) -> list[ObjectInfo]:
    return [ObjectInfo(f"d/{number:03}", size, '"1"', 0) for number in range(count)]


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
        await trio.sleep(2 * DEMAND_PERIOD_S if beyond else 0)
        siblings.opened("d/", files[FOLDER_AFTER], was_there=False)
        await eventually(lambda: len(requested_keys(parts)) >= readers + LEAST_WIDTH)
        siblings.close()


async def test_siblings_are_bounded_by_how_many_were_opened(parts: Parts) -> None:
    others = [ObjectInfo(f"d/{number}-", 1000, '"1"', 0) for number in range(10)]
    siblings = Siblings(parts.downloader, parts.cache, OneFolder(infos(500)))
    for info in others:
        siblings.opened("d/", info, was_there=False)
    await eventually(lambda: len(requested_keys(parts)) == 10 * UNREAD_EACH)
    await parts.quiet()
    assert len(requested_keys(parts)) == 10 * UNREAD_EACH
    siblings.close()


async def test_siblings_behind_the_reader_come_first(parts: Parts) -> None:
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


async def test_a_folder_that_was_fetched_whole_begins_the_next_one(parts: Parts) -> None:
    class TwoFolders(OneFolder):
        def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
            for info in super().files(prefix, behind):
                yield ObjectInfo(info.key.replace("d/", prefix), info.size, info.etag, 0)

        def next_folder(self, prefix: str) -> str | None:
            return "e/" if prefix == "d/" else None

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


class _LargeFiles:
    """Folders that have no small files, and how many of them were looked at."""

    looked_at = 0

    def files(self, prefix: str, _behind: str) -> Iterator[ObjectInfo]:
        for number in range(10 * TURN):
            self.looked_at += 1
            yield ObjectInfo(f"{prefix}{number}", SMALL + 1, '"1"', 0)

    def next_folder(self, _prefix: str) -> str | None:
        return None


async def test_many_folders_that_had_to_wait_are_not_looked_through_at_once(tmp_path: Path) -> None:
    async with held(tmp_path) as parts:
        folders = _LargeFiles()
        siblings = Siblings(parts.downloader, parts.cache, folders)
        parts.downloader.demand.change(1000)
        for number in range(4 * FOLDERS_TURN):
            for info in infos(FOLDER_AFTER):
                siblings.opened(f"d{number}/", info, was_there=False)
        assert folders.looked_at == 0
        parts.downloader.demand.change(-1000)
        await trio.sleep(2 * DEMAND_PERIOD_S)
        for turns in range(1, 5):
            siblings.opened("d0/", ObjectInfo(f"other-{turns}", 1, '"1"', 0), was_there=False)
            assert folders.looked_at <= turns * FOLDERS_TURN * TURN
        assert folders.looked_at > FOLDERS_TURN * TURN
        siblings.close()


async def test_closed_siblings_end_their_downloads(parts: Parts) -> None:
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
