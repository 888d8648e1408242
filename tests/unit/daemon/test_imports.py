"""What a daemon imports before its mount answers, which is most of a mount's start."""

from __future__ import annotations

import json
import subprocess
import sys

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
