"""The daemon's log: lines on standard error, of a bounded size if it is a file.

Keeper, broker and daemons, one after the other, append to one file whose
directory may be root's: they have its descriptor and no more, so none can
rename it without the others writing on to the renamed file. Instead the oldest
part is cut out of the file, in one step of the file system, while all go on
appending: only the oldest lines are lost.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from typing import TextIO

from fusefs.linux import libc, log_line
from fusefs.settings.display import shown
from fusefs.settings.mount import MountSettings

# A full log is cut by this many bytes, and has at most twice as many.
PART = 10 << 20
# How many lines may be written before the size is checked.
LOOK_EVERY = 256


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes to the descriptor of a file, and keeps the file below twice `part` bytes."""

    def __init__(self, fd: int, part: int = PART) -> None:
        stream = os.fdopen(fd, "w", closefd=False, encoding="utf-8", errors="backslashreplace")
        super().__init__(stream)
        self._fd = fd
        self._part = part
        self._lines = 0
        # Where the data begins in a file that can't be made shorter.
        self._start = 0

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._lines += 1
        if self._lines % LOOK_EVERY == 0:
            self._cut()

    def _cut(self) -> None:
        try:
            size = os.fstat(self._fd).st_size
            if size - self._start < 2 * self._part:
                return
            try:
                libc.allocate(self._fd, libc.COLLAPSE_RANGE, 0, self._part)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                # This file system can only free the blocks.
                self._start = size - self._part
                libc.allocate(self._fd, libc.PUNCH_HOLE | libc.KEEP_SIZE, 0, self._start)
        except OSError:
            self.handleError(logging.makeLogRecord({}))


class OneLineFormatter(logging.Formatter):
    """Keeps each message on one line: the key of an object may have ends of lines, and more."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        message = shown(record.getMessage())
        return log_line.line(record.levelname, record.name, message, record.created, trace)


def set_up(settings: MountSettings) -> None:
    """Log to standard error, which is kept small where it is a file that fusefs has opened."""
    is_ours = settings.log_file is not None or not settings.foreground
    is_file = stat.S_ISREG(os.fstat(2).st_mode)
    handler = BoundedHandler(2) if is_ours and is_file else logging.StreamHandler()
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("fusefs").setLevel(settings.log_level.upper())
    root.setLevel(logging.WARNING)
