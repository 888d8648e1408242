"""A process that was forked, and waited for as a `subprocess.Popen`; when a daemon is forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fusefs.launch import forked_keeper
from fusefs.launch.forked_keeper import ForkedKeeper


def child(code: str) -> ForkedKeeper:
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", code],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)],
    )
    os.close(writer)
    return ForkedKeeper(pid, reader)


def test_its_exit_status_and_its_output_are_there() -> None:
    process = child("print('out'); raise SystemExit(3)")
    assert process.stdout is not None
    with process.stdout as output:
        assert output.read() == b"out\n"
    assert process.wait(30) == 3
    assert process.poll() == process.returncode == 3
    process.kill()  # the number may be another process's by now


@pytest.mark.parametrize(("end", "number"), [("terminate", 15), ("kill", 9)])
def test_it_can_be_ended(end: str, number: int) -> None:
    process = child("import time; print(flush=True); time.sleep(60)")
    assert process.stdout is not None
    process.stdout.read(1)
    assert process.poll() is None
    begun = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert time.monotonic() - begun >= 0.05
    getattr(process, end)()
    assert process.wait(30) == -number


@pytest.fixture
def _children_are_reaped_by_the_kernel() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_children_are_reaped_by_the_kernel")
def test_its_end_is_noticed_where_its_parent_ignores_sigchld() -> None:
    assert child("raise SystemExit(3)").wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "is_possible"),
    [
        (["-m", "fusefs", "mount"], True),
        (["/usr/bin/fusefs", "mount"], True),
        (["-O", "/usr/bin/fusefs"], False),
        (["-I", "-m", "fusefs"], False),
    ],
)
def test_a_daemon_is_forked_from_an_interpreter_without_options(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], is_possible: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *arguments])
    monkeypatch.setattr(os, "listdir", lambda _path: ["1"])
    assert forked_keeper.is_possible() == is_possible


def test_no_daemon_is_forked_from_a_process_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "/usr/bin/fusefs"])
    monkeypatch.setattr(os, "listdir", lambda _path: ["1", "2"])
    assert not forked_keeper.is_possible()
