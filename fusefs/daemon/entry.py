"""The main function of a daemon's process: input, answer to the launcher, and exit status.

The launcher or the keeper starts `python -m fusefs.daemon` and writes the settings as JSON to its
standard input. The daemon writes one line to its standard output: `{"ready": true, "pid": …}` when
the mount answers, or `{"error": "a sentence", "code": …}` with an `ErrorCode`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from contextlib import suppress

import trio

from fusefs.daemon import setup, status
from fusefs.daemon.error_groups import first_of
from fusefs.daemon.main import USER_ERRORS, Daemon
from fusefs.daemon.takeover import TakeoverError
from fusefs.keeper.protocol import CANNOT_TAKE_OVER
from fusefs.linux.libc import forbid_inspection
from fusefs.settings.mount import MountSettings
from fusefs.store.errors import ErrorCode, StoreError

logger = logging.getLogger("fusefs.daemon")


def _run(settings: MountSettings) -> None:
    """Serve one mount until it is unmounted; raise one of USER_ERRORS if it can't be started."""
    setup.set_up(settings)
    daemon = Daemon(settings, status.answer, status.log_waiting)
    try:
        trio.run(
            daemon.run,
            lambda warnings: _tell({"ready": True, "pid": os.getpid(), "warnings": warnings}),
        )
    except* USER_ERRORS as group:
        raise first_of(group) from None


def _tell(message: dict[str, object]) -> None:
    with suppress(BrokenPipeError):  # the launcher was killed
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


def main() -> int:
    forbid_inspection()  # before any secret is in memory
    # No garbage collection during the start, as almost all objects stay: modules, botocore's
    # models, perhaps a million nodes. Scanning them takes a twentieth of the time of a start.
    gc.disable()
    try:
        _run(setup.read_input(sys.stdin.read()))
    except USER_ERRORS as error:
        logger.error("%s", error)
        code = error.code if isinstance(error, StoreError) else ErrorCode.UNAVAILABLE
        _tell({"error": str(error), "code": code})
        return CANNOT_TAKE_OVER if isinstance(error, TakeoverError) else 1
    except Exception as error:
        logger.exception("a fault in fusefs")
        _tell({"error": f"a fault in fusefs, see the log: {first_of(error)!r}"})
        return 1
    return 0
