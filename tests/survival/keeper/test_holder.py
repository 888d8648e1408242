"""The second descriptor store: descriptors that outlive keeper, broker and daemon."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs.keeper import fd_store
from fusefs.keeper.exchange import ControlError
from fusefs.launch import control
from tests.support.survival.keeping import LIMIT_S, PROJECT, Kept, needs_fuse, needs_root
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]

SERVICE = """
import signal, sys
from fusefs.keeper.fd_store import FdStore
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
store = FdStore(sys.argv[1], {})
try:
    while True:
        store.loop.run_once(1.0)
        store.dismiss_late()
finally:
    store.close()
"""


@pytest.fixture
def service(kept: Kept) -> Iterator[str]:
    """The path of a running service's socket."""
    with serving(kept) as path:
        yield path


@contextmanager
def serving(kept: Kept) -> Iterator[str]:
    path = kept.directory / "descriptor-store.sock"
    process = subprocess.Popen([sys.executable, "-c", SERVICE, path], cwd=PROJECT)
    try:
        until(lambda: pid_of(path) == process.pid, "it listens")
        yield str(path)
    finally:
        process.terminate()
    assert process.wait(LIMIT_S) == 0
    assert not path.exists()


def pid_of(path: str | Path) -> int | None:
    """The process that listens there."""
    return control.peer(Path(path))


def ask(path: str, request: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(path)
        sock.sendall(request)
        answer: dict[str, Any] = json.loads(sock.makefile().readline() or "{}")
    return answer


def names(path: str) -> list[str]:
    held: list[str] = ask(path, b'{"do": "list"}\n')["names"]
    return held


def is_held(path: str, kept: Kept) -> Callable[[], bool]:
    assert kept.connection is not None
    name = fd_store.name_of(str(kept.mountpoint), kept.connection)
    return lambda: names(path) == [name]


def test_a_keeper_leaves_a_copy_and_takes_it_back_when_it_ends(kept: Kept, service: str) -> None:
    kept.start(descriptor_store=service)
    until(is_held(service, kept))
    kept.umount()
    assert kept.wait() == 0
    until(lambda: names(service) == [])


def test_a_mount_that_was_detached_is_no_longer_held(kept: Kept, service: str) -> None:
    kept.start({"on_sigterm": "exit"}, descriptor_store=service)
    until(is_held(service, kept))
    kept.process.terminate()
    assert kept.wait() == 0
    until(lambda: names(service) == [])


def test_a_copy_is_held_before_another_daemon_gets_the_mount(kept: Kept) -> None:
    with serving(kept) as path:
        kept.start({"take_over": "hang"}, descriptor_store=path)
        until(is_held(path, kept), "it is held")
    with serving(kept) as path:
        assert names(path) == []  # the first one was ended, and let it go
        kept.kill_daemon()
        until(is_held(path, kept), "it is held again")


def test_a_mount_goes_on_after_keeper_broker_and_daemon_were_killed(
    kept: Kept, service: str
) -> None:
    kept.start(descriptor_store=service)
    until(is_held(service, kept))
    assert kept.connection is not None
    status = kept.status()
    for role in ("daemon", "broker", "pid"):
        os.kill(status[role], signal.SIGSTOP)
    for role in ("daemon", "broker", "pid"):
        os.kill(status[role], signal.SIGKILL)
    kept.wait()
    kept.hold.touch()
    reader = subprocess.Popen(["cat", kept.mountpoint / "held"], stdout=subprocess.PIPE)
    fd = fd_store.fetch(service, fd_store.name_of(str(kept.mountpoint), kept.connection))
    os.set_inheritable(fd, True)
    kept.resume(fuse_fd=fd, table=[], descriptor_store=service)
    os.close(fd)
    kept.hold.unlink()
    assert reader.communicate(timeout=LIMIT_S)[0] == b"held content"
    kept.served_by_another_than(kept.kill_daemon())
    kept.umount()
    until(lambda: names(service) == [])


def test_a_keeper_does_without_its_descriptor_store(kept: Kept) -> None:
    kept.start(descriptor_store=str(kept.directory / "unused.sock"))
    assert (kept.mountpoint / "plain").read_bytes() == b"plain content"
    until(lambda: "the descriptor store: " in kept.log_text())


def test_a_copy_can_be_fetched_more_than_once_and_dropped(kept: Kept, service: str) -> None:
    kept.start()
    fd = hand(kept)
    fd_store.hold(service, "one", fd)
    fd_store.hold(service, "two", fd)
    os.close(fd)
    for _ in range(3):
        copy = fd_store.fetch(service, "one")
        assert is_fuse(copy)
        os.close(copy)
    assert names(service) == ["one", "two"]
    fd_store.drop(service, "one")
    until(lambda: names(service) == ["two"])
    with pytest.raises(ControlError, match="nothing is held as one"):
        fd_store.fetch(service, "one")
    assert is_fuse(fd_store.fetch(service, "two"))


def hand(kept: Kept) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(kept.control))
        sock.sendall(b'{"do": "hand"}\n')
        _, [fd], _, _ = socket.recv_fds(sock, 1000, 1)
    return fd


def is_fuse(fd: int) -> bool:
    return os.fstat(fd).st_rdev == os.makedev(10, 229)


def test_a_new_copy_takes_the_place_of_the_old(kept: Kept, service: str) -> None:
    kept.start()
    fd = hand(kept)
    for _ in range(3):
        fd_store.hold(service, "one", fd)
    os.close(fd)
    assert names(service) == ["one"]
    assert is_fuse(fd_store.fetch(service, "one"))


def test_what_a_client_brought_that_dies_is_held(kept: Kept, service: str) -> None:
    """The keeper is killed before it has its answer."""
    kept.start()
    fd = hand(kept)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(service)
        socket.send_fds(client, [b'{"do": "hold", "name": "one"}\n'], [fd])
    until(lambda: names(service) == ["one"], "it is held")
    os.close(fd)
    assert is_fuse(fd_store.fetch(service, "one"))


def test_nothing_but_fuse_is_held(service: str) -> None:
    with open("/dev/null", "rb") as file, pytest.raises(ControlError, match="/dev/fuse"):
        fd_store.hold(service, "one", file.fileno())
    assert names(service) == []


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[]\n", b"{}\n", b'{"do": "hold"}\n', b'{"do": "hold", "name": "a"}\n']
)
def test_nonsense_gets_an_error(service: str, line: bytes) -> None:
    assert "error" in ask(service, line)
    assert names(service) == []


def test_silent_visitors_hold_no_other_up(service: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(service)
        assert names(service) == []
        silent.settimeout(LIMIT_S)
        assert silent.recv(1) == b""
