"""What the survival tests share: a filled bucket, a mount of it, programs at work there."""

import contextlib
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusefs.launch import control, registry
from fusefs.linux import mountinfo
from tests.support.mounting import Mount
from tests.support.servers.buckets import Bucket
from tests.support.sharing import mounting
from tests.support.survival import survival_data as data
from tests.support.waiting import until

LIMIT_S = 60.0
ROLES = ("stream", "small", "walk", "mapped", "served", "passthrough")


def keeper_status(mount: Mount) -> dict[str, Any]:
    return control.exchange(registry.keeper_socket(mount.path), {"do": "status"}, 10)


def serving_pid(mount: Mount) -> int:
    """The daemon's pid, once it serves."""
    status: dict[str, Any] = {}

    def is_there() -> bool:
        nonlocal status
        try:
            status = keeper_status(mount)
        except control.NotAnsweringError:
            return False  # it was killed, and its successor does not listen yet
        return bool(status["pause_s"] == 0.0 and status["daemon"])

    until(is_there, "no daemon serves")
    return int(status["daemon"])


def kill_serving(mount: Mount) -> int:
    """SIGKILL to the daemon that serves, and its pid."""

    def kill() -> int | None:
        pid = serving_pid(mount)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # the keeper has named one whose death it had yet to see
            return None
        return pid

    killed: int = until(kill, "a daemon is killed")
    return killed


def replace_daemon(mount: Mount) -> None:
    """SIGKILL to the daemon that serves; returns when another one does."""
    survival = mount.status()["survival"]
    if not survival["on"]:
        pytest.skip(survival["why"])
    killed = kill_serving(mount)
    until(lambda: serving_pid(mount) != killed, "another daemon serves")


@pytest.fixture(scope="module")
def filled(shared: Bucket) -> Bucket:
    """A bucket with what `survivor.py` expects."""
    small = ((data.small_name(n), data.small(n)) for n in range(data.SMALL_FILES))
    tree = ((data.tree_name(n), b"x" * data.tree_size(n)) for n in range(data.TREE_FILES))
    with ThreadPoolExecutor(16) as pool:
        for number in range(data.LARGE_FILES + 1):
            shared.put(data.large_name(number), data.large(number, 0, data.LARGE_SIZE))
        for _ in pool.map(lambda one: shared.put(*one), itertools.chain(small, tree)):
            pass
    return shared


@pytest.fixture
def survival(filled: Bucket, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    """A mount of it, with a cache that is too small for all of it.

    A module that waits for daemons that hang sets HANG_TIMEOUT.
    """
    hang_timeout = getattr(request.module, "HANG_TIMEOUT", "30s")
    with mounting(filled, tmp_path) as mounter:
        mount = mounter("--cache-size", "80MiB", "--hang-timeout", hang_timeout)
        if not mount.status()["survival"]["on"]:
            pytest.skip(mount.status()["survival"]["why"])
        warm(mount)
        yield mount
        # Nothing is left behind: not the keeper, not a daemon, not the mount.
        mount.end()
        until(lambda: not processes_with(str(mount.path)), "a process has not ended")
        assert mountinfo.find_mount(mount.path) is None


def warm(mount: Mount) -> None:
    """Have the held file whole in the cache, and by passthrough where there is one."""
    held = mount.path / data.large_name(data.HELD)
    assert len(held.read_bytes()) == data.LARGE_SIZE


def processes_with(text: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


def signal_daemon(mount: Mount, number: int) -> None:
    pid = keeper_status(mount)["daemon"]
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def expect_not_connected(mount: Mount) -> None:
    def is_dead() -> bool:
        try:
            os.statvfs(mount.path)
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return False

    until(is_dead, "the mount was not given up")


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_everything(mount: Mount) -> None:
    """SIGKILL daemon, keeper and broker at one moment."""
    keeper = keeper_status(mount)
    signal_all([keeper["pid"]], signal.SIGSTOP)  # so that it has no new broker meanwhile
    pids = [pid for pid in (keeper["pid"], keeper["daemon"], *children_of(keeper["pid"])) if pid]
    signal_all(pids, signal.SIGSTOP)  # so that none sees another die
    signal_all(pids, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they do not die")


def keeper_pid(mount: Mount) -> int | None:
    try:
        return int(keeper_status(mount)["pid"])
    except control.ControlError:
        return None


@contextlib.contextmanager
def survivors(mount: Mount) -> Iterator[None]:
    """Programs at work on the mount; none of them may have failed in the end."""
    programs = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("survivor.py"), role, mount.path, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, role in enumerate(ROLES)
    ]
    try:
        for program in programs:
            program.stdout.readline()
        yield
        for program in programs:
            program.stdin.close()
            program.stdin = None
        for role, program in zip(ROLES, programs, strict=True):
            out, err = program.communicate(timeout=LIMIT_S)
            assert program.returncode == 0, f"{role}: {err}"
            assert int(out) > 0, role
    finally:
        for program in programs:
            program.kill()


def storm(blow: Callable[[], object], rounds: int) -> None:
    """Do something to the mount again and again, at random moments."""
    dice = random.Random(7)
    for _ in range(rounds):
        time.sleep(dice.uniform(0.3, 0.9))
        blow()
