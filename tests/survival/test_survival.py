"""A mount outlives its daemon: programs see a pause, and no call of theirs fails."""

import contextlib
import fcntl
import itertools
import os
import random
import signal
import struct
import time

import pytest

from fusefs.keeper.broker import DEV_IOC_BACKING_CLOSE
from tests.support.machine.cgroup import memory_group
from tests.support.mounting import Mount, fusefs
from tests.support.semantics import states
from tests.support.sharing import in_storms
from tests.support.survival import survival_data as data
from tests.support.survival.keeping import devices_of
from tests.support.survival.surviving import filled as filled
from tests.support.survival.surviving import (
    keeper_status,
    kill_serving,
    serving_pid,
    signal_daemon,
    storm,
    survivors,
)
from tests.support.survival.surviving import survival as survival
from tests.support.waiting import until

SIZE = 64 << 10
HANG_TIMEOUT = "15s"


@states(
    "When the daemon dies, programs see a pause: calls wait for the next daemon,"
    " and none of them fails.",
    "Open files go on with the version that they were opened with, and an open directory goes on"
    " where it was.",
)
@in_storms("rounds", 4, 100)
def test_daemons_that_are_killed_go_unnoticed(survival: Mount, rounds: int) -> None:
    with survivors(survival):
        storm(lambda: signal_daemon(survival, signal.SIGKILL), rounds)
        for _ in range(rounds):
            # On a busy machine most of them die before they serve.
            serving_pid(survival)
            if keeper_status(survival)["restarts"] >= rounds // 2:
                break
            kill_serving(survival)
    assert keeper_status(survival)["restarts"] >= rounds // 2
    expect_no_lost_backing_ids(survival)


@states(
    "Reads go on however many daemons are killed, one after the other: each waits until the next"
    " daemon has started."
)
@in_storms("kills", 4, 300)
def test_reads_go_on_however_many_daemons_are_killed(survival: Mount, kills: int) -> None:
    dice = random.Random(1)
    for _ in range(kills):
        kill_serving(survival)
        number = dice.randrange(data.SMALL_FILES)
        assert (survival.path / data.small_name(number)).read_bytes() == data.small(number)
        # For these the cache is too small.
        number, at = dice.randrange(data.LARGE_FILES), dice.randrange(data.LARGE_SIZE - SIZE)
        with (survival.path / data.large_name(number)).open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), SIZE, at) == data.large(number, at, SIZE)
    assert keeper_status(survival)["restarts"] == kills


def registered(mount: Mount) -> int:
    """How many files the keeper has registered, once no more come of what is fetched ahead."""
    counts = [-1]

    def is_settled() -> bool:
        time.sleep(1)
        counts.append(keeper_status(mount)["backing_ids"])
        return counts[-1] == counts[-2]

    until(is_settled, "files are still registered")
    return counts[-1]


def expect_no_lost_backing_ids(mount: Mount) -> None:
    """The kernel has the registered files that the keeper knows of, and no other."""
    known = registered(mount)
    found = 0
    with devices_of(keeper_status(mount)["pid"]) as devices:
        for backing_id in range(1, 20_000):
            with contextlib.suppress(FileNotFoundError):
                fcntl.ioctl(devices[0], DEV_IOC_BACKING_CLOSE, struct.pack("=I", backing_id))
                found += 1
    assert found == known


@states("A daemon that says nothing for the hang timeout is replaced like one that has died.")
def test_daemons_that_stop_are_replaced(survival: Mount) -> None:
    with survivors(survival):
        stopped = serving_pid(survival)
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: serving_pid(survival) != stopped, "it was not replaced")
    assert "silent" in keeper_status(survival)["last_reason"]


@pytest.mark.storm
def test_keepers_that_are_killed_in_between_go_unnoticed(survival: Mount) -> None:
    kinds = itertools.cycle(("keeper", "daemon", "daemon"))

    def blow() -> None:
        if next(kinds) == "keeper":
            os.kill(keeper_status(survival)["pid"], signal.SIGKILL)
        else:
            signal_daemon(survival, signal.SIGKILL)

    with survivors(survival):
        storm(blow, 100)
        serving_pid(survival)


@states(
    "An upgrade replaces the daemon without an error, and a new daemon that can't start leaves the"
    " old one in place."
)
@in_storms("upgrades", 1, 20)
def test_upgrades_go_unnoticed(survival: Mount, upgrades: int) -> None:
    with survivors(survival):
        for _ in range(upgrades):
            before = serving_pid(survival)
            fusefs("upgrade", survival.path, environment=survival.environment)
            assert serving_pid(survival) != before
        before = serving_pid(survival)
        nowhere = ("--endpoint-url", "http://127.0.0.1:1", "--retry-time", "1s")
        upgrade = ("upgrade", survival.path, *nowhere)
        failed = fusefs(*upgrade, environment=survival.environment, check=False)
        assert failed.returncode == 1
        assert serving_pid(survival) == before


@pytest.mark.storm
def test_daemons_that_the_kernel_kills_for_memory_are_replaced(survival: Mount) -> None:
    with survivors(survival):
        for number in range(3):
            with memory_group(f"fusefs-test-oom-{number}") as group:
                if group is None:
                    pytest.skip("no memory cgroup can be made here")
                # What a daemon has stays charged elsewhere, so a page more is the end.
                group.limit(0)
                victim = serving_pid(survival)
                group.add(victim)
                until(lambda old=victim: serving_pid(survival) != old, "it was not killed")
    assert "signal 9" in keeper_status(survival)["last_reason"]
