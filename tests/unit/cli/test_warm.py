"""`fusefs warm`: how its options are read."""

from __future__ import annotations

import io
import os
import sys

import pytest

from fusefs.cli import polling
from fusefs.cli.warm import shard
from tests.support.semantics import states


@states(
    "`fusefs warm --shard N` takes the number of its part from `$JOB_COMPLETION_INDEX`, which an "
    "Indexed Job of Kubernetes sets."
)
def test_a_pod_of_an_indexed_job_knows_its_number() -> None:
    assert shard("8", {"JOB_COMPLETION_INDEX": "3"}) == (3, 8)
    assert shard("0/8", {"JOB_COMPLETION_INDEX": "3"}) == (0, 8)


@pytest.mark.parametrize(
    ("text", "index", "why"),
    [
        ("8", None, r"there is no \$JOB_COMPLETION_INDEX; write I/N"),
        ("3", "3", "'3/3' are numbered from 0 to N-1"),
        ("8", "two", "'two/8' is not of the form I/N"),
        ("", "1", "is not of the form I/N"),
        ("1/2/3", None, "is not of the form I/N"),
        ("-1/2", None, "is not of the form I/N"),
        ("2/2", None, "are numbered from 0 to N-1"),
    ],
)
def test_what_is_no_shard_is_refused(text: str, index: str | None, why: str) -> None:
    environment = {} if index is None else {"JOB_COMPLETION_INDEX": index}
    with pytest.raises(ValueError, match=why):
        shard(text, environment)


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize("columns", [20, 200, 0])
def test_progress_stays_on_one_line_of_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size((columns, 24)))
    polling.show_line("41%, 3.1 of 7.5 GiB, 1,234 of 5,678 files")
    polling.show_line("")
    shown, cleared = terminal.getvalue().strip("\r").split("\r\r")
    assert len(shown) == len(cleared) == (columns or 80) - 1
    assert shown.startswith("41%, 3.1 of 7.5")
    assert not cleared.strip()
