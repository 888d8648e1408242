"""How a mount ends, or goes on, when its daemon and its keeper do."""

import contextlib
import errno
import os
import pwd
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fusefs.launch import control
from tests.support.machine.ordinary_user import runnable_by_all
from tests.support.mounting import OLD_KERNEL, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.survival import survival_data as data
from tests.support.survival.surviving import (
    LIMIT_S,
    expect_not_connected,
    keeper_pid,
    keeper_status,
    kill_everything,
    serving_pid,
    signal_daemon,
)
from tests.support.survival.surviving import filled as filled
from tests.support.survival.surviving import survival as survival
from tests.support.waiting import until


def test_an_upgrade_changes_the_settings_that_are_given(survival: Mount) -> None:
    fusefs("upgrade", survival.path, "--metadata-ttl", "7s", environment=survival.environment)
    assert survival.status()["metadata"]["ttl_s"] == 7
    refused = fusefs("upgrade", survival.path, "--cache-dir", "/elsewhere", check=False)
    assert refused.returncode == 2


@states("A keeper that is killed alone leaves no trace in what programs see.")
def test_a_keeper_that_is_killed_is_replaced(survival: Mount) -> None:
    daemon, keeper = serving_pid(survival), keeper_status(survival)["pid"]
    os.kill(keeper, signal.SIGKILL)
    until(lambda: keeper_pid(survival) not in (None, keeper), "no other keeper came")
    assert serving_pid(survival) == daemon
    os.kill(daemon, signal.SIGKILL)
    assert (survival.path / data.small_name(3)).read_bytes() == data.small(3)
    assert serving_pid(survival) != daemon


@states("When keeper and daemon are gone, mounting again takes the dead mount away, and says so.")
def test_a_mount_that_lost_everything_is_made_anew(survival: Mount) -> None:
    kill_everything(survival)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(survival.path)
    survival.start()
    assert "dead mount" in survival.said
    assert (survival.path / data.small_name(1)).read_bytes() == data.small(1)


@states("A mount whose kernel cannot send requests again is aborted when its daemon dies.")
def test_without_resend_the_death_of_the_daemon_is_an_error_and_no_hang(
    filled: Bucket, mounter: Mounter
) -> None:
    mount = mounter(bucket=filled, **OLD_KERNEL)
    status = mount.status()
    assert not status["survival"]["on"]
    with open(mount.path / data.small_name(1), "rb"):
        os.kill(status["daemon"]["pid"], signal.SIGKILL)
        expect_not_connected(mount)
    mount.start()
    assert (mount.path / data.small_name(1)).read_bytes() == data.small(1)


def waits_for_answer(pid: int) -> bool:
    """True if a process waits in the kernel for a FUSE request, as far as the kernel says."""
    return Path(f"/proc/{pid}/wchan").read_text() in ("request_wait_answer", "0")


@states(
    "A mount without a daemon that serves it for the longest pause is aborted: calls that wait"
    " fail with ECONNABORTED and later ones with ENOTCONN, as the kernel has it, so no program"
    " waits for ever."
)
def test_a_pause_has_an_end(filled: Bucket, mounter: Mounter) -> None:
    mount = mounter(bucket=filled, FUSEFS_MAX_PAUSE="2s")
    serving = mount.status()["daemon"]["pid"]
    os.kill(serving, signal.SIGSTOP)  # so that its request has been read when it dies
    reader = subprocess.Popen(
        ["cat", mount.path / data.large_name(1)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: waits_for_answer(reader.pid), "the reader's request is there")
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


@contextlib.contextmanager
def mounted_for_nobody(
    filled: Bucket,
    directory: Path,
    *options: str,
    before: Sequence[str] = (),
    user: Sequence[str] = ("--user", "nobody"),
) -> Iterator[Mount]:
    """A mount of root's whose daemon is another user, gone at the end whatever happened.

    The command comes after `before`.
    """
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    with runnable_by_all() as (command, environment):
        path = directory / "mnt"
        path.mkdir()
        mount = Mount(
            f"s3://{filled.name}/",
            path,
            directory / "cache",
            filled.server.endpoint_url,
            filled.server.environment,
            directory / "log",
        )
        try:
            subprocess.run(
                [*before, *command, *mount.arguments(*user, *options)],
                env={**os.environ, **mount.environment, **environment},
                check=True,
                timeout=LIMIT_S,
            )
            yield mount
            mount.end()
        finally:
            mount.clean_up()


def test_the_daemon_of_root_s_mount_is_an_ordinary_user_s(
    filled: Bucket, public_path: Path
) -> None:
    """And has passthrough, is replaced, and leaves nothing."""
    with mounted_for_nobody(filled, public_path) as mount:
        path = mount.path
        status = mount.status()
        assert status["daemon"]["uid"] == pwd.getpwnam("nobody").pw_uid
        assert capabilities_of(status["daemon"]["pid"]) == 0
        assert "NoNewPrivs:\t1" in Path(f"/proc/{status['daemon']['pid']}/status").read_text()
        assert status["passthrough"]["on"], status["passthrough"]["why"]
        with open(path / data.small_name(5), "rb") as held:
            signal_daemon(mount, signal.SIGKILL)
            assert (path / data.small_name(6)).read_bytes() == data.small(6)
            assert held.read() == data.small(5)
        assert os.stat(path / data.small_name(5)).st_uid == 0
        assert mount.status()["passthrough"]["on"]


@states(
    "Where root mounts and there is no user `fusefs`, the daemon runs as a number without a name,"
    " which is the cache directory's own: no other user but root reads or changes what is cached."
)
def test_the_daemon_of_root_s_mount_is_a_user_that_no_other_program_runs_as(
    filled: Bucket, public_path: Path
) -> None:
    with contextlib.suppress(KeyError):
        pwd.getpwnam("fusefs")
        pytest.skip("there is a user fusefs")
    with mounted_for_nobody(filled, public_path, "--no-read-only", user=()) as mount:
        uid = mount.status()["daemon"]["uid"]
        with pytest.raises(KeyError):
            pwd.getpwuid(uid)
        (mount.path / "new").write_bytes(b"content")
        assert (mount.path / "new").read_bytes() == b"content"
        signal_daemon(mount, signal.SIGKILL)
        assert (mount.path / data.small_name(6)).read_bytes() == data.small(6)
        assert mount.status()["daemon"]["uid"] == uid
        found = mount.cache.stat()
        assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (uid, 0o700)
    mount.path.rmdir()
    with mounted_for_nobody(filled, public_path, user=()) as mount:
        assert mount.status()["daemon"]["uid"] == uid


def test_a_daemon_gives_up_capabilities_that_outlive_a_change_of_the_user(
    filled: Bucket, public_path: Path
) -> None:
    before = ["setpriv", "--securebits=+no_setuid_fixup"]
    with mounted_for_nobody(filled, public_path, before=before) as mount:
        daemon = serving_pid(mount)
        for status in Path(f"/proc/{daemon}/task").glob("*/status"):
            sets = re.findall(r"^Cap(?:Inh|Prm|Eff|Amb):\t(\w+)", status.read_text(), re.MULTILINE)
            assert [int(found, 16) for found in sets] == [0] * 4


def capabilities_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("CapPrm:"))
    return int(line.split()[1], 16)
