"""Daemons that die one soon after the other: reads go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.mounting import Mount
from tests.support.semantics import states
from tests.support.survival import survival_data as data
from tests.support.survival.surviving import filled as filled
from tests.support.survival.surviving import keeper_status, serving_pid
from tests.support.survival.surviving import survival as survival
from tests.support.waiting import until

pytestmark = pytest.mark.storm

# `make storm` has more.
KILLS = int(os.environ.get("SURVIVAL_KILLS", "12"))
MOST_KILLS = 400
SIZE = 64 << 10


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Reader:
    """A thread that reads again and again, and counts how often; `error` is why it ended."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._read = read
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._read()
                self.count += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Reader:
        self._thread.start()
        until(lambda: self.count or self.error)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def cached(mount: Mount) -> Callable[[], None]:
    """Opens and reads small files, which are in the cache after the first time."""
    dice = random.Random(1)
    numbers = range(20)

    def read() -> None:
        number = dice.choice(numbers)
        assert (mount.path / data.small_name(number)).read_bytes() == data.small(number)

    return read


def uncached(mount: Mount) -> Callable[[], None]:
    """Opens and reads large files here and there, for which the cache is too small."""
    dice = random.Random(2)

    def read() -> None:
        number, at = dice.randrange(data.LARGE_FILES), dice.randrange(data.LARGE_SIZE - SIZE)
        with (mount.path / data.large_name(number)).open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), SIZE, at) == data.large(number, at, SIZE)

    return read


@states(
    "Reads go on while one daemon after the other is killed, as long as the gaps between the kills"
    " are twice as long as a daemon needs to start."
)
def test_reads_go_on_between_kills(survival: Mount) -> None:
    with Reader(cached(survival)) as small, Reader(uncached(survival)) as large:
        apart_s = 2 * time_to_go_on(survival, small, large)
        kills, gaps = 0, {small: 0, large: 0}
        while kills < KILLS or min(gaps.values()) < 3:
            assert kills < max(KILLS, MOST_KILLS), {"gaps with reads": list(gaps.values())}
            before = {reader: reader.count for reader in gaps}
            time.sleep(apart_s)
            for reader in gaps:
                gaps[reader] += reader.count > before[reader]
            kill(keeper_status(survival)["daemon"] or serving_pid(survival))
            kills += 1
        print(f"{kills} kills {apart_s:.2f} s apart, gaps with reads: {list(gaps.values())}")
    assert keeper_status(survival)["restarts"] >= kills // 2


def time_to_go_on(mount: Mount, *readers: Reader) -> float:
    """How long this machine takes from a daemon's death to the next reads."""
    before = [reader.count for reader in readers]
    start = time.monotonic()
    kill(serving_pid(mount))
    until(
        lambda: all(
            # One may have been answered already.
            reader.error or reader.count >= count + 2
            for reader, count in zip(readers, before, strict=True)
        )
    )
    return time.monotonic() - start
