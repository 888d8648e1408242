"""The commands without a mount: arguments, what is told beforehand, records, status."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs import checks, cli, control, mounts, report

STATUS: dict[str, Any] = {
    "mountpoint": "/mnt/data",
    "source": "s3://bucket/",
    "read_only": True,
    "session": "kernel",
    "passthrough": {"on": False, "why": "the kernel is older than 6.9"},
    "cache": {
        "directory": "/var/cache/fusefs",
        "used_bytes": 3 << 30,
        "limit_bytes": 50 << 30,
        "files": 2000,
        "hits": 75,
        "misses": 25,
        "hit_bytes": 1 << 30,
        "miss_bytes": 1 << 20,
        "evicted_files": 0,
        "warning": "the cache disk is full",
    },
    "s3": {"gets": 25, "heads": 1, "lists": 2, "bytes_fetched": 1 << 30, "errors": 1},
    "metadata": {"ttl_s": 60.0, "directories": 12, "nodes": 2001, "hidden_keys": 3},
    "requests": {"total": 4096, "waiting": 1},
    "daemon": {"pid": 4711, "rss_bytes": 90 << 20, "uptime_s": 3725, "cpu_s": 1.25},
    "version": "0.1.0",
}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's own."""
    directory = tmp_path / "run"
    monkeypatch.setattr(mounts, "runtime_directory", lambda: directory)
    return directory


@pytest.fixture
def no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "kernel_mounts", list)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a daemon."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


# --- mount: what is refused before anything starts ----------------------------


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "mnt"
    directory.mkdir()
    return directory


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """The one line with which `fusefs mount` refuses."""
    assert run("mount", *arguments) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("fusefs: ")
    return lines[0]


def test_a_mountpoint_that_is_missing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in refusal(capsys, "s3://bucket", tmp_path / "none")


def test_a_mountpoint_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "is not a directory" in refusal(capsys, "s3://bucket", tmp_path / "file")


def test_a_mountpoint_that_is_not_empty_is_refused(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mountpoint / "file").touch()
    assert "is not empty" in refusal(capsys, "s3://bucket", mountpoint)


def test_a_mountpoint_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/proc is already a mount" in refusal(capsys, "s3://bucket", "/proc")


def test_a_mountpoint_that_another_command_is_mounting_is_refused(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = os.open(mountpoint, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert "by another command" in refusal(capsys, "s3://bucket", mountpoint)
    os.close(other)


def test_a_missing_device_is_named(
    mountpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FUSE_DEVICE", mountpoint / "fuse")
    assert "there is no /dev/fuse" in refusal(capsys, "s3://bucket", mountpoint)


def test_an_ordinary_user_needs_the_system_s_leave_for_allow_other(
    mountpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configuration = tmp_path / "fuse.conf"
    configuration.write_text("#user_allow_other\n")
    (tmp_path / "fusermount3").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "FUSE_CONFIGURATION", configuration)
    monkeypatch.setattr(checks, "may_mount", lambda: False)
    monkeypatch.setattr(checks, "_check_device", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "user_allow_other" in refusal(capsys, "s3://bucket", mountpoint, "--allow-other")


def test_a_value_that_cannot_be_read_is_a_usage_error(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "s3://bucket", mountpoint, "--cache-size", "big", status=2)
    assert line.startswith("fusefs: --cache-size: 'big' is not a size")


def test_a_url_that_cannot_be_read_is_a_usage_error(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not an S3 URL" in refusal(capsys, "bucket", mountpoint, status=2)


# --- mount: the daemon's answer -----------------------------------------------


@pytest.fixture
def start_with(
    mountpoint: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], int]:
    """Run `fusefs mount` with the given script in the daemon's place."""

    def start(script: str) -> int:
        package = tmp_path / "modules" / "fusefs"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "daemon.py").write_text(script)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        # Under this session the daemon is started directly.
        return run(
            "mount", "s3://bucket", mountpoint, "--log-file", tmp_path / "log",
            "--session", "pyfuse3",
        )  # fmt: skip

    return start


def test_mount_returns_when_the_daemon_is_ready(start_with: Callable[[str], int]) -> None:
    script = (
        "import json, sys\n"
        "settings = json.loads(json.load(sys.stdin)['settings'])\n"
        "assert settings['source'] == 's3://bucket/'\n"
        "print('{\"ready\": true}', flush=True)\n"
    )
    assert start_with(script) == 0


def test_mount_shows_the_daemon_s_error(
    start_with: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_with('print(\'{"error": "there is no bucket of that name"}\')') == 1
    assert capsys.readouterr().err == "fusefs: there is no bucket of that name\n"


def test_mount_shows_the_last_line_of_a_daemon_that_dies(
    start_with: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_with("raise RuntimeError('so it goes')") == 1
    assert capsys.readouterr().err == (
        "fusefs: the daemon ended while starting: RuntimeError: so it goes\n"
    )


def test_the_log_belongs_to_its_user_alone(
    start_with: Callable[[str], int], tmp_path: Path
) -> None:
    start_with("raise SystemExit(3)")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


# --- what the kernel says about mounts ----------------------------------------

MOUNTINFO = r"""
25 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 25 0:30 / /mnt/with\040blank ro,nosuid - fuse.fusefs s3://bucket/a\040b/ ro,user_id=1000
37 25 0:31 / /mnt/a rw - tmpfs tmpfs rw
38 37 0:32 / /mnt/a rw shared:7 - fuse.fusefs s3://bucket/ rw,user_id=0,allow_other
"""


def test_mountinfo_is_read_with_its_escapes() -> None:
    blank = mounts.parse_mountinfo(MOUNTINFO)[1]
    assert blank.mountpoint == Path("/mnt/with blank")
    assert blank.source == "s3://bucket/a b/"
    assert blank.is_fusefs
    assert blank.connection == 30
    assert blank.owner == 1000


def test_the_topmost_of_several_mounts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "kernel_mounts", lambda: mounts.parse_mountinfo(MOUNTINFO))
    found = mounts.find_mount(Path("/mnt/a"))
    assert found is not None
    assert found.device == "0:32"
    assert not mounts.is_mountpoint(Path("/mnt"))


def test_a_mountpoint_is_resolved_like_the_kernel_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/inner")
    (tmp_path / "real" / "inner" / "up").symlink_to("../..")
    monkeypatch.chdir(tmp_path)
    assert mounts.resolve(Path("link")) == tmp_path / "real" / "inner"
    assert mounts.resolve(Path("link/../inner")) == tmp_path / "real" / "inner"
    assert mounts.resolve(Path("link/up/none")) == tmp_path / "none"


def test_links_that_go_in_circles_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        mounts.resolve(tmp_path / "a")


# --- the record of mounts -----------------------------------------------------


def test_a_mount_is_found_while_its_daemon_lives(
    runtime: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    registration = mounts.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    assert mounts.all_mounts() == [registration]
    assert mounts.registration_of(Path("/mnt/data")) == registration


def test_the_record_of_a_dead_daemon_is_removed(
    runtime: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    mounts.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert mounts.all_mounts() == []
    assert list(runtime.iterdir()) == []


def test_a_pid_that_was_given_to_somebody_else_is_not_the_daemon(
    runtime: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    registration = mounts.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    record = registration.directory / "mount.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"started": content["started"] - 1}))
    assert mounts.registration_of(Path("/mnt/data")) is None


def test_the_runtime_directory_is_the_user_s_alone(runtime: Path) -> None:
    directory = mounts.mount_directory(Path("/mnt/data"))
    assert directory.parent == runtime
    # Root's is passed through by the daemons of other users.
    assert runtime.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_that_is_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(mounts.MountsError, match="is not a directory of this user"):
        mounts.mount_directory(Path("/mnt/data"))


# --- the status socket --------------------------------------------------------


async def ask(path: Path, command: str = "status") -> dict[str, Any]:
    return await trio.to_thread.run_sync(control.request, path, command, 2.0)


async def test_a_request_is_answered(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / ("long" * 30) / "status.sock"
    path.parent.mkdir()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"asked": request["command"]}

    await nursery.start(functools.partial(control.serve, path, answer))
    assert await ask(path, "hello") == {"asked": "hello"}
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_fault_in_an_answer_ends_nothing(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "status.sock"

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"value": {}[request["command"]]}

    await nursery.start(functools.partial(control.serve, path, answer))
    for _ in range(2):
        with pytest.raises(control.ControlError, match="KeyError"):
            await ask(path)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b"x" * 4097, b""])
async def test_nonsense_is_answered_with_an_error(
    tmp_path: Path, nursery: trio.Nursery, line: bytes
) -> None:
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control.serve, path, lambda request: request))
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(line)
        await stream.send_eof()
        answer = b"".join([chunk async for chunk in stream])
    assert "error" in json.loads(answer)


async def test_the_socket_is_gone_when_its_server_is(tmp_path: Path) -> None:
    path = tmp_path / "status.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(control.serve, path, lambda request: request))
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_daemon_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    with listening:
        await listening.bind(str(tmp_path / "status.sock"))
        listening.listen()
        began = time.monotonic()
        with pytest.raises(control.NotAnsweringError, match="timed out"):
            await trio.to_thread.run_sync(control.request, tmp_path / "status.sock", "status", 0.2)
        assert time.monotonic() - began < 2


# --- umount and status --------------------------------------------------------


def test_umount_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("umount", tmp_path) == 1
    assert capsys.readouterr().err == f"fusefs: {tmp_path} is not a mount of fusefs\n"


def test_status_of_something_else_is_refused(
    tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status", tmp_path) == 1
    assert "is not a mount of fusefs" in capsys.readouterr().err


@pytest.mark.usefixtures("no_mounts", "runtime")
def test_status_without_mounts_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status") == 0
    assert capsys.readouterr().out == "no mounts\n"
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.usefixtures("no_mounts", "runtime")
def test_a_mount_that_does_not_answer_is_shown_with_its_pid(
    sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    mounts.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    assert run("status") == 0
    assert f"not answering, pid {sleeper.pid}" in capsys.readouterr().out


@pytest.mark.usefixtures("runtime")
def test_a_mount_of_somebody_else_is_shown_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "kernel_mounts", lambda: mounts.parse_mountinfo(MOUNTINFO)[1:2])
    assert run("status") == 0
    assert "it belongs to user 1000" in capsys.readouterr().out


def test_a_status_is_shown_for_people() -> None:
    text = report.render(STATUS)
    assert text.startswith("/mnt/data\n")
    for part in (
        "kernel, read-only, passthrough off (the kernel is older than 6.9)",
        "3.0 GiB of 50.0 GiB in 2,000 files",
        "75 of 100 (75.0%); 1.0 GiB from here, 1.0 MiB waited for",
        "25 GET, 1 HEAD, 2 LIST; 1.0 GiB fetched; 1 errors",
        "believed for 1 min; 12 listings, 2,001 nodes; 3 keys hidden",
        "4,096 answered, 1 waiting",
        "pid 4711, 90.0 MiB of memory, up 1 h 2 min, 1.2 s of CPU",
        "warning     the cache disk is full",
    ):
        assert part in text


def test_a_status_without_some_parts_is_shown_all_the_same() -> None:
    assert "/mnt/data" in report.render({"mountpoint": "/mnt/data", "source": "s3://b/"})


def test_status_and_umount_start_without_trio_and_boto3() -> None:
    script = "import sys, fusefs.cli; sys.exit(bool({'trio', 'boto3'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
