"""`fusefs profile` without a mount: what becomes of a recording whose daemon ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusefs.cli import profile
from fusefs.launch.control import ControlError
from tests.support.commands import run


def test_what_was_recorded_before_the_daemon_was_replaced_is_summarized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[dict[str, Any] | None] = [
        {"number": 1},
        {"entries": [[0.1, "lookup", "a"], [0.2, "lookup", "b"]], "lost": 0, "has_more": False},
    ]

    def ask(_mountpoint: Path, _message: dict[str, Any]) -> dict[str, Any]:
        if not answers:
            raise ControlError("the recording has ended")
        return answers.pop(0) or {}

    monkeypatch.setattr(profile, "_ask", ask)
    assert run("profile", "/mnt/a", "--summary") == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("requests    2 in ")
    assert shown.err.endswith("fusefs: the recording has ended\n")
