"""Lines of logs: with time zone and level, as JSON, and with priorities for the journal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from fusefs.linux import log_line

WRITE = "import sys; from fusefs.linux import log_line; print(log_line.line('ERROR', 'a', 'b'))"


def test_a_line_has_its_time_zone_and_its_level() -> None:
    line = log_line.line("WARNING", "fusefs.store", "PUT failed", 1.25)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT[\d:]{8}\.250[+-]\d{4} WARNING fusefs.store: PUT failed", line
    )


def test_as_json_each_line_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_line.FORMAT_VARIABLE, "json")
    found = json.loads(log_line.line("ERROR", "fusefs.daemon", 'a "fault"', trace="of\ntwo lines"))
    assert found.pop("time")
    assert found == {
        "level": "error",
        "logger": "fusefs.daemon",
        "message": 'a "fault"',
        "trace": "of\ntwo lines",
    }


@pytest.mark.parametrize("is_journal", [True, False])
def test_the_journal_gets_priorities(is_journal: bool) -> None:
    reading, writing = os.pipe()
    status = os.fstat(writing)
    stream = f"{status.st_dev}:{status.st_ino + (not is_journal)}"
    done = subprocess.run(
        [sys.executable, "-c", WRITE],
        env={**os.environ, "JOURNAL_STREAM": stream},
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
        check=True,
    )
    os.close(reading)
    os.close(writing)
    assert done.stdout.startswith("<3>") is is_journal
