"""The command `fusefs`, as it is installed: begins with what takes longest, then see cli/main.py.

Little is imported before a mount's keeper is started.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from typing import NoReturn


def main(
    arguments: Sequence[str] | None = None, serve: Callable[[], NoReturn] | None = None
) -> int:
    """Run one command and return its exit status.

    With `serve`, which is a daemon's life, this process has done nothing yet that a daemon's
    would not have done, and may be forked for one.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] != ["mount"] or not _may_start_early(arguments):
        from fusefs.cli import main as command

        return command.main(arguments)
    from fusefs.launch import early_keeper

    with early_keeper.started(serve) as keeper:
        from fusefs.cli import main as command

        return command.main(arguments, keeper)


def run() -> None:
    """Be the program `fusefs`, and end it."""
    try:
        status = main(serve=_serve)
    except KeyboardInterrupt:  # while modules were imported; else the command has a line for it
        status = 130
    # Nothing else is left, and to take the interpreter apart is an eighth of a short command.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _serve() -> NoReturn:
    from fusefs.daemon.__main__ import start

    sys.exit(start())


def _may_start_early(arguments: Sequence[str]) -> bool:
    """Whether a mount with a keeper is wanted, and no socket will have a standard stream's number.

    Not all that has none is seen here: an early keeper that is not needed is dismissed.
    """
    has_streams = None not in (sys.stdin, sys.stdout, sys.stderr)
    return has_streams and not {"-h", "--help", "pyfuse3", "--session=pyfuse3"} & {*arguments}


if __name__ == "__main__":
    run()
