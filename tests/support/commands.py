"""What the tests of the commands share: a runtime directory, a process, and what mountinfo says."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.cli import main
from fusefs.launch import registry

MOUNTINFO = r"""
25 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 25 0:30 / /mnt/with\040blank ro,nosuid - fuse.fusefs s3://bucket/a\040b/ ro,user_id=4242
37 25 0:31 / /mnt/a rw - tmpfs tmpfs rw
38 37 0:32 / /mnt/a rw shared:7 - fuse.fusefs s3://bucket/ rw,user_id=0,allow_other
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's own."""
    directory = tmp_path / "run"
    monkeypatch.setenv(registry.RUNTIME_VARIABLE, str(directory))
    return directory


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a daemon."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def run(*arguments: object) -> int:
    """The command's exit status."""
    return main.main([str(argument) for argument in arguments])
