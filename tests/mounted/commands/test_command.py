"""The commands on real mounts: every way a mount ends, and what status tells about it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.launch import control, mount_requests, registry
from fusefs.linux import mountinfo
from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import drop_copies, shared_mount
from tests.support.waiting import until

MIB = 1 << 20
# systemd sends both to every process of a service or session.
SERVICE_ENDS = [signal.SIGTERM, signal.SIGHUP]


def nothing_is_left(mount: Mount, pid: int) -> bool:
    """No mount, no process, no record of it."""
    return (
        mountinfo.find_mount(mount.path) is None
        and registry.start_time(pid) is None
        and not registry.Registration(str(mount.path), "", pid, 0).directory.exists()
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads a file."""
    process = subprocess.Popen(
        ["cat", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(["fusermount3", "-u"], id="fusermount3"),
        pytest.param(["umount"], id="umount"),
        pytest.param(["fusefs", "umount"], id="fusefs umount"),
        pytest.param(["fusefs", "umount", "--force"], id="fusefs umount --force"),
        pytest.param(["fusefs", "umount", "--lazy"], id="fusefs umount --lazy"),
    ],
)
def test_an_unmounted_mount_leaves_nothing(
    bucket: Bucket, mounter: Mounter, end: list[str]
) -> None:
    prefix = "ü, \n'\"#%20+=&日/"  # of any characters
    bucket.put(prefix + "a", b"x" * 1000)
    one = mounter(prefix=prefix)
    pid = one.pid
    assert (one.path / "a").read_bytes() == b"x" * 1000
    if end[0] == "fusefs":
        fusefs(*end[1:], one.path)
    else:
        subprocess.run([*end, one.path], check=True, timeout=LIMIT_S)
    until(lambda: nothing_is_left(one, pid), "nothing is left")


def test_a_mount_in_use_is_not_unmounted(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("a", b"x")
    one = mounter()
    with (one.path / "a").open("rb") as file:
        refused = fusefs("umount", one.path, check=False)
        assert refused.returncode == 1
        assert "in use" in refused.stderr
        assert str(os.getpid()) in refused.stderr
        assert file.read() == b"x"
    # The command itself is no user, where it is given from within.
    command = [str(FUSEFS), "umount", "."]
    assert subprocess.run(command, cwd=one.path, check=False, timeout=LIMIT_S).returncode == 0


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], SERVICE_ENDS])
def test_a_signal_detaches_a_mount_that_is_in_use(
    bucket: Bucket, mounter: Mounter, numbers: list[int]
) -> None:
    bucket.put("a", os.urandom(3 * MIB))
    one = mounter()
    pid, keeper = one.pid, mount_requests.keeper_pid(one.path)
    assert keeper is not None
    with (one.path / "a").open("rb") as file:
        for number in numbers:
            for process in (pid, keeper) if numbers == SERVICE_ENDS else (pid,):
                os.kill(process, number)
        until(lambda: mountinfo.find_mount(one.path) is None, "the mount is detached")
        assert len(file.read()) == 3 * MIB
        assert registry.start_time(pid) is not None
    until(lambda: nothing_is_left(one, pid), "nothing is left")
    assert "Traceback" not in one.log.read_text()


@pytest.mark.root
def test_where_the_kernel_s_control_files_are_mounted_they_are_used(
    bucket: Bucket, behind: Mounter, faulty: FaultyS3
) -> None:
    bucket.put("a", b"x" * MIB)
    one = behind()
    os.listdir(one.path)
    faulty.add(stall=True)
    # In a mount namespace of its own: what it unmounts stays mounted here, and is dead.
    script = (
        f"{drop_copies(one.path)}mount -t fusectl none /sys/fs/fuse/connections;"
        f" {FUSEFS} status --json {one.path}; exec {FUSEFS} umount --force {one.path}"
    )
    with reading(one.path / "a") as process:
        until(lambda: one.status()["requests"]["waiting"], "a request waits")
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        assert process.wait(LIMIT_S) != 0
    assert json.loads(done.stdout)["requests"]["in_kernel"] >= 1
    with pytest.raises(OSError, match="not connected"):
        os.listdir(one.path)


@pytest.mark.parametrize("silent", ["daemon", "bucket"])
def test_force_ends_a_mount_and_its_reader_whoever_does_not_answer(
    bucket: Bucket, behind: Mounter, faulty: FaultyS3, silent: str
) -> None:
    bucket.put("a", b"x" * MIB)
    one = behind()
    pid = one.pid
    os.listdir(one.path)
    if silent == "daemon":
        os.kill(pid, signal.SIGSTOP)
    else:
        faulty.add(stall=True)
    with reading(one.path / "a") as process:
        if silent == "bucket":
            until(lambda: one.status()["requests"]["waiting"], "a request waits")
        one.force()
        assert process.wait(LIMIT_S) != 0
    until(lambda: nothing_is_left(one, pid), "nothing is left")


@pytest.mark.root
def test_umount_names_what_keeps_a_mount_in_another_namespace(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("a", b"x")
    one = mounter()
    script = f"{drop_copies(one.path)}exec sleep 600"
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(apart) as holder:
        try:
            mounts = Path(f"/proc/{holder.pid}/mountinfo")
            until(lambda: title_of(holder.pid) == "sleep", "it is apart")
            assert f" {one.path} " in mounts.read_text()
            command = [FUSEFS, "umount", one.path]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as ending:
                assert ending.stderr is not None
                said = ending.stderr.readline()
                assert f"in the mount namespaces of sleep (pid {holder.pid})" in said
                holder.kill()
                assert ending.wait(LIMIT_S) == 0
        finally:
            holder.kill()


@contextlib.contextmanager
def in_the_foreground(
    bucket: Bucket, directory: Path
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A mount of a file `a`, once it answers, and the command that stays."""
    path = directory / "mnt"
    path.mkdir()
    bucket.put("a", b"x")
    places = ("--endpoint-url", bucket.server.endpoint_url, "--cache-dir", directory / "cache")
    process = subprocess.Popen(
        [FUSEFS, "mount", f"s3://{bucket.name}", path, "--foreground", *places],
        env={**os.environ, **bucket.server.environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: registry.registration_of(path) or process.poll() is not None, "a mount")
        until(
            lambda: "not_answering" not in json.loads(fusefs("status", path, "--json").stdout),
            "the mount answers",
        )
        yield process, path
    finally:
        process.kill()
        fusefs("umount", "--force", path, check=False)


def keeper(path: Path) -> int | None:
    try:
        return int(mount_requests.keeper_status(path, LIMIT_S)["pid"])
    except control.ControlError:
        return None


def end_with(number: int, process: subprocess.Popen[str], path: Path) -> None:
    process.send_signal(number)
    _, output = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert "Traceback" not in output
    assert mountinfo.find_mount(path) is None
    assert registry.registration_of(path) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_mount_in_the_foreground_ends_with_an_interrupt(
    bucket: Bucket, tmp_path: Path, number: int
) -> None:
    with in_the_foreground(bucket, tmp_path) as (process, path):
        assert (path / "a").read_bytes() == b"x"
        end_with(number, process, path)


@pytest.mark.root
def test_a_mount_in_the_foreground_outlives_its_keeper(bucket: Bucket, tmp_path: Path) -> None:
    with (
        shared_mount(tmp_path),
        in_the_foreground(bucket, tmp_path) as (process, path),
        open(path / "a") as file,
    ):
        first = keeper(path)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: keeper(path) not in (None, first), "another keeper goes on")
        assert file.read() == "x"
        file.close()
        assert process.poll() is None
        end_with(signal.SIGTERM, process, path)


def test_status_and_log_tell_what_waits_while_the_bucket_does_not_answer(
    bucket: Bucket, behind: Mounter, faulty: FaultyS3
) -> None:
    bucket.put("slow", b"x" * MIB)
    one = behind()
    os.listdir(one.path)
    silence = faulty.add(stall=True)
    with reading(one.path / "slow") as process:
        until(lambda: one.status()["requests"]["downloads"], "a download")
        assert one.status()["requests"]["waiting"] == 1
        os.kill(one.pid, signal.SIGUSR2)
        until(lambda: "downloading 'slow'" in one.log.read_text(), "the log tells of it")
        log = one.log.read_text()
        assert "1 requests wait" in log
        assert re.search(
            rf"(OPEN|READ) of 'slow' by process {process.pid} waits for [0-9.]+ s", log
        )
        silence.release()
        assert process.communicate(timeout=LIMIT_S)[0] == b"x" * MIB
    assert one.status()["requests"]["waiting"] == 0


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()


def test_status_counts_what_was_read_and_tells_about_the_daemon(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("a", b"x" * 300_000)
    one = mounter("--passthrough", "off")
    before = one.status()
    for _ in range(3):
        assert len((one.path / "a").read_bytes()) == 300_000
    after = one.status()
    assert after["mountpoint"] == str(one.path)
    assert after["source"].startswith(f"s3://{bucket.name}")
    assert after["session"].startswith("kernel")
    assert after["s3"]["gets"] - before["s3"]["gets"] == 1
    assert after["s3"]["bytes_fetched"] - before["s3"]["bytes_fetched"] == 300_000
    cache = after["cache"]
    assert (cache["misses"], cache["miss_bytes"]) == (1, 300_000)
    assert cache["hits"] >= 1
    assert cache["hit_bytes"] >= 300_000
    assert (cache["used_bytes"], cache["files"], cache["warning"]) == (300_000, 1, None)
    assert after["passthrough"] == {"on": False, "why": "turned off by --passthrough off"}
    assert after["read_only"] is True
    daemon = after["daemon"]
    title = f"fusefs daemon s3://{bucket.name}/ {one.path}"
    assert title_of(daemon["pid"]) == title
    settings = fusefs("status", "--settings", one.path).stdout
    assert tomllib.loads(settings)[str(one.path)]["passthrough"] == "off"
    keeper = title_of(after["keeper"]["pid"])  # a long path is cut off: its command line is short
    assert title.replace("daemon", "keeper").startswith(keeper)
    assert bucket.name in keeper
    assert 10 * MIB < daemon["rss_bytes"] <= daemon["peak_rss_bytes"] < 250 * MIB
    assert daemon["cpu_s"] > 0
    registration = registry.registration_of(one.path)
    assert registration.directory.stat().st_mode & 0o777 == 0o700
    assert registration.socket.stat().st_mode & 0o777 == 0o600
