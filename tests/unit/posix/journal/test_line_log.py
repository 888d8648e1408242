"""The log of what is still to be sent of some keys."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.posix.journal.line_log import LineLog, line, load_lines


def test_nothing_is_left_of_what_an_earlier_process_had_on_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    LineLog(path).append(line(["key", 1]))
    later = LineLog(path)
    later.write_anew([])
    assert load_lines(path) == {}
    later.append(line(["other", 2]))
    assert load_lines(path) == {"other": [2]}


@pytest.mark.parametrize("torn", [line(["b", 2])[:-5], line(["b", 2])[:-1], b"\0\0\0"])
def test_a_line_that_a_power_cut_has_torn_spoils_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(line(["a", 1]) + torn)
    log = LineLog(path)
    for key in "cd":
        log.append(line([key, 3]))
    found = load_lines(path)
    assert (found["a"], found["c"], found["d"]) == ([1], [3], [3])
    assert b"\n\n" not in path.read_bytes()


def test_half_a_line_that_a_failing_disk_keeps_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = LineLog(path)
    log.append(line(["a", 1]))
    write = os.write

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "fails")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:-3]))
        patch.setattr(os, "truncate", fail)
        with pytest.raises(OSError, match="fails"):
            log.append(line(["b", 2]))
    log.append(line(["c", 3]))
    assert load_lines(path) == {"a": [1], "c": [3]}


def test_a_log_in_which_much_is_left_is_not_always_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.posix.journal.line_log.COMPACT_FROM", 100)
    log = LineLog(tmp_path / "log")
    log.append(line(["a", "x" * 150]))
    assert log.is_large
    log.write_anew([line(["a", "x" * 150])])
    log.append(line(["b", 1]))
    assert not log.is_large
    log.append(line(["a", "y" * 150]))
    assert log.is_large
