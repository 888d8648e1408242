"""Keepers and daemons that are started before the command knows what to mount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fusefs.cli import main as command
from fusefs.keeper import early_start
from fusefs.launch import launcher
from fusefs.launch.early_keeper import EarlyKeeper
from fusefs.launch.preflight import LaunchError
from fusefs.launch.runtime_location import RUNTIME_VARIABLE, runtime_path
from fusefs.linux import mountinfo
from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.waiting import until

pytestmark = pytest.mark.root  # others may not look at the environment of a daemon

MARK = "FUSEFS_TEST_MARK"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What is in the environment of all processes that a test starts."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return f"{MARK}={value}".encode()


def processes_with(mark: bytes, *others: bytes) -> list[int]:
    """The pids of the processes that were started with this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {mark, *others} <= set(variables):
            found.append(int(entry.name))
    return found


def early_daemon(mark: bytes, keeper_pid: int) -> int:
    """The pid of an early daemon whose keeper waits."""
    wanted = f"{early_start.VARIABLE}=1".encode()

    def daemons() -> list[int]:
        return [pid for pid in processes_with(mark, wanted) if pid != keeper_pid and is_daemon(pid)]

    until(lambda: len(daemons()) == 1, "the early daemon is there")
    return daemons()[0]


def is_daemon(pid: int) -> bool:
    return b"fusefs.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()


def field(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(name + ":"))


def mount_with(keeper: EarlyKeeper, mount: Mount, *options: str) -> int:
    """The command in this process, with an early keeper; its exit status."""
    mount.path.mkdir()
    arguments = ["mount", mount.source, str(mount.path), "--endpoint-url", mount.endpoint_url]
    arguments += ["--cache-dir", str(mount.cache), "--log-file", str(mount.log)]
    return command.main([*arguments, *options], keeper)


@pytest.fixture
def another(mounter: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """A mount that is made by `mount_with`."""
    first = mounter()
    first.end()
    for name, value in first.environment.items():
        monkeypatch.setenv(name, value)
    return Mount(
        first.source,
        tmp_path / "another",
        tmp_path / "another-cache",
        first.endpoint_url,
        first.environment,
        tmp_path / "another.log",
    )


def test_a_mount_s_first_daemon_was_started_early(mounter: Mounter) -> None:
    mount = mounter()
    status = mount.status()
    daemon, keeper = status["daemon"]["pid"], status["keeper"]["pid"]
    assert f"{early_start.VARIABLE}=1".encode() in Path(f"/proc/{daemon}/environ").read_bytes()
    # As one that is started later: its keeper's child, in a session of its own, with the log.
    assert int(field(daemon, "PPid")) == keeper
    assert os.getsid(daemon) == daemon
    assert os.getsid(keeper) == keeper
    assert os.readlink(f"/proc/{daemon}/fd/2") == str(mount.log)
    assert os.readlink(f"/proc/{keeper}/fd/2") == str(mount.log)
    os.kill(daemon, signal.SIGKILL)
    until(lambda: mount.status()["daemon"]["pid"] not in (None, daemon), "another daemon serves")
    mount.end()


def test_a_forked_daemon_looks_like_one_that_was_executed(mounter: Mounter, tmp_path: Path) -> None:
    mount = mounter()
    mount.end()
    arguments = [str(FUSEFS), "mount", mount.source, str(mount.path)]
    arguments += ["--endpoint-url", mount.endpoint_url, "--cache-dir", str(mount.cache)]
    # A descriptor that a shell has open, such as a lock, is nothing that a mount keeps.
    with open(tmp_path / "lock", "w") as lock:
        environment = {**os.environ, **mount.environment}
        subprocess.run(arguments, env=environment, check=True, pass_fds=(lock.fileno(),))
    status = mount.status()
    daemon, keeper = status["daemon"]["pid"], status["keeper"]["pid"]
    shown = [Path(f"/proc/{daemon}/{name}").read_bytes() for name in ("cmdline", "comm", "environ")]
    own = [os.readlink(entry) for entry in Path(f"/proc/{daemon}/fd").iterdir()]
    keepers = [os.readlink(entry) for entry in Path(f"/proc/{keeper}/fd").iterdir()]
    os.kill(daemon, signal.SIGKILL)
    until(lambda: mount.status()["daemon"]["pid"] not in (None, daemon), "another daemon serves")
    another = mount.status()["daemon"]["pid"]
    executed = [Path(f"/proc/{another}/{name}").read_bytes() for name in ("cmdline", "comm")]
    assert shown[:2] == executed
    assert f"{RUNTIME_VARIABLE}={runtime_path()}".encode() in shown[2].split(b"\0")
    assert not [path for path in [*own, *keepers] if path == str(tmp_path / "lock")]
    mount.end()


def test_a_daemon_is_executed_where_the_kernel_shows_no_other_command_line(
    mark: bytes, tmp_path: Path
) -> None:
    script = f"""
import errno, os, sys, time
from fusefs.launch.early_keeper import EarlyKeeper
from fusefs.linux import process_title
def refused(*_given):
    raise OSError(errno.EPERM, "refused")
process_title.show_as = refused
keeper = EarlyKeeper(lambda: open({str(tmp_path / "forked")!r}, "w"))
sys.stdin.read()
keeper.dismiss()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        daemon = early_daemon(mark, os.getpid())
        arguments = Path(f"/proc/{daemon}/cmdline").read_bytes().split(b"\0")[:-1]
        assert arguments == [os.fsencode(argument) for argument in early_start.DAEMON]
    assert process.returncode == 0
    assert not (tmp_path / "forked").exists()
    assert not os.path.exists(f"/proc/{daemon}")


def test_a_forked_daemon_has_the_module_path_and_arguments_of_an_executed_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text("""
import json, os, sys
from fusefs.launch.early_keeper import EarlyKeeper
def serve():
    sys.stdin.read(0)
    print(json.dumps([sys.path, sys.argv, sys.orig_argv, os.getcwd()]), flush=True)
    os._exit(0)
keeper = EarlyKeeper(serve)
sys.stdout.write(keeper._process.stdout.readline().decode())
keeper.dismiss()
""")
    program = [sys.executable, str(tmp_path / "program.py"), "secret"]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
    path, arguments, original, directory = json.loads(done.stdout)
    here = "import json, sys; print(json.dumps(sys.path))"
    executed = subprocess.run(
        [sys.executable, "-P", "-c", here], stdout=subprocess.PIPE, check=True, cwd="/"
    )
    assert path == json.loads(executed.stdout)
    assert (len(arguments), original, directory) == (1, early_start.DAEMON, "/")


@pytest.mark.parametrize(
    "arguments",
    [
        ("s3://bucket", "/nonexistent"),
        ("s3://bucket", "/tmp", "--no-such-option"),
        ("s3://bucket", "/tmp", "--cache-size", "much"),
        ("--help",),
    ],
)
def test_a_command_that_mounts_nothing_leaves_no_process(
    mark: bytes, arguments: tuple[str, ...]
) -> None:
    # Not captured by pipes: a process that is left would keep them open.
    with subprocess.Popen(
        [FUSEFS, "mount", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        process.wait(LIMIT_S)
    assert processes_with(mark) in ([], [os.getpid()])


def test_an_early_daemon_that_has_died_is_replaced(another: Mount, mark: bytes) -> None:
    keeper = EarlyKeeper()
    try:
        daemon = early_daemon(mark, os.getpid())
        os.kill(daemon, signal.SIGKILL)
        until(lambda: field(daemon, "State").startswith("Z"), "the early daemon is dead")
        assert mount_with(keeper, another) == 0
        assert another.status()["daemon"]["pid"] != daemon
        assert "started early is not used" in another.log.read_text()
        another.end()
    finally:
        keeper.dismiss()
        another.clean_up()


def test_what_an_early_daemon_fails_to_import_is_in_the_log(
    another: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outcome.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    another.path.mkdir()
    arguments = [another.source, another.path, "--endpoint-url", another.endpoint_url]
    arguments += ["--cache-dir", another.cache, "--log-file", another.log]
    done = subprocess.run(
        [FUSEFS, "mount", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("fusefs: the daemon ended while starting: ")
    log = another.log.read_text()
    assert "started early is not used" in log
    assert "ImportError: it is broken" in log


def test_an_early_keeper_that_has_died_is_replaced(another: Mount, mark: bytes) -> None:
    keeper = EarlyKeeper()
    try:
        daemon = early_daemon(mark, os.getpid())
        dead = int(field(daemon, "PPid"))
        os.kill(dead, signal.SIGKILL)
        until(lambda: field(dead, "State").startswith("Z"), "the early keeper is dead")
        assert mount_with(keeper, another) == 0
        status = another.status()
        assert status["keeper"]["pid"] != dead
        assert status["daemon"]["pid"] != daemon
        until(lambda: not os.path.exists(f"/proc/{daemon}"), "the daemon of a dead keeper ends")
        another.end()
    finally:
        keeper.dismiss()
        another.clean_up()


def test_a_command_that_is_interrupted_as_its_keeper_begins_leaves_nothing(
    another: Mount, mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> NoReturn:
        give(*given)
        raise KeyboardInterrupt

    give = early_start.give
    monkeypatch.setattr(early_start, "give", interrupted)
    monkeypatch.setattr(launcher, "END_TIMEOUT_S", LIMIT_S)  # imports take long on a busy machine
    keeper = EarlyKeeper()
    try:
        assert mount_with(keeper, another) == 130
        assert processes_with(mark) == []
        assert not mountinfo.is_mountpoint(another.path)
    finally:
        keeper.dismiss()
        another.clean_up()


def test_an_early_keeper_has_ended_before_a_daemon_without_one_starts(
    another: Mount, mark: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_given: Any) -> NoReturn:
        assert processes_with(mark) == []
        raise LaunchError("no more is needed")

    monkeypatch.setattr(launcher, "_popen", refused)
    keeper = EarlyKeeper()
    try:
        early_daemon(mark, os.getpid())
        assert mount_with(keeper, another, "--session", "pyfuse3") == 1
    finally:
        keeper.dismiss()


def test_a_dismissed_keeper_ends_with_its_daemon(mark: bytes) -> None:
    keeper = EarlyKeeper()
    daemon = early_daemon(mark, os.getpid())
    keeper_pid = int(field(daemon, "PPid"))
    keeper.dismiss()
    assert not os.path.exists(f"/proc/{keeper_pid}")
    assert not os.path.exists(f"/proc/{daemon}")


def test_no_early_start_takes_the_number_of_a_closed_stream(mounter: Mounter) -> None:
    mount = mounter()
    mount.end()
    arguments = [str(FUSEFS), "mount", mount.source, str(mount.path)]
    arguments += ["--endpoint-url", mount.endpoint_url, "--cache-dir", str(mount.cache)]
    script = 'exec "$@" <&- 2>&-'
    subprocess.run(
        ["sh", "-c", script, "sh", *arguments],
        env={**os.environ, **mount.environment},
        check=True,
        timeout=LIMIT_S,
    )
    assert mount.status()["survival"]["on"]
    fusefs("umount", mount.path)
