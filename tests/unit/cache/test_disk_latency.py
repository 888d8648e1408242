"""Time that the cache's disk takes: in the event loop, and where programs wait for it."""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusefs.cache import disk
from fusefs.cache.disk import (
    FIRST_IN_THREADS_S,
    FORGET_S,
    LONGEST_IN_THREADS_S,
    SLOW_IN_THREAD_S,
    SLOW_S,
    Disk,
    DiskLatency,
)
from fusefs.telemetry.stalls import STALLS, WaitCause, served
from tests.support.local_cache import Parts, cache_in, version
from tests.support.waiting import mostly


class Machine:
    """A clock, and how often this thread was put to sleep, in place of the system's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.sleeps = 0
        patch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(disk, "getrusage", lambda _who: SimpleNamespace(ru_nvcsw=self.sleeps))
        self.latency = DiskLatency()

    def write(self, took_s: float, *, is_in_loop: bool, sleeps: int = 1) -> None:
        def access() -> None:
            self.now += took_s
            self.sleeps += sleeps

        self.latency.timed(access, is_in_loop=is_in_loop)

    def wait_until_quick(self) -> float:
        waited = 0.0
        while not self.latency.is_quick:
            waited += 0.05
            self.now += 0.05
        return waited


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_write_that_is_put_to_sleep_for_long_shows_a_slow_disk(machine: Machine) -> None:
    machine.write(SLOW_S / 2, is_in_loop=True)
    machine.write(1.0, is_in_loop=True, sleeps=0)  # it had no processor
    assert machine.latency.is_quick
    machine.write(2 * SLOW_S, is_in_loop=True)
    assert not machine.latency.is_quick


def test_what_a_thread_waits_for_the_interpreter_is_no_slow_disk(machine: Machine) -> None:
    machine.write(2 * SLOW_S, is_in_loop=False)
    assert machine.latency.is_quick
    machine.write(2 * SLOW_IN_THREAD_S, is_in_loop=False)
    assert not machine.latency.is_quick


def test_a_disk_that_stays_slow_holds_up_the_event_loop_ever_less_often(machine: Machine) -> None:
    waits: deque[float] = deque()
    for _ in range(8):
        machine.write(2 * SLOW_S, is_in_loop=True)
        waits.append(machine.wait_until_quick())
    assert waits[0] == pytest.approx(FIRST_IN_THREADS_S, abs=0.1)
    assert sorted(waits) == list(waits)
    assert waits[-1] == pytest.approx(LONGEST_IN_THREADS_S, abs=0.1)
    machine.now += FORGET_S + 1
    machine.write(2 * SLOW_S, is_in_loop=True)
    assert machine.wait_until_quick() == pytest.approx(FIRST_IN_THREADS_S, abs=0.1)


MIB = 1 << 20


def slowly(work: Callable[..., Any], seconds: float = 0.5) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return work(*arguments)

    return slow


async def read(parts: Parts, key: str) -> None:
    with served():
        await parts.read(version(key, MIB), 0, MIB)


async def test_a_slow_cache_disk(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", slowly(os.pwrite, 0.05))
    with mostly(WaitCause.CACHE_DISK):
        await read(parts, "a")


async def test_a_cache_file_that_opens_slowly(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(parts, "a")
    await parts.quiet()  # else its download has it open
    monkeypatch.setattr(Disk, "open", slowly(Disk.open))
    with mostly(WaitCause.CACHE_DISK):
        await read(parts, "a")


async def test_a_cache_that_has_to_evict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cache_in(tmp_path, limit=2 * MIB) as parts:
        await read(parts, "a")
        await read(parts, "b")
        monkeypatch.setattr(Disk, "unlink", slowly(Disk.unlink))
        with mostly(WaitCause.CACHE_FULL):
            await read(parts, "c")


async def test_a_download_counts_from_its_first_reader_on(tmp_path: Path) -> None:
    """What is fetched ahead holds up no program, until one comes for it."""
    async with cache_in(tmp_path) as parts, trio.open_nursery() as nursery:
        file = parts.cache.pin(version("a", MIB))
        before = STALLS.totals().wait
        started = parts.downloader.want(file, 0, MIB)
        started[0].work.enter(WaitCause.S3_FIRST_BYTE)
        assert STALLS.totals().wait == before
        parts.bucket.hold()
        nursery.start_soon(read, parts, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert STALLS.totals().wait[WaitCause.S3_FIRST_BYTE] > before[WaitCause.S3_FIRST_BYTE]
        parts.bucket.let_go()
        await parts.quiet()
        started[0].work.leave(WaitCause.S3_FIRST_BYTE)
        parts.cache.unpin(file)
