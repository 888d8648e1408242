"""A mount whose identity is shut out: when what is cached is not served any more, and again."""

import errno
import math
import mmap
import os
import signal
import time
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusefs.daemon.access_guard import AccessGuard
from tests.support.mounting import Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import error_of
from tests.support.waiting import until

AFTER_S = 120.0


class Probe:
    """A store that says what the test wants, and counts its calls."""

    def __init__(self) -> None:
        self.is_closed: bool | None = False
        self.calls = 0
        self.answered = -math.inf

    async def is_refused(self, _prefix: str) -> bool | None:
        self.calls += 1
        await trio.sleep(1)  # the next daemon is to count from before
        if self.is_closed is False:
            self.answered = trio.current_time()
        return self.is_closed


class Watched:
    """A probe, the guard that uses it, and the changes that it reports."""

    def __init__(self, record: Path, after_s: float = AFTER_S) -> None:
        self.probe = Probe()
        self.changes: list[bool] = []
        self.guard = AccessGuard(self.probe, "", after_s, record, self.changes.append)


@pytest.fixture
def watched(tmp_path: Path, nursery: trio.Nursery) -> Watched:
    one = Watched(tmp_path / "refused")
    nursery.start_soon(one.guard.run)
    return one


async def test_an_identity_that_is_refused_for_long_is_shut_out(
    watched: Watched, autojump_clock: MockClock, tmp_path: Path
) -> None:
    watched.probe.is_closed = True
    await trio.sleep(AFTER_S)
    assert watched.changes == []
    assert time.monotonic() - float((tmp_path / "refused").read_text()) >= 1
    await trio.sleep(AFTER_S)
    assert watched.changes == [True]
    assert watched.guard.is_shut


async def test_a_store_that_tells_nothing_shuts_no_identity_out(
    watched: Watched, autojump_clock: MockClock
) -> None:
    watched.probe.is_closed = None
    await trio.sleep(10 * AFTER_S)
    assert watched.probe.calls
    assert watched.changes == []


async def test_a_store_that_tells_nothing_lets_no_identity_in_either(
    watched: Watched, autojump_clock: MockClock
) -> None:
    watched.probe.is_closed = True
    await trio.sleep(3 * AFTER_S)
    watched.probe.is_closed = None
    await trio.sleep(3 * AFTER_S)
    assert watched.changes == [True]


async def test_one_request_that_succeeds_starts_the_time_anew(
    watched: Watched, autojump_clock: MockClock
) -> None:
    for _ in range(10):
        watched.probe.is_closed = True
        await trio.sleep(AFTER_S)
        watched.probe.answered = trio.current_time()
    assert watched.changes == []


async def test_while_others_are_answered_nothing_is_requested(
    watched: Watched, autojump_clock: MockClock
) -> None:
    for _ in range(100):
        watched.probe.answered = trio.current_time()
        await trio.sleep(AFTER_S / 10)
    assert watched.probe.calls == 0


async def test_without_the_setting_no_store_is_probed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    one = Watched(tmp_path / "refused", math.inf)
    await one.guard.run()
    assert one.probe.calls == 0


DATA = os.urandom(3 << 20)


@states(
    "With `--revoke-after`, lookups, opens, listings and reads are EACCES once S3 has "
    "refused every request for that long, until one succeeds."
)
def test_what_is_cached_is_refused_while_s3_refuses_everything(
    bucket: Bucket, faulty: FaultyS3, behind: Mounter
) -> None:
    bucket.put("a/data", DATA)
    here = behind("--revoke-after", "1s")
    path = here.path / "a" / "data"
    assert path.read_bytes() == DATA
    assert error_of(path.read_bytes) is None
    faulty.add(code="AccessDenied")
    # Until then it is S3 that refuses: an open asks it where the directory has changed just now.
    until(lambda: here.status()["access"]["is_shut"], "refused")
    assert error_of(path.read_bytes) == errno.EACCES
    assert error_of(lambda: os.listdir(here.path / "a")) == errno.EACCES
    assert error_of((here.path / "a" / "other").stat) == errno.EACCES
    assert "not served any more" in fusefs("status", here.path).stdout
    faulty.clear()
    until(lambda: error_of(path.read_bytes) is None, "served")
    assert path.read_bytes() == DATA
    assert [line for line in here.log.read_text().splitlines() if "refused every request" in line]


@states("A denied prefix shuts nothing else, and a new daemon does not start with trust.")
def test_an_open_file_stops_and_a_new_daemon_is_not_let_in_either(
    bucket: Bucket, faulty: FaultyS3, behind: Mounter
) -> None:
    bucket.put("data", DATA)
    here = behind("--session", "kernel", "--passthrough", "off", "--revoke-after", "1s")
    path = here.path / "data"
    assert path.read_bytes() == DATA
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 4096)
    try:
        assert error_of(lambda: os.preadv(fd, [buffer], 0)) is None
        faulty.add(code="InvalidAccessKeyId")
        until(lambda: error_of(lambda: os.preadv(fd, [buffer], 0)) == errno.EACCES, "refused")
    finally:
        os.close(fd)
    daemon = here.pid
    os.kill(daemon, signal.SIGKILL)
    assert error_of(path.read_bytes) == errno.EACCES
    assert here.pid != daemon


def test_a_prefix_that_is_denied_shuts_nothing_else(
    bucket: Bucket, faulty: FaultyS3, behind: Mounter
) -> None:
    bucket.put("data", DATA)
    bucket.put("private/data", b"")
    here = behind("--revoke-after", "1s")
    assert (here.path / "data").read_bytes() == DATA
    faulty.add("GET", "private/*", code="AccessDenied")
    faulty.add("HEAD", "private/*", code="AccessDenied")
    denied = here.path / "private" / "data"
    end = time.monotonic() + 3
    while time.monotonic() < end:
        error_of(denied.read_bytes)
        time.sleep(0.1)
    assert (here.path / "data").read_bytes() == DATA
    until(lambda: here.status()["access"] == {"is_shut": False, "refused_s": None}, "it is open")
