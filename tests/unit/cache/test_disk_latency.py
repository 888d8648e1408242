"""Whether the event loop may write to the cache disk by itself."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from fusefs.cache import disk_latency
from fusefs.cache.disk_latency import (
    FIRST_IN_THREADS_S,
    FORGET_S,
    LONGEST_IN_THREADS_S,
    SLOW_IN_THREAD_S,
    SLOW_S,
    DiskLatency,
)


class Machine:
    """A clock, and how often this thread was put to sleep, in place of the system's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.sleeps = 0
        patch.setattr(disk_latency, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(disk_latency, "getrusage", lambda _who: SimpleNamespace(ru_nvcsw=self.sleeps))
        self.latency = DiskLatency()

    def write(self, took_s: float, *, is_in_loop: bool, sleeps: int = 1) -> None:
        began = self.latency.begin()
        self.now += took_s
        self.sleeps += sleeps
        self.latency.end(began, is_in_loop=is_in_loop)

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
