"""The record of mounts and of the processes that serve them."""

import errno
import functools
import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.daemon import control_socket
from fusefs.launch import control, launcher, registry, users
from fusefs.launch.preflight import LaunchError
from fusefs.linux import sockets
from tests.support.commands import runtime as runtime
from tests.support.commands import sleeper as sleeper


def test_a_mountpoint_is_resolved_like_the_kernel_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/inner")
    (tmp_path / "real" / "inner" / "up").symlink_to("../..")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.chdir(tmp_path)
    assert registry.resolve(Path("link")) == tmp_path / "real" / "inner"
    assert registry.resolve(Path("link/../inner")) == tmp_path / "real" / "inner"
    assert registry.resolve(Path("link/up/none")) == tmp_path / "none"
    with pytest.raises(OSError, match="Too many levels"):
        registry.resolve(Path("circle"))


def test_only_another_command_is_named_as_another_command(tmp_path: Path) -> None:
    with launcher._claim(tmp_path), pytest.raises(LaunchError), launcher._claim(tmp_path):
        pass
    # A fork's error where there are too many processes.
    with pytest.raises(BlockingIOError), launcher._claim(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "no process")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match=f"leads to {tmp_path}"):
        launcher._claim(tmp_path / "link").__enter__()


def test_an_answer_of_a_daemon_has_an_end() -> None:
    with (
        subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as daemon,
        pytest.raises(LaunchError, match="too long"),
    ):
        launcher._wait_until_ready(daemon, 5.0, math.inf)


@pytest.mark.parametrize("is_pid_given_to_another", [True, False])
def test_the_record_of_a_dead_daemon_is_removed_if_nothing_listens(
    runtime: Path, sleeper: subprocess.Popen[bytes], *, is_pid_given_to_another: bool
) -> None:
    registration = registry.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    if is_pid_given_to_another:
        registration = registration._replace(started=registration.started - 1)
        record = registration.directory / "mount.json"
        record.write_text(json.dumps(registration._asdict()))
    else:
        sleeper.kill()
        sleeper.wait()
    with socket.socket(socket.AF_UNIX) as listener:  # as a daemon of another PID namespace
        listener.bind(os.fspath(registration.socket))
        listener.listen()
        assert registry.all_mounts() == [registration]
    assert registry.all_mounts() == []
    assert list(runtime.iterdir()) == []


def test_a_record_that_a_daemon_has_made_into_something_else_is_none(
    runtime: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    registration = registry.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    record = registration.directory / "mount.json"
    content = json.loads(record.read_text())
    for change in ({"mountpoint": "/mnt/other"}, {"pid": "self"}, {"mountpoint": 1}):
        record.write_text(json.dumps(content | change))
        assert registry.all_mounts() == []
    record.unlink()
    os.mkfifo(record)  # whoever opens it waits for a writer
    assert registry.all_mounts() == []
    record.unlink()
    (runtime / "elsewhere").write_text(json.dumps(content))
    record.symlink_to(runtime / "elsewhere")
    assert registry.all_mounts() == []


def test_a_daemon_of_another_user_cannot_name_a_process_that_is_not_that_users(
    runtime: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """`fusefs umount --force` of root would kill it."""
    if os.geteuid() != 0:
        pytest.skip("only root serves mounts as other users")
    registration = registry.register(Path("/mnt/data"), "s3://bucket/", sleeper.pid)
    assert registration.is_alive()
    os.chown(registration.directory, 12345, 12345)
    assert not registration.is_alive()
    assert registry.all_mounts() == []
    with subprocess.Popen(["sleep", "60"], user=12345, group=12345, extra_groups=[]) as theirs:
        registry.hand_over(Path("/mnt/data"), 12345, 12345)
        record = registration._replace(pid=theirs.pid, started=registry.start_time(theirs.pid) or 0)
        assert record.is_alive()
        theirs.kill()


def test_whom_a_daemon_runs_as_is_known_by_its_directory(runtime: Path) -> None:
    assert users.daemon_user(Path("/mnt/data")) is None
    uid = os.geteuid() or 54321
    registry.hand_over(Path("/mnt/data"), uid, os.getegid())
    assert users.daemon_user(Path("/mnt/data")).uid == uid


def test_the_runtime_directory_is_the_user_s_alone(runtime: Path) -> None:
    directory = registry.mount_directory(Path("/mnt/data"))
    assert directory.parent == runtime
    # Root's is passed through by the daemons of other users.
    assert runtime.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_that_is_a_link_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(registry.MountsError, match="is not a directory of this user"):
        registry.mount_directory(Path("/mnt/data"))


@pytest.fixture
def ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for /tmp and /run/user, seen by an ordinary user whose session has none."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid or 4242)
    monkeypatch.setattr(registry, "TEMPORARY", str(tmp_path))
    monkeypatch.setattr(registry, "SESSIONS", str(tmp_path))
    for variable in (registry.RUNTIME_VARIABLE, "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_a_session_directory_of_another_machine_is_none(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ordinary / f"fusefs-{os.geteuid()}"
    assert registry.runtime_directory() == place
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(ordinary / "not there"))
    assert registry.runtime_directory() == place
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(ordinary))
    assert registry.runtime_directory() == ordinary / "fusefs"


@pytest.mark.parametrize("is_planted", [False, True])
def test_the_mount_of_a_job_without_a_session_is_found_from_one(
    is_planted: bool, ordinary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mountpoint, pid = Path("/mnt/job"), os.getpid()
    directory = registry.runtime_directory() / registry.keeper_socket(mountpoint).stem
    directory.mkdir(parents=True)
    record = (str(mountpoint), "s3://bucket/", pid, registry.start_time(pid))
    found = registry.Registration(*record)  # type: ignore[arg-type]
    (directory / "mount.json").write_text(json.dumps(found._asdict()))
    if os.getuid() == 0 and not is_planted:
        os.chown(directory.parent, os.geteuid(), -1)
    elif is_planted:
        monkeypatch.setattr(os, "geteuid", lambda: int(directory.parent.name[7:]) + 1)
        directory.parent.rename(ordinary / f"fusefs-{os.geteuid()}")
    session = ordinary / "session"
    session.mkdir()
    place = ordinary / str(os.geteuid()) / "fusefs" if is_planted else directory.parent
    assert registry.keeper_socket(mountpoint).parent == place
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert registry.all_mounts() == ([] if is_planted else [found])
    assert registry.keeper_socket(mountpoint).parent == place
    assert registry.new_keeper_socket(mountpoint).parent == session / "fusefs"


async def ask(path: Path) -> dict[str, Any]:
    return await trio.to_thread.run_sync(control.request, path, "status", 2.0)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [(lambda _: {}["status"], "KeyError"), (lambda _: {"no JSON": {1, 2}}, "TypeError")],
)
async def test_a_fault_in_an_answer_ends_nothing(
    tmp_path: Path, nursery: trio.Nursery, answer: Callable[[Any], dict[str, Any]], fault: str
) -> None:
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control_socket.serve, path, answer))
    for _ in range(2):
        with pytest.raises(control.ControlError, match=fault):
            await ask(path)


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b"x" * 4097, b""])
async def test_nonsense_is_answered_with_an_error(
    tmp_path: Path, nursery: trio.Nursery, line: bytes
) -> None:
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control_socket.serve, path, lambda request: request))
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(line)
        await stream.send_eof()
        answer = b"".join([chunk async for chunk in stream])
    assert "error" in json.loads(answer)


async def test_only_the_owner_and_root_are_answered(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("long" * 30) / "status.sock"
    path.parent.mkdir()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"received": request["command"]}

    await nursery.start(functools.partial(control_socket.serve, path, answer))
    assert path.stat().st_mode & 0o777 == 0o600
    for uid in (os.geteuid(), 0):
        monkeypatch.setattr(sockets, "peer_of", lambda _, uid=uid: (1, uid))
        assert await ask(path) == {"received": "status"}
    monkeypatch.setattr(sockets, "peer_of", lambda _: (1, 54321))
    with pytest.raises(control.ControlError, match="owner and root"):
        await ask(path)


async def test_a_daemon_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    with listening:
        await listening.bind(str(tmp_path / "status.sock"))
        listening.listen()
        began = time.monotonic()
        with pytest.raises(control.NotAnsweringError, match="timed out"):
            await trio.to_thread.run_sync(control.request, tmp_path / "status.sock", "status", 0.2)
        assert time.monotonic() - began < 2


def test_descriptors_that_come_with_an_answer_are_closed(tmp_path: Path) -> None:
    path, (reader, writer) = tmp_path / "keeper.sock", os.pipe()

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            socket.send_fds(sock, [b"{}\n"], [writer])
        os.close(writer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        assert control.exchange(path, {"do": "status"}, 10.0) == {}
        thread.join()
    assert os.read(reader, 1) == b""  # no copy of the other end is open
    os.close(reader)
