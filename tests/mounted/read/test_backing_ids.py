"""Backing ids: what the kernel keeps open for passthrough is bounded, shared and given back."""

import errno
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache import file_cache
from fusefs.cache.cached_file import CacheFile
from fusefs.cache.passthrough import MOST_AT_ONCE, MOST_IDS, PassthroughFiles
from tests.support.local_cache import CHUNK, cache_in, version
from tests.support.waiting import eventually


class CountingRegistrar:
    """Gives ids without a kernel behind them."""

    def __init__(self) -> None:
        self.given: set[int] = set()
        self.messages: list[int] = []  # the number of files of each
        self.error = 0
        self._numbers = itertools.count(1)

    async def open_backing(self, fds: Sequence[int]) -> list[tuple[int, int]]:
        self.messages.append(len(fds))
        await trio.lowlevel.checkpoint()
        if self.error:
            return [(0, self.error) for _ in fds]
        numbers = [next(self._numbers) for _ in fds]
        self.given.update(numbers)
        return [(number, 0) for number in numbers]

    def close_backing(
        self, backing_id: int, done: Callable[[int, int], None] | None = None
    ) -> trio.Event:
        self.given.remove(backing_id)
        assert done is not None
        done(0, 0)
        return trio.Event()


def counted_ids(most: int = MOST_IDS) -> tuple[PassthroughFiles, CountingRegistrar]:
    registrar = CountingRegistrar()
    ids = PassthroughFiles(registrar, most=most)
    ids.is_on = True
    return ids, registrar


async def test_backing_ids_are_bounded_and_given_back() -> None:
    ids, registrar = counted_ids(most=3)
    files = [CacheFile(f"file-{n}", 1) for n in range(8)]
    for file in files:
        await ids.register(file)
    assert len(registrar.given) == len(ids) == 3
    assert ids.find(files[0]) == 0
    kept = ids.find(files[7])
    assert kept == await ids.register(files[7]) != 0
    ids.drop(files[7])
    assert kept not in registrar.given


async def test_the_backing_id_of_an_open_file_is_not_given_back() -> None:
    ids, _ = counted_ids(most=2)
    files = [CacheFile(f"file-{n}", 1) for n in range(6)]
    for file in files[:3]:
        file.pins = 1
    for file in files:
        await ids.register(file)
    assert all(ids.find(file) for file in files[:3])


async def test_a_file_that_is_opened_by_two_at_once_gets_one_backing_id() -> None:
    ids, registrar = counted_ids(most=3)
    file = CacheFile("file", 1)
    got: list[int] = []

    async def register() -> None:
        got.append(await ids.register(file))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(register)
    assert set(got) == registrar.given
    assert len(registrar.given) == 1


async def test_an_open_waits_for_the_backing_id_that_is_on_its_way() -> None:
    ids, registrar = counted_ids()
    files = [CacheFile(f"file-{n}", 1) for n in range(3)]
    got: list[int] = []

    async def register(file: CacheFile) -> None:
        got.append(await ids.register(file))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ids.register_all, [*files, files[0]])
        await wait_all_tasks_blocked()
        for file in files:
            nursery.start_soon(register, file)
    assert registrar.messages == [3]
    assert set(got) == registrar.given == {1, 2, 3}
    assert await ids.register_all(files) == []
    assert registrar.messages == [3]


async def test_an_open_takes_along_the_files_that_wait_to_be_registered() -> None:
    ids, registrar = counted_ids()
    ids.gathered += [CacheFile(f"file-{n}", 1) for n in range(2 * MOST_AT_ONCE)]
    assert await ids.register(ids.gathered[5]) == 1
    assert registrar.messages == [MOST_AT_ONCE]
    await ids.register(ids.gathered[0])
    assert registrar.messages == [MOST_AT_ONCE]


async def test_a_file_that_the_kernel_refuses_ahead_is_registered_by_its_open() -> None:
    ids, registrar = counted_ids()
    file = CacheFile("file", 1)
    registrar.error = errno.ENFILE
    assert await ids.register_all([file]) == [errno.ENFILE]
    assert ids.find(file) == 0
    registrar.error = 0
    assert await ids.register(file) in registrar.given


async def test_files_that_are_fetched_ahead_are_registered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_cache, "GATHER_S", 1.0)
    ids, registrar = counted_ids()
    async with cache_in(tmp_path, backing=ids) as parts:
        wanted = [version(f"file-{n}", CHUNK) for n in range(MOST_AT_ONCE + 4)]
        files = [parts.cache.pin(one) for one in wanted]
        for file in files:
            parts.downloader.want(file, 0, file.size)
            parts.cache.unpin(file)
        await eventually(lambda: len(ids) == len(files))
        assert len(registrar.messages) < len(files) // 2
        parts.cache.close_unused()
        await eventually(lambda: not any(file.pins for file in files))


@pytest.mark.parametrize("has_ids", [True, False])
async def test_a_mount_that_is_taken_over_on_a_full_disk_keeps_passthrough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_ids: bool
) -> None:
    """That it works is known from the files that the last daemon had registered."""
    ids = PassthroughFiles(CountingRegistrar())
    if has_ids:
        ids.ids[CacheFile("file", 1)] = 7

    def is_full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", is_full)
    await ids.turn_on(True, tmp_path)
    assert ids.is_on == has_ids
