"""Backing ids: what the kernel keeps open for passthrough is bounded, shared and given back."""

import errno
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.passthrough import PassthroughFiles


class CountingRegistrar:
    """Gives ids without a kernel behind them."""

    def __init__(self) -> None:
        self.given: set[int] = set()
        self.later: list[Callable[[int, int], None]] = []
        self._numbers = itertools.count(1)

    async def open_backing(self, fd: int) -> int:
        await trio.lowlevel.checkpoint()
        number = next(self._numbers)
        self.given.add(number)
        return number

    def open_backing_later(self, fd: int, done: Callable[[int, int], None]) -> None:
        self.later.append(done)

    def open_gathered(self) -> None:
        pass

    def answer(self, error: int = 0) -> None:
        """Give the first that waits an id, or an error."""
        number = 0 if error else next(self._numbers)
        self.given |= {number} - {0}
        self.later.pop(0)(number, error)

    def close_backing(
        self, backing_id: int, done: Callable[[int, int], None] | None = None
    ) -> trio.Event:
        self.given.remove(backing_id)
        assert done is not None
        done(0, 0)
        return trio.Event()


def counted_ids(most: int) -> tuple[PassthroughFiles, set[int]]:
    registrar = CountingRegistrar()
    ids = PassthroughFiles(registrar, most=most)
    ids.is_on = True
    return ids, registrar.given


async def test_backing_ids_are_bounded_and_given_back() -> None:
    ids, given = counted_ids(most=3)
    files = [CacheFile(f"file-{n}", 1) for n in range(8)]
    for file in files:
        await ids.register(file)
    assert len(given) == len(ids) == 3
    assert ids.find(files[0]) == 0
    kept = ids.find(files[7])
    assert kept == await ids.register(files[7]) != 0
    ids.drop(files[7])
    assert kept not in given


async def test_the_backing_id_of_an_open_file_is_not_given_back() -> None:
    ids, _ = counted_ids(most=2)
    files = [CacheFile(f"file-{n}", 1) for n in range(6)]
    for file in files[:3]:
        file.pins = 1
    for file in files:
        await ids.register(file)
    assert all(ids.find(file) for file in files[:3])


async def test_a_file_that_is_opened_by_two_at_once_gets_one_backing_id() -> None:
    ids, given = counted_ids(most=3)
    file = CacheFile("file", 1)
    got: list[int] = []

    async def register() -> None:
        got.append(await ids.register(file))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(register)
    assert set(got) == given
    assert len(given) == 1


async def test_an_open_waits_for_the_backing_id_that_is_on_its_way() -> None:
    registrar = CountingRegistrar()
    ids = PassthroughFiles(registrar)
    ids.is_on = True
    file = CacheFile("file", 1)
    ended: list[int] = []
    got: list[int] = []
    ids.register_ahead(file, lambda: ended.append(ids.find(file)))
    ids.register_ahead(file, lambda: ended.append(-1))  # it is under way

    async def register() -> None:
        got.append(await ids.register(file))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(register)
        await wait_all_tasks_blocked()
        assert (ended, got, registrar.given) == ([-1], [], set())
        registrar.answer()
    assert ended == [-1, got[0]]
    assert registrar.given == {got[0]}
    ids.register_ahead(file, lambda: ended.append(-2))
    assert (ended[-1], registrar.later) == (-2, [])


async def test_a_file_that_the_kernel_refuses_ahead_is_registered_by_its_open() -> None:
    registrar = CountingRegistrar()
    ids = PassthroughFiles(registrar)
    ids.is_on = True
    file = CacheFile("file", 1)
    ended: list[bool] = []
    ids.register_ahead(file, lambda: ended.append(True))
    registrar.answer(errno.ENFILE)
    assert ended == [True]
    assert ids.find(file) == 0
    assert await ids.register(file) in registrar.given


@pytest.mark.parametrize("has_ids", [True, False])
async def test_a_mount_that_is_taken_over_on_a_full_disk_keeps_passthrough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_ids: bool
) -> None:
    """That it works is known from the files that the last daemon had registered."""
    ids = PassthroughFiles(CountingRegistrar())
    if has_ids:
        ids.adopt(CacheFile("file", 1), 7)

    def is_full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", is_full)
    await ids.turn_on(True, tmp_path)
    assert ids.is_on == has_ids
