"""Keepers that die: their broker sees to it that the mount has one."""

import contextlib
import errno
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from fusefs.linux.capabilities import CAP_SYS_ADMIN
from tests.support.sharing import in_storms
from tests.support.survival.keeping import (
    HELD,
    LIMIT_S,
    PROJECT,
    Kept,
    blocked_reader,
    capabilities,
    error_of,
    needs_fuse,
    needs_passthrough,
    needs_root,
    put_through,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]

ROLES = ["pid", "broker", "daemon"]
# Keeper and broker together have no successor.
VICTIMS = [["pid"], ["broker"], ["daemon"], ["pid", "daemon"], ["broker", "daemon"]]


@needs_passthrough
def test_a_killed_keeper_is_succeeded_by_its_broker(kept: Kept) -> None:
    content = put_through(kept)
    kept.start()
    with blocked_reader(kept) as reader:
        assert (kept.mountpoint / "through").read_bytes() == content
        kept.kill_keeper()
        assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
        kept.hold.unlink()
        assert reader.communicate(timeout=LIMIT_S) == (HELD, b"")
    old = kept.kill_daemon()
    status = kept.served_by_another_than(old)
    assert status["backing_ids"] == 1
    assert (kept.mountpoint / "through").read_bytes() == content
    assert kept.facts(status["daemon"])["registered"] == []
    kept.umount()
    until(lambda: kept.processes() == [])


@needs_passthrough
def test_a_successor_registers_files_with_no_more_privilege_than_before(kept: Kept) -> None:
    put_through(kept)
    kept.start()
    status = kept.kill_keeper()
    assert error_of(kept.mountpoint / "through") is None
    assert capabilities(status["broker"]) == 1 << CAP_SYS_ADMIN
    assert capabilities(status["pid"]) == capabilities(os.getpid())


@in_storms("rounds", 4, 100)
def test_readers_notice_nothing_of_a_daemon_killed_with_its_keeper_or_broker(
    kept: Kept, rounds: int
) -> None:
    kept.start()
    is_over = threading.Event()
    failures: list[int] = []

    def read() -> None:
        while not is_over.is_set():
            error = error_of(kept.mountpoint / "plain")
            if error is not None:
                failures.append(error)
                return

    def whole() -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            status = kept.status()
            if {status[role] for role in ROLES} <= set(kept.processes()) and status["is_serving"]:
                return status
        return None

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    dice = random.Random(7)
    try:
        for roles in dice.sample(VICTIMS * rounds, len(VICTIMS) * rounds):
            status = until(whole)
            victims = [status[role] for role in roles]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            # One that is still dying is not counted as there: a third must not die meanwhile.
            until(lambda pids=set(victims): not pids & set(kept.processes()))
            time.sleep(dice.choice([0, 0.01, 0.1]))
        until(whole)
    finally:
        is_over.set()
    for reader in readers:
        reader.join(LIMIT_S)
    assert failures == []


def test_a_broker_that_dies_takes_its_daemon_with_it(kept: Kept) -> None:
    kept.start()
    status = kept.status()
    os.kill(status["broker"], signal.SIGKILL)
    new = kept.served_by_another_than(status["daemon"])
    assert new["last_reason"] == "lost its broker"
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"


# A keeper that fails whenever a daemon serves, as would each that follows it.
FAILING = """
import sys
sys.path.insert(0, {project!r})
from fusefs.keeper import main, policy
def fail(self, now):
    check(self, now)
    if self._state.has_served:
        raise RuntimeError("it fails")
check, policy.Keeper._check_clock = policy.Keeper._check_clock, fail
sys.exit(main.main())
"""


def test_a_mount_whose_keepers_fail_one_after_the_other_is_given_up(kept: Kept) -> None:
    command = [sys.executable, "-I", "-S", "-c", FAILING.format(project=os.fspath(PROJECT))]
    mark = f"kept-in={kept.directory}"
    kept.start(is_expected_to_serve=False, keeper_command=[*command, mark])
    until(lambda: kept.processes() == [], "none of them is left")
    assert "its keepers fail one after the other" in kept.log_text()
    assert error_of(kept.mountpoint / "plain") == errno.ENOTCONN


def test_a_time_for_which_no_request_waits_ends_no_keeper(kept: Kept) -> None:
    kept.start(hang_s=1e15, max_pause_s=1e15)
    before = kept.status()["pid"]
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    assert kept.status()["pid"] == before
