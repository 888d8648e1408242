"""`fusefs report`: writes the archive for a bug report, and prints where it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fusefs.cli.doctor import settings_of
from fusefs.diagnosis import report
from fusefs.launch import registry


def run(mountpoint: str | None, output: str | None, *, redacts: bool) -> int:
    """Write the report of one mount, or of all mounts of this user; return the exit status."""
    path = Path(output or time.strftime("fusefs-report-%Y%m%d-%H%M%S.tar.gz"))
    resolved = registry.resolve(Path(mountpoint)) if mountpoint is not None else None
    report.write(path, resolved, settings_of(None, {}, None), redacts=redacts)
    print(f"{os.path.abspath(path)}: please look through it before it leaves this machine")
    return 0
