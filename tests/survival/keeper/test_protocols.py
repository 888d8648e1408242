"""Drivers, keepers and daemons of different versions: what each says to those of the last one."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.daemon import control_socket
from fusefs.launch import control
from tests.support.survival.keeping import LIMIT_S, PROJECT, Kept, needs_fuse, needs_root
from tests.support.waiting import until

HOLD = "import sys; from fusefs.keeper.fd_store import main; sys.exit(main(sys.argv[1]))"
# Requests that name the version, and that leave it out; what they are answered.
REQUESTS = [
    ({"command": "status"}, {"status": "good"}),
    ({"command": "status", "protocol": 1}, {"status": "good"}),
]


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(os.fspath(path))
        sock.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(sock.makefile().readline())
    return answer


@pytest.fixture
async def daemon(tmp_path: Path, nursery: trio.Nursery) -> Path:
    """The socket of a daemon."""
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control_socket.serve, path, lambda _: {"status": "good"}))
    return path


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[Path]:
    """The socket of a descriptor store."""
    path = tmp_path / "descriptor-store.sock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], cwd=PROJECT)
    try:
        until(path.exists, "it listens")
        yield path
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.parametrize(("request_", "answer"), REQUESTS)
async def test_a_daemon_answers_in_the_version_of_the_request(
    daemon: Path, request_: dict[str, Any], answer: dict[str, Any]
) -> None:
    assert await trio.to_thread.run_sync(ask, daemon, request_) == answer


async def test_a_daemon_refuses_a_version_that_it_does_not_know(daemon: Path) -> None:
    answer = await trio.to_thread.run_sync(ask, daemon, {"command": "status", "protocol": 99})
    assert answer == {"error": "version 99 of the protocol is not spoken here"}


async def test_who_asks_sees_nothing_of_the_version(daemon: Path) -> None:
    answer = await trio.to_thread.run_sync(control.request, daemon, "status", LIMIT_S)
    assert answer == {"status": "good"}


def test_a_daemon_or_keeper_of_the_first_version_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "status.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as client:
                request = json.loads(client.makefile().readline())
                client.sendall(json.dumps({"was": request["command"]}).encode() + b"\n")

        first = threading.Thread(target=answer, daemon=True)
        first.start()
        assert control.request(path, "warming", LIMIT_S) == {"was": "warming"}
        first.join(LIMIT_S)


@needs_root
@needs_fuse
def test_a_keeper_answers_in_the_version_of_the_request(kept: Kept) -> None:
    kept.start()
    assert ask(kept.control, {"do": "status", "protocol": 1})["pid"] == kept.process.pid
    refusal = ask(kept.control, {"do": "status", "protocol": 99})
    assert "version 99 of the protocol is not spoken here" in refusal["error"]


@needs_root
@needs_fuse
def test_a_descriptor_store_takes_and_gives_descriptors_in_the_words_of_the_first_version(
    kept: Kept, holding: Path
) -> None:
    kept.start()
    fd = exchange(kept.control, b'{"do": "hand"}\n', [])[1][0]
    answer, fds = exchange(holding, b'{"do": "hold", "name": "one"}\n', [fd])
    assert (answer, fds) == (b'{"ok": true}\n', [])
    answer, fds = exchange(holding, b'{"do": "fetch", "name": "one"}\n', [])
    assert answer == b'{"ok": true}\n'
    assert os.fstat(fds[0]).st_rdev == os.fstat(fd).st_rdev
    assert exchange(holding, b'{"do": "drop", "name": "one"}\n', [])[0] == b'{"ok": true}\n'
    for one in (fd, *fds):
        os.close(one)


def exchange(path: Path, request: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
    """A request and its answer, with descriptors."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(os.fspath(path))
        socket.send_fds(sock, [request], fds)
        answer, received, _, _ = socket.recv_fds(sock, 1 << 16, 1)
    return answer, list(received)
