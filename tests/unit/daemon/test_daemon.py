"""A daemon's log, metrics, answers and imports."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from fusefs.daemon import metrics
from fusefs.daemon.log_handlers import LOOK_EVERY, BoundedHandler, OneLineFormatter
from fusefs.daemon.main import Daemon
from tests.support.machine.disks import small_disk

PART = 1 << 17
LINE = "{} {:06} " + "x" * 90
# One process of several that log to the same file.
WRITE = f"""
import logging, sys
from fusefs.daemon.log_handlers import BoundedHandler
logger = logging.getLogger("test")
logger.addHandler(BoundedHandler(2, {PART}))
for number in range(8_000):
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
    """True if each process' lines are its last ones, all of them, and whole."""
    for name in "abc":
        mine = [line for line in lines if line.startswith(name)]
        first = 8_000 - len(mine)
        if mine != [LINE.format(name, number) for number in range(first, 8_000)]:
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


async def test_metrics_do_not_wait_for_a_slow_disk_that_holds_all_threads(tmp_path: Path) -> None:
    """As forty files that are synced at once do."""
    most = int(trio.to_thread.current_default_thread_limiter().total_tokens)
    disk = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(most):
            nursery.start_soon(trio.to_thread.run_sync, disk.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(10) as waiting:
            assert await metrics._keeper(tmp_path) == {}
        disk.set()
    assert not waiting.cancelled_caught


# As `python -m fusefs.daemon` begins, up to where it would read its settings.
_START = """
import json, runpy, subprocess, sys
started = []
class Popen(subprocess.Popen):
    def __init__(self, command, *rest, **named):
        started.append(command)
        super().__init__(command, *rest, **named)
subprocess.Popen = Popen
sys.stdin.close()
try:
    runpy.run_module("fusefs.daemon", run_name="__main__")
except BaseException:
    pass
print(json.dumps([started, sorted(sys.modules)]), file=sys.stderr)
"""


def test_a_daemon_imports_what_each_mount_needs_and_starts_no_process_for_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _START], stderr=subprocess.PIPE, check=True, text=True
    )
    started, modules = json.loads(ended.stderr.splitlines()[-1])
    assert started == []
    assert "fusefs.posix.operations" in modules
    rare = {"boto3", "botocore", "xml.dom", "pyfuse3"}
    # What is another process's, or most mounts have no use for.
    rare |= {"argparse", "asyncio", "multiprocessing", "unittest", "urllib.request", "zipfile"}
    rare |= {
        "fusefs.cli",
        "fusefs.diagnosis",
        "fusefs.exporter",
        "fusefs.top",
        "fusefs.keeper.main",
    }
    rare |= {"fusefs.cluster_cache.cluster_cache", "fusefs.fuse.pyfuse3_session"}
    assert not rare & set(modules)


async def test_a_mount_that_is_detached_already_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = SimpleNamespace(settings=SimpleNamespace(mountpoint=tmp_path), _takeover=None)
    await Daemon._unmount(daemon)  # type: ignore[arg-type]
    assert "can't detach" in caplog.text
