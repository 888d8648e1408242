"""When a keeper is started early, and how it is dismissed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fusefs import __main__ as program
from fusefs.cli import main as command
from fusefs.launch import early_keeper
from fusefs.launch.early_keeper import EarlyKeeper

SCRIPT = """
from fusefs.launch import early_keeper
early_keeper.EarlyKeeper = lambda serve: print("started") or exit()
with early_keeper.started():
    print("not started")
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("option", "is_started"), [("-B", True), ("-s", False), ("-E", False), ("-I", False)]
)
def test_root_imports_nothing_early_that_its_interpreter_leaves_out(
    option: str, is_started: bool
) -> None:
    done = subprocess.run(
        [sys.executable, option, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == ("started\n" if is_started else "not started\n")


@pytest.mark.parametrize(
    ("options", "is_started"),
    [
        ((), True),
        (("--session", "kernel"), True),
        (("--session", "pyfuse3"), False),
        (("--session=pyfuse3",), False),
        (("--help",), False),
    ],
)
def test_a_mount_without_a_keeper_starts_none(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], is_started: bool
) -> None:
    @contextlib.contextmanager
    def started(_serve: None) -> Iterator[str]:
        yield "early"

    monkeypatch.setattr(early_keeper, "started", started)
    monkeypatch.setattr(command, "main", lambda _arguments, keeper=None: keeper == "early")
    assert program.main(["mount", "s3://bucket", "/mnt", *options]) == is_started


def test_an_interrupted_command_still_waits_for_its_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = []

    class Interrupted(subprocess.Popen[bytes]):
        has_waited = False

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            processes.append(self)

        def wait(self, timeout: float | None = None) -> int:
            if not self.has_waited:
                self.has_waited = True
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    keeper = EarlyKeeper()
    [process] = processes
    keeper.dismiss()
    assert not os.path.exists(f"/proc/{process.pid}")
