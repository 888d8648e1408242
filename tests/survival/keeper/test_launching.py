"""The messages between keepers and `fusefs-csi daemons`."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.daemon import setup as process
from fusefs.keeper import supervisor_protocol
from fusefs.keeper.protocol import receive
from fusefs.linux.processes import has_ended
from tests.support.machine.ordinary_user import NOBODY
from tests.support.survival.keeping import LIMIT_S, PROJECT, listener_at, needs_root
from tests.support.survival.memory_search import is_in_memory
from tests.support.waiting import until

pytestmark = needs_root

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
MOUNT = 0x1122334455667788
# In place of a daemon: reads its input, says who it is, and waits to be killed.
RUN = """
import os, sys, time
from pathlib import Path
from csi.daemons import main, supervisor

def serve():
    read = sys.stdin.read()
    read == "fork" and os.fork()
    environ = os.environ
    said = os.getuid(), environ["AWS_GIVEN"], "HOME" in environ, "LEFT_OUT" in environ
    os.write(1, f"{' '.join(map(str, said))}\\n".encode())  # at once, unlike what is printed
    time.sleep(600)

path = Path(sys.argv[1])
supervisor.Supervisor(path, serve, {}, main.running(path)).run()
"""


@contextmanager
def supervising(directory: Path) -> Iterator[str]:
    """The socket of a supervisor that starts the stand-in."""
    path = directory / "daemons.sock"
    process = subprocess.Popen([sys.executable, "-c", RUN, path], cwd=PROJECT)
    try:
        until(lambda: listener_at(path) == process.pid, "it listens")
        yield os.fspath(path)
    finally:
        process.terminate()
        with contextlib.suppress(OSError):  # then it has none, and has ended
            supervisor_protocol.end(os.fspath(path), MOUNT)
        assert process.wait(LIMIT_S) == 0


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A supervisor's socket; these variables are the keepers' alone."""
    with supervising(tmp_path) as path:
        monkeypatch.setenv("AWS_GIVEN", "given")
        monkeypatch.setenv("LEFT_OUT", "what")
        yield path


@pytest.fixture
def output() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def launch(
    path: str, stdout: int, uid: int = NOBODY, settings: str = "", *, is_beside: bool = False
) -> supervisor_protocol.ProcessHandle:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its, open(os.memfd_create("settings"), "w+b") as stdin:
        stdin.write(settings.encode())
        stdin.seek(0)
        return supervisor_protocol.launch(
            path,
            MOUNT,
            uid=uid,
            gid=NOBODY,
            channel=its.fileno(),
            stdin=stdin.fileno(),
            stdout=stdout,
            is_beside=is_beside,
        )


def test_a_daemon_is_started_as_its_user_with_its_keepers_part_of_the_environment(
    supervisor: str, output: tuple[int, int]
) -> None:
    reader, writer = output
    process = launch(supervisor, writer)
    assert os.read(reader, 100) == f"{NOBODY} given True False\n".encode()
    process.signal(signal.SIGTERM)
    until(lambda: has_ended(process.pidfd), "it has ended")
    assert os.WTERMSIG(until(process.poll_end, "its end is reported")) == signal.SIGTERM
    assert supervisor_protocol.count(supervisor) == 0


def test_a_mount_has_one_daemon_unless_another_prepares_itself(
    supervisor: str, output: tuple[int, int]
) -> None:
    first = launch(supervisor, output[1])
    second = launch(supervisor, output[1], is_beside=True)
    assert not has_ended(first.pidfd)
    third = launch(supervisor, output[1])
    assert has_ended(first.pidfd)
    assert has_ended(second.pidfd)
    assert not has_ended(third.pidfd)
    assert supervisor_protocol.count(supervisor, MOUNT) == 1


def test_a_daemon_of_the_last_supervisor_is_ended_before_the_next_one_starts_its_own(
    supervisor: str, output: tuple[int, int]
) -> None:
    first = launch(supervisor, output[1])
    with supervising(Path(supervisor).parent):
        second = launch(supervisor, output[1])
        assert has_ended(first.pidfd)
        assert not has_ended(second.pidfd)


def test_a_daemon_has_nothing_of_another_identity_in_its_memory(
    supervisor: str, output: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = []
    for name in ("first", "second"):
        monkeypatch.setenv("AWS_GIVEN", f"key-of-the-{name}")
        settings = f"setting-of-the-{name}"
        processes.append(launch(supervisor, output[1], settings=settings, is_beside=True))
        os.read(output[0], 100)
    for what in (b"key-of-the-", b"setting-of-the-"):
        for own, daemon in zip((b"first", b"second"), processes, strict=True):
            for name in (b"first", b"second"):
                assert is_in_memory(daemon.pid, what + name) == (name == own)
            assert not is_in_memory(listener_at(supervisor), what + own)


def test_a_daemon_has_no_rights_and_its_own_descriptors_alone(
    supervisor: str, output: tuple[int, int]
) -> None:
    for is_beside in (False, True):  # the second has nothing of the first
        process = Path("/proc", str(launch(supervisor, output[1], is_beside=is_beside).pid))
        os.read(output[0], 100)
    assert (process / "comm").read_text() == "fusefs.daemon\n"
    lines = (process / "status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(NOBODY)}
    assert not status["Groups"].split()
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    # The files in /proc of a process that may not be inspected are root's.
    assert (process / "mem").stat().st_uid == 0
    assert os.getsid(int(process.name)) == int(process.name)
    assert b"Max processes             16384 " in (process / "limits").read_bytes()
    # Beside the standard ones, the sockets to its keeper and to the supervisor.
    assert len(os.listdir(process / "fd")) == 5
    # What leaves before its answer is an error of a write, as in a daemon that is executed.
    ignored = int(status["SigIgn"], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert ignored & 1 << (number - 1), number


def test_no_daemon_is_started_as_root(supervisor: str, output: tuple[int, int]) -> None:
    with pytest.raises(PermissionError):
        launch(supervisor, output[1], uid=0)


def test_the_last_daemon_of_a_user_takes_with_it_what_the_user_still_runs(
    tmp_path: Path, output: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_GIVEN", "given")
    path = os.fspath(tmp_path / "daemons.sock")
    with subprocess.Popen([*APART, sys.executable, "-c", RUN, path], cwd=PROJECT) as container:
        try:
            inside = ["nsenter", "--pid", f"--target={until(lambda: listener_at(path))}"]
            sleep = ["sh", "-c", "echo; exec sleep 600"]
            roots, users = (
                subprocess.Popen([*inside, "setpriv", f"--reuid={uid}", *sleep], stdout=output[1])
                for uid in (0, NOBODY)
            )
            assert os.read(output[0], 1) == os.read(output[0], 1) == b"\n"
            uids = (NOBODY, NOBODY, NOBODY - 1)
            first, second, other = (
                launch(path, output[1], uid, "fork", is_beside=True) for uid in uids
            )
            assert users.wait(LIMIT_S) == -signal.SIGKILL
            children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
            child = os.pidfd_open(int(until(children.read_text)))
            first.kill()
            until(first.poll_end)
            assert not has_ended(child)
            second.kill()
            until(lambda: has_ended(child))
            assert not has_ended(other.pidfd)
            assert roots.poll() is None
        finally:
            container.kill()
    roots.wait()


def test_one_that_ends_starts_no_more_and_waits_for_what_it_has(
    supervisor: str, output: tuple[int, int]
) -> None:
    launch(supervisor, output[1])
    os.kill(listener_at(supervisor), signal.SIGTERM)
    with pytest.raises(ConnectionRefusedError):
        launch(supervisor, output[1])
    assert supervisor_protocol.count(supervisor, MOUNT) >= 1


def test_a_request_of_an_unknown_version_is_refused_and_harmless(supervisor: str) -> None:
    with supervisor_protocol.connect(supervisor) as sock:
        count = supervisor_protocol.pack(supervisor_protocol.COUNT, MOUNT)
        sock.send(count[:1] + b"\xff" + count[2:])
        answer = receive(sock, supervisor_protocol.KINDS)
        assert answer is not None
        assert (answer.kind, answer.a) == (supervisor_protocol.REFUSED, errno.EPROTONOSUPPORT)
    with supervisor_protocol.connect(supervisor) as sock:
        sock.send(b"nonsense")
    assert supervisor_protocol.count(supervisor) == 0


def test_a_daemon_leaves_out_the_settings_of_a_newer_driver() -> None:
    settings = {"source": "s3://bucket", "mountpoint": "/mnt", "cache_dir": "/c", "newer": "1"}
    message = {"settings": settings, "files": {}}
    assert process.read_input(json.dumps(message)).source.bucket == "bucket"
