"""A mount outlives its daemon: programs see a pause, and no call of theirs fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import pwd
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs import control, mounts
from fusefs.kernel import wire
from tests.conftest import Bucket
from tests.support import survival_data as data
from tests.support.cgroup import memory_group
from tests.support.mounting import Mount, fusefs
from tests.support.ordinary_user import runnable_by_all
from tests.support.s3_server import S3Server
from tests.support.semantics import states

ROLES = ("stream", "stream", "small", "small", "walk", "walk", "mapped", "served", "passthrough")
# `make storm` has more of each.
ROUNDS = int(os.environ.get("SURVIVAL_ROUNDS", "12"))
UPGRADES = int(os.environ.get("SURVIVAL_UPGRADES", "3"))
LIMIT_S = 60.0


def keeper_status(mount: Mount) -> dict[str, Any]:
    return control.exchange(mounts.keeper_socket(mount.path), {"do": "status"}, 10)


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def serving_pid(mount: Mount) -> int:
    """The daemon's pid, once it serves."""
    status: dict[str, Any] = {}

    def is_there() -> bool:
        nonlocal status
        status = keeper_status(mount)
        return bool(status["pause_s"] == 0.0 and status["daemon"])

    wait_until(is_there, "no daemon serves")
    return int(status["daemon"])


@pytest.fixture(scope="module")
def filled(s3: S3Server) -> Bucket:
    """A bucket with what `survivor.py` expects."""
    bucket = Bucket(s3, s3.new_bucket(), s3.client())
    small = ((data.small_name(n), data.small(n)) for n in range(data.SMALL_FILES))
    tree = ((data.tree_name(n), b"x" * data.tree_size(n)) for n in range(data.tree_files()))
    with ThreadPoolExecutor(16) as pool:
        for number in range(data.LARGE_FILES + 1):
            bucket.put(data.large_name(number), data.large(number, 0, data.LARGE_SIZE))
        for _ in pool.map(lambda one: bucket.put(*one), itertools.chain(small, tree)):
            pass
    return bucket


@pytest.fixture
def survival(filled: Bucket, tmp_path: Path) -> Iterator[Mount]:
    """A mount of it, with a cache that is too small for all of it."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    (tmp_path / "mnt").mkdir()
    mount = Mount(
        f"s3://{filled.name}/", tmp_path / "mnt", tmp_path / "cache",
        filled.server.endpoint_url, filled.server.environment, tmp_path / "log",
        ("--cache-size", "80MiB", "--hang-timeout", "3s"),
    )  # fmt: skip
    try:
        mount.start()
        if not mount.status()["survival"]["on"]:
            pytest.skip(mount.status()["survival"]["why"])
        warm(mount)
        yield mount
        # Nothing is left behind: not the keeper, not a daemon, not the mount.
        keeper = keeper_status(mount)["pid"]
        mount.end()
        wait_until(lambda: not Path(f"/proc/{keeper}").exists(), "the keeper has not ended")
        assert mounts.find_mount(mount.path) is None
    finally:
        mount.clean_up()
    assert not processes_with(str(mount.path))


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


def signal_daemon(mount: Mount, number: int) -> None:
    pid = keeper_status(mount)["daemon"]
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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


def test_an_upgrade_changes_the_settings_that_are_given(survival: Mount) -> None:
    fusefs("upgrade", survival.path, "--metadata-ttl", "7s", environment=survival.environment)
    assert survival.status()["metadata"]["ttl_s"] == 7
    refused = fusefs("upgrade", survival.path, "--cache-dir", "/elsewhere", check=False)
    assert refused.returncode == 2


@states("A file that is read by passthrough is read on while there is no daemon, without a pause.")
def test_passthrough_needs_no_daemon(survival: Mount) -> None:
    if not survival.status()["passthrough"]["on"]:
        pytest.skip(survival.status()["passthrough"]["why"])
    with open(survival.path / data.large_name(data.HELD), "rb", buffering=0) as file:
        stopped = serving_pid(survival)
        os.kill(stopped, signal.SIGSTOP)
        # It is replaced after three seconds, and nobody answers before.
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        for at in range(0, data.LARGE_SIZE, 1 << 20):
            assert os.pread(file.fileno(), 1 << 20, at) == data.large(data.HELD, at, 1 << 20)
        assert keeper_status(survival)["daemon"] == stopped
        assert process_state(stopped) == "T"
    serving_pid(survival)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@states("A keeper that is killed alone leaves no trace in what programs see.")
def test_a_keeper_that_is_killed_is_replaced(survival: Mount) -> None:
    daemon, keeper = serving_pid(survival), keeper_status(survival)["pid"]
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: keeper_pid(survival) not in (None, keeper), "no other keeper came")
    assert serving_pid(survival) == daemon
    os.kill(daemon, signal.SIGKILL)
    assert (survival.path / data.small_name(3)).read_bytes() == data.small(3)
    assert serving_pid(survival) != daemon


def keeper_pid(mount: Mount) -> int | None:
    try:
        return int(keeper_status(mount)["pid"])
    except control.ControlError:
        return None


@states("When keeper and daemon are gone, mounting again takes the dead mount away, and says so.")
def test_a_mount_that_lost_everything_is_made_anew(survival: Mount) -> None:
    keeper = keeper_status(survival)
    pids = [keeper["pid"], keeper["daemon"], *children_of(keeper["pid"])]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, so that none sees another die
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they do not die")
    with pytest.raises(OSError, match="not connected"):
        os.listdir(survival.path)
    said = fusefs(
        "mount", survival.source, survival.path, "--endpoint-url", survival.endpoint_url,
        "--cache-dir", survival.cache, environment=survival.environment,
    )  # fmt: skip
    assert "dead mount" in said.stderr
    assert (survival.path / data.small_name(1)).read_bytes() == data.small(1)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


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


@states("A mount whose kernel cannot send requests again is aborted when its daemon dies.")
def test_without_resend_the_death_of_the_daemon_is_an_error_and_no_hang(
    filled: Bucket, mounter_of: Mounter
) -> None:
    mount = mounter_of(filled, FUSEFS_TEST="no-resend")
    status = mount.status()
    assert not status["survival"]["on"]
    with open(mount.path / data.small_name(1), "rb"):
        os.kill(status["daemon"]["pid"], signal.SIGKILL)
        expect_not_connected(mount)
    mount.start()
    assert (mount.path / data.small_name(1)).read_bytes() == data.small(1)


@states(
    "A mount that nobody serves for the longest pause is aborted: calls that wait fail with"
    " ECONNABORTED and later ones with ENOTCONN, as the kernel has it, so nobody waits for ever."
)
def test_a_pause_has_an_end(filled: Bucket, mounter_of: Mounter) -> None:
    mount = mounter_of(filled, FUSEFS_MAX_PAUSE="2s")
    serving = mount.status()["daemon"]["pid"]
    os.kill(serving, signal.SIGSTOP)  # so that its request has been read when it dies
    reader = subprocess.Popen(
        ["cat", mount.path / data.large_name(1)], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        while reader.poll() is None:
            assert time.monotonic() < deadline, "the reader waits for ever"
            with contextlib.suppress(control.ControlError):
                signal_daemon(mount, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        reader.kill()
    assert os.strerror(errno.ECONNABORTED) in reader.communicate()[1]
    expect_not_connected(mount)


def expect_not_connected(mount: Mount) -> None:
    def is_dead() -> bool:
        try:
            os.statvfs(mount.path)
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return False

    wait_until(is_dead, "the mount was not given up")


@states("A mount of the pyfuse3 session ends with its daemon.")
def test_a_mount_of_the_pyfuse3_session_ends_with_its_daemon(
    filled: Bucket, mounter_of: Mounter
) -> None:
    mount = mounter_of(filled, FUSEFS_SESSION="pyfuse3")
    status = mount.status()
    assert status["survival"] == {
        "on": False, "why": "a mount of the pyfuse3 session ends with its daemon"
    }  # fmt: skip
    assert "ends with its daemon" in fusefs("status", mount.path).stdout
    os.kill(status["daemon"]["pid"], signal.SIGKILL)
    expect_not_connected(mount)


Mounter = Callable[..., Mount]


@pytest.fixture
def mounter_of(tmp_path: Path) -> Iterator[Mounter]:
    """Mounts a bucket with variables in the environment; what is left is cleaned up."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    made: list[Mount] = []

    def mount(bucket: Bucket, **environment: str) -> Mount:
        path = tmp_path / f"mnt{len(made)}"
        path.mkdir()
        new = Mount(
            f"s3://{bucket.name}/", path, tmp_path / "cache", bucket.server.endpoint_url,
            bucket.server.environment | environment, tmp_path / "log",
        )  # fmt: skip
        made.append(new)
        new.start()
        return new

    yield mount
    for one in made:
        one.clean_up()


def test_the_daemon_of_root_s_mount_is_an_ordinary_user_s(filled: Bucket, tmp_path: Path) -> None:
    """And has passthrough, is replaced, and leaves nothing."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    with runnable_by_all(tmp_path) as (command, environment):
        path = tmp_path / "mnt"
        path.mkdir()
        mount = Mount(
            f"s3://{filled.name}/", path, tmp_path / "cache", filled.server.endpoint_url,
            filled.server.environment, tmp_path / "log",
        )  # fmt: skip
        try:
            subprocess.run(
                [*command, "mount", mount.source, path, "--endpoint-url", mount.endpoint_url,
                 "--cache-dir", mount.cache, "--log-file", mount.log, "--user", "nobody"],
                env={**os.environ, **mount.environment, **environment}, check=True, timeout=LIMIT_S,
            )  # fmt: skip
            status = mount.status()
            assert status["daemon"]["uid"] == pwd.getpwnam("nobody").pw_uid
            assert capabilities_of(status["daemon"]["pid"]) == 0
            assert status["passthrough"]["on"], status["passthrough"]["why"]
            with open(path / data.small_name(5), "rb") as held:
                signal_daemon(mount, signal.SIGKILL)
                assert (path / data.small_name(6)).read_bytes() == data.small(6)
                assert held.read() == data.small(5)
            assert os.stat(path / data.small_name(5)).st_uid == 0
            assert mount.status()["passthrough"]["on"]
            mount.end()
        finally:
            mount.clean_up()


def capabilities_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("CapPrm:"))
    return int(line.split()[1], 16)
