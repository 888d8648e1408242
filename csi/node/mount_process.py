"""The process that starts one mount: `python -m csi.node.mount_process`.

The driver runs it as a user runs `fusefs mount`: one process per mount, so that the
driver, which has many threads, never forks by itself, and each mount has its own
environment. It reads JSON from standard input: the mount's `settings`, and where its
daemon is started (`supervisor`, a path, and whether it `is_needed`). It starts the
mount, or resumes one that has lost its keeper, and then writes `{}` or
`{"error": "..."}`.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fusefs.api import (
    LaunchError,
    MountsError,
    MountSettings,
    SettingsError,
    SupervisorAddress,
    UnmountError,
    start_mount,
)


def main() -> int:
    """Start the mount that standard input describes; return the exit status."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        request = json.load(sys.stdin)
        # After a roll-back they may have been written by a newer driver.
        settings = MountSettings.from_json(request["settings"], is_newer=True)
        supervisor = None
        if request["supervisor"] is not None:
            supervisor = SupervisorAddress(Path(request["supervisor"]), request["is_needed"])
        start_mount(settings, supervisor)
    except (LaunchError, MountsError, UnmountError, SettingsError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    print("{}", flush=True)
    return 0


def _fail(why: str) -> int:
    print(json.dumps({"error": " ".join(why.split())}), flush=True)
    return 1


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    """Clean up as for Ctrl-C when the driver's deadline has passed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
