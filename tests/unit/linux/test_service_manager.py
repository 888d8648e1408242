"""What systemd hears of a service, on a socket like its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux import service_manager


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_it_hears_that_the_service_is_ready_and_that_it_ends(systemd: socket.socket) -> None:
    with service_manager.ready(lambda: True):
        assert systemd.recv(99) == b"READY=1"
    assert systemd.recv(99) == b"STOPPING=1"


def test_it_gets_signs_of_life_while_the_mount_works(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    answers = iter([False, True])
    with service_manager.ready(lambda: next(answers, True)):
        assert systemd.recv(99) == b"READY=1"
        assert systemd.recv(99) == b"WATCHDOG=1"


def test_nothing_is_sent_where_there_is_no_systemd() -> None:
    service_manager.notify("READY=1", {})
    service_manager.notify("READY=1", {"NOTIFY_SOCKET": "/nowhere"})


def test_a_watchdog_is_for_the_process_that_it_names() -> None:
    interval = service_manager.watchdog_interval_s
    assert interval({"WATCHDOG_USEC": "2000000"}) == 1.0
    assert interval({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}) == 1.0
    assert interval({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) is None
    assert interval({}) is None


def test_a_service_ends_though_its_messages_are_not_read(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_manager, "SEND_LIMIT_S", 0.1)
    other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with service_manager.ready(lambda: True), other, contextlib.suppress(BlockingIOError):
        other.connect(systemd.getsockname())
        while True:
            other.send(b"WATCHDOG=1")
    assert systemd.recv(99) == b"READY=1"
