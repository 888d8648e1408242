"""`fusefs-csi daemons`: one that is replaced by another, as in a roll-out."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi.holding import Holding
from fusefs.kernel import holder
from tests.support.keeping import LIMIT_S, PROJECT, Kept, needs_fuse, needs_root, until

pytestmark = [needs_root, needs_fuse]

NAME = "/mnt#1"
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def state() -> Iterator[Path]:
    """A directory that both see; on /dev/shm, as /run is memory, too."""
    directory = Path(tempfile.mkdtemp(prefix="state-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def start(state: Path) -> Iterator[Start]:
    """Start one with a ready file of that name, and wait until it is ready."""
    started = []

    def start(ready: str) -> subprocess.Popen[bytes]:
        arguments = ["daemons", "--state-dir", state, "--ready-file", state / ready]
        command = [sys.executable, "-c", "from csi.cli import main; raise SystemExit(main())"]
        started.append(subprocess.Popen([*command, *arguments], cwd=PROJECT))
        until((state / ready).exists)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def fuse_fd() -> Iterator[int]:
    """The descriptor of a mount."""
    directory = Path(tempfile.mkdtemp(prefix="kept-"))
    kept = Kept(directory)
    kept.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(kept.control))
        sock.sendall(b'{"do": "hand"}\n')
        _, [fd], _, _ = socket.recv_fds(sock, 1000, 1)
    yield fd
    os.close(fd)
    kept.clean_up()
    shutil.rmtree(directory)


def test_the_next_one_has_what_the_one_before_it_held(
    state: Path, start: Start, fuse_fd: int
) -> None:
    path = state / "holder.sock"
    first = start("first")
    holder.hold(str(path), NAME, fuse_fd)
    second = start("second")
    assert Holding(path).names() == {NAME}
    first.terminate()
    assert first.wait(LIMIT_S) == 0
    os.close(holder.fetch(str(path), NAME))
    assert second.poll() is None


def test_one_that_follows_a_killed_one_starts_with_nothing(
    state: Path, start: Start, fuse_fd: int
) -> None:
    path = state / "holder.sock"
    first = start("first")
    holder.hold(str(path), NAME, fuse_fd)
    first.send_signal(signal.SIGKILL)
    first.wait(LIMIT_S)
    start("second")
    assert Holding(path).names() == set()
    holder.hold(str(path), NAME, fuse_fd)
    assert Holding(path).names() == {NAME}
