"""A mount outlives its daemon: programs see a pause, and no call of theirs fails."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs import mounts
from fusefs.kernel import wire
from tests.support.cgroup import memory_group
from tests.support.mounting import Mount, fusefs
from tests.support.semantics import states
from tests.support.surviving import (
    LIMIT_S,
    keeper_status,
    serving_pid,
    signal_daemon,
    wait_until,
)
from tests.support.surviving import filled as filled
from tests.support.surviving import survival as survival

ROLES = ("stream", "stream", "small", "small", "walk", "walk", "mapped", "served", "passthrough")
# `make storm` has more of each.
ROUNDS = int(os.environ.get("SURVIVAL_ROUNDS", "12"))
UPGRADES = int(os.environ.get("SURVIVAL_UPGRADES", "3"))


@contextmanager
def survivors(mount: Mount) -> Iterator[None]:
    """Programs at work on the mount; none of them may have failed in the end."""
    programs = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "support" / "survivor.py"), role,
             str(mount.path), str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed, role in enumerate(ROLES)
    ]  # fmt: skip
    try:
        time.sleep(1)
        yield
        for program in programs:
            assert program.stdin is not None
            program.stdin.close()
            program.stdin = None
        for role, program in zip(ROLES, programs, strict=True):
            out, err = program.communicate(timeout=LIMIT_S)
            assert program.returncode == 0, f"{role}: {err}"
            assert int(out) > 0, role
    finally:
        for program in programs:
            program.kill()


def storm(blow: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Do something to the mount again and again, at moments that nobody expects."""
    dice = random.Random(7)
    for _ in range(rounds):
        time.sleep(dice.uniform(0.3, 0.9))
        blow()


@states(
    "When the daemon dies, programs see a pause: calls wait for the next daemon,"
    " and none of them fails.",
    "Open files go on with the version that they were opened with, and an open directory goes on"
    " where it was.",
)
def test_daemons_that_are_killed_go_unnoticed(survival: Mount) -> None:
    with survivors(survival):
        storm(lambda: signal_daemon(survival, signal.SIGKILL))
        serving_pid(survival)
    assert keeper_status(survival)["restarts"] >= ROUNDS // 2
    expect_no_lost_backing_ids(survival)


def expect_no_lost_backing_ids(mount: Mount) -> None:
    """The kernel has the registered files that the keeper knows of, and no other."""
    known = keeper_status(mount)["backing_ids"]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(mounts.keeper_socket(mount.path)))
        sock.sendall(b'{"do": "hand"}\n')
        _, (device,), _, _ = socket.recv_fds(sock, 4096, 1)
    found = 0
    try:
        for backing_id in range(1, 20_000):
            with contextlib.suppress(FileNotFoundError):
                fcntl.ioctl(device, wire.DEV_IOC_BACKING_CLOSE, struct.pack("=I", backing_id))
                found += 1
    finally:
        os.close(device)
    assert found == known


@states("A daemon that says nothing for the hang timeout is replaced like one that has died.")
def test_daemons_that_stop_are_replaced(survival: Mount) -> None:
    with survivors(survival):
        for _ in range(2):
            stopped = serving_pid(survival)
            os.kill(stopped, signal.SIGSTOP)
            wait_until(lambda old=stopped: serving_pid(survival) != old, "it was not replaced")
    assert "silent" in keeper_status(survival)["last_reason"]


def test_daemons_that_abort_are_replaced(survival: Mount) -> None:
    with survivors(survival):
        for _ in range(4):
            crashed = serving_pid(survival)
            os.kill(crashed, signal.SIGABRT)
            wait_until(lambda old=crashed: serving_pid(survival) != old, "it was not replaced")
    assert "signal 6" in keeper_status(survival)["last_reason"]


def test_keepers_that_are_killed_in_between_go_unnoticed(survival: Mount) -> None:
    kinds = itertools.cycle(("keeper", "daemon", "daemon"))

    def blow() -> None:
        if next(kinds) == "keeper":
            os.kill(keeper_status(survival)["pid"], signal.SIGKILL)
        else:
            signal_daemon(survival, signal.SIGKILL)

    with survivors(survival):
        storm(blow)
        serving_pid(survival)


@states(
    "An upgrade replaces the daemon without an error, and a new daemon that can't start leaves the"
    " old one in place."
)
def test_upgrades_go_unnoticed(survival: Mount) -> None:
    with survivors(survival):
        for _ in range(UPGRADES):
            before = serving_pid(survival)
            fusefs("upgrade", survival.path, environment=survival.environment)
            assert serving_pid(survival) != before
        before = serving_pid(survival)
        failed = fusefs(
            "upgrade", survival.path, "--endpoint-url", "http://127.0.0.1:1", "--retry-time", "1s",
            environment=survival.environment, check=False,
        )  # fmt: skip
        assert failed.returncode == 1
        assert serving_pid(survival) == before


def test_daemons_that_the_kernel_kills_for_memory_are_replaced(survival: Mount) -> None:
    with memory_group("fusefs-test-oom") as group, survivors(survival):
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        for _ in range(3):
            victim = serving_pid(survival)
            group.add(victim)
            group.limit(1 << 20)
            # What it has stays charged elsewhere, so a megabyte more is the end.
            wait_until(lambda old=victim: serving_pid(survival) != old, "it was not killed")
            group.limit(1 << 40)
    assert "signal 9" in keeper_status(survival)["last_reason"]


def test_daemons_that_are_killed_under_memory_pressure_go_unnoticed(survival: Mount) -> None:
    with memory_group("fusefs-test-pressure") as group, survivors(survival):
        if group is None:
            pytest.skip("no memory cgroup can be made here")

        def blow() -> None:
            signal_daemon(survival, signal.SIGKILL)
            group.add(serving_pid(survival))
            group.limit(24 << 20)

        storm(blow)
        group.limit(1 << 40)
        serving_pid(survival)
