"""The log of a mount: bounded, whoever writes to it, and without a gap."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.daemon.log_handlers import LOOK_EVERY, BoundedHandler, OneLineFormatter
from tests.support.machine.disks import small_disk

PART = 1 << 18
LINE = "{} {:06} " + "x" * 90
# One process of several that log to the same file.
WRITE = f"""
import logging, sys
from fusefs.daemon.log_handlers import BoundedHandler
logger = logging.getLogger("test")
logger.addHandler(BoundedHandler(2, {PART}))
for number in range(20_000):
    logger.warning({LINE!r}.format(sys.argv[1], number))
"""


def written_by_three(path: Path) -> list[str]:
    """The lines of the log that three processes have written to, but for the first one."""
    with open(path, "ab") as log:
        processes = [
            subprocess.Popen([sys.executable, "-c", WRITE, name], stderr=log) for name in "abc"
        ]
        assert [process.wait(60) for process in processes] == [0, 0, 0]
    return path.read_bytes().replace(b"\0", b"").decode().splitlines()[1:]


def without_gaps(lines: list[str]) -> bool:
    """Whether each process' lines are its last ones, all of them, and whole."""
    for name in "abc":
        mine = [line for line in lines if line.startswith(name)]
        first = 20_000 - len(mine)
        if mine != [LINE.format(name, number) for number in range(first, 20_000)]:
            return False
    return True


@pytest.mark.disk
def test_a_log_of_several_processes_is_bounded_and_has_no_gaps(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert without_gaps(written_by_three(path))
    more = 3 * LOOK_EVERY * 100
    assert 0 < path.stat().st_size <= 2 * PART + more


def test_where_a_file_cannot_be_made_shorter_its_blocks_are_given_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        path = disk / "log"
        assert without_gaps(written_by_three(path))
        assert 0 < path.stat().st_blocks * 512 <= 5 * PART


def test_a_log_that_is_small_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    handler = BoundedHandler(fd, PART)
    for number in range(1000):
        handler.emit(logging.makeLogRecord({"msg": LINE.format("a", number)}))
    handler.close()
    os.close(fd)
    assert len(path.read_text().splitlines()) == 1000


def test_a_message_is_one_line_whatever_a_key_has(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "ab") as log:
        handler = BoundedHandler(log.fileno())
        handler.setFormatter(OneLineFormatter())
        logger = logging.getLogger("fusefs.test_logs")
        logger.addHandler(handler)
        logger.propagate = False
        logger.warning("GET failed: s3://bucket/%s", "a\n2026-01-01 ERROR \x1b[2J\udcff")
        try:
            raise ValueError("of several\nlines")
        except ValueError:
            logger.exception("a traceback keeps its lines")
        logger.removeHandler(handler)
    first, *rest = path.read_text().splitlines()
    assert first.endswith(r"s3://bucket/a\x0a2026-01-01 ERROR \x1b[2J\udcff")
    assert rest[-2:] == ["ValueError: of several", "lines"]
