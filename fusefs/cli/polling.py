"""Starts a daemon's job for a command, and asks for the job's state until the job has ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusefs.launch import control
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request

ANSWER_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
POLL_S = 0.25
# Time limit without an answer: enough for a dead daemon's replacement to start.
SILENCE_S = 60.0


def finish(
    mountpoint: Path, message: dict[str, Any], describe: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Start the job that `message` requests, wait until the job has ended, return its last state.

    The key "start" is added to the request, True until the first answer. A terminal shows the text
    from `describe` meanwhile. Raises CommandError if the daemon is silent for a minute.
    """
    message = message | {"start": True}
    last_answer, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            job = daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)
            last_answer = time.monotonic()
            message["start"] = False
            show_line("" if job["has_ended"] else describe(job))
            if job["has_ended"]:
                return job
        except control.NotAnsweringError as error:
            if time.monotonic() - last_answer > SILENCE_S:
                raise CommandError(str(error)) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def show_line(text: str) -> None:
    """Show progress on one line of the terminal, if there is one; an empty text clears it."""
    if not sys.stderr.isatty():
        return
    # A wider text would wrap, and each call would begin a new line.
    width = max(1, (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1)
    print(f"\r{text[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
