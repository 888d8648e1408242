"""The entry point of the program `fusefs`; its commands are in cli/main.py."""

from __future__ import annotations

import contextlib
import os
import sys


def run() -> None:
    """Run the program `fusefs`, and exit with its status."""
    try:
        from fusefs.cli.main import main

        status = main()
    except KeyboardInterrupt:  # during the imports; later `main` handles it
        status = 130
    # The interpreter's ordinary end would take an eighth of a short command's time.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
