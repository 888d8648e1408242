"""What a keeper answers on its socket, what it holds, and how little memory it takes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from tests.support.machine.ordinary_user import NOBODY
from tests.support.survival.keeping import (
    LIMIT_S,
    Kept,
    needs_fuse,
    needs_passthrough,
    needs_root,
    put_through,
)
from tests.support.waiting import until

pytestmark = [needs_root, needs_fuse]

MOST_MEMORY_KIB = 15 * 1024


@needs_passthrough
def test_the_keeper_is_small_with_every_file_registered(kept: Kept) -> None:
    put_through(kept)
    count = 20_000
    kept.start({"attack": "register_20000"}, most_backing_ids=count)
    assert kept.attack_facts()["attack"] == [0, count]
    for _ in range(2):
        status = kept.served_by_another_than(kept.kill_daemon())
    text = Path(f"/proc/{status['pid']}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
    assert int(line.split()[1]) < MOST_MEMORY_KIB


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b'{"do": "dance"}\n',
        b"\xff\n",
        b'{"do": "status", "protocol": 99}\n',
    ],
)
def test_nonsense_on_the_control_socket_gets_an_error(kept: Kept, line: bytes) -> None:
    kept.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(kept.control))
        sock.sendall(line)
        assert "error" in json.loads(sock.makefile().readline())
    # What it says of itself may reach the keeper after its first user.
    until(lambda: kept.status()["is_serving"])


def test_silent_clients_hold_no_other_up(kept: Kept) -> None:
    kept.start()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(10)]
        for sock in silent:
            sock.connect(str(kept.control))
        until(lambda: kept.status()["is_serving"])
        kept.served_by_another_than(kept.kill_daemon())
        silent[0].settimeout(LIMIT_S)
        assert silent[0].recv(1) == b""


def test_only_root_is_answered(kept: Kept) -> None:
    kept.start()
    kept.control.chmod(0o666)
    result: list[bytes] = []

    def ask_as_nobody() -> None:
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.setresuid(NOBODY, NOBODY, NOBODY)
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(str(kept.control))
                os.write(sender, b"connected;")
                sock.sendall(b'{"do": "settings"}\n')
                os.write(sender, sock.recv(100))
            os._exit(0)
        os.close(sender)
        with open(receiver, "rb") as answer:
            result.append(answer.read())
        os.waitpid(pid, 0)

    ask_as_nobody()
    assert result == [b"connected;"]


def test_only_the_mounts_own_processes_have_its_descriptor(kept: Kept) -> None:
    kept.start()
    kept.served_by_another_than(kept.kill_daemon())
    status = kept.status()
    holders = {
        int(path.parts[2])
        for pid in kept.processes()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path) == "/dev/fuse"
    }
    assert holders == {status["pid"], status["broker"], status["daemon"]}
    kept_by_daemon = os.listdir(f"/proc/{status['daemon']}/fd")
    assert len(kept_by_daemon) <= 5  # the standard three, the keeper's and the mount's
