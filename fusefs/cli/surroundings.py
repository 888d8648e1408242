"""What a command is run in: streams that may be closed, and signals that end it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def prepare_streams() -> None:
    """Have the standard streams take whatever a command says, such as names that are no UTF-8.

    Closed ones are opened to nowhere: else the next file that is opened would stand there.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


@contextlib.contextmanager
def ended_like_by_ctrl_c() -> Iterator[None]:
    """Leave nothing behind also where a time limit or a closed terminal ends the command."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
