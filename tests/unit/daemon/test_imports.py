"""What a daemon imports before its mount answers, which is most of a mount's start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio

import fusefs
from fusefs.daemon import main, preloading

# With the interpreter's own modules alone.
_PATH = f"import sys; sys.path.insert(0, {str(Path(fusefs.__file__).parents[1])!r})"
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
    rare = {"boto3", "botocore", "obstore", "diskcache", "email", "html", "xml.dom", "pyfuse3"}
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


# As the program `fusefs` begins, up to where it starts the keeper.
_COMMAND = """
import sys
before = {*sys.modules}
from fusefs import __main__ as program
from fusefs.launch import early_keeper
def started(_serve):
    print(*sorted({*sys.modules} - before))
    raise SystemExit
early_keeper.started = started
program.main(["mount", "s3://bucket", "/mountpoint"])
"""


def test_a_command_imports_next_to_nothing_before_it_forks_its_keeper_and_daemon() -> None:
    modules = subprocess.check_output(
        [sys.executable, "-I", "-S", "-c", _PATH + _COMMAND], text=True
    )
    own = {name for name in modules.split() if name.startswith("fusefs")}
    assert own == {
        "fusefs",
        "fusefs.__main__",
        "fusefs.keeper",
        "fusefs.keeper.early_start",
        "fusefs.launch",
        "fusefs.launch.early_keeper",
        "fusefs.launch.forked_keeper",
        "fusefs.launch.runtime_location",
    }
    large = {
        "subprocess",
        "socket",
        "selectors",
        "json",
        "typing",
        "ctypes",
        "re",
        "signal",
        "enum",
    }
    assert not large & {*modules.split()}


async def test_rare_modules_are_imported_once_the_first_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    imported: list[None] = []
    monkeypatch.setattr(preloading, "import_rest", lambda: imported.append(None))
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(main._import_rest)
        await trio.sleep(0.9)
        assert not imported
    assert imported
    assert trio.current_time() - begun >= 1
