"""The program `fusefs`, as it is installed; its commands are in cli/main.py."""

from __future__ import annotations

import contextlib
import os
import sys


def run() -> None:
    """Be the program `fusefs`, and end it."""
    try:
        from fusefs.cli.main import main

        status = main()
    except KeyboardInterrupt:  # while modules were imported; else the command has a line for it
        status = 130
    # Nothing else is left, and to take the interpreter apart is an eighth of a short command.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
