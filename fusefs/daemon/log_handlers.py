"""The daemon's log: lines on standard error; a log file has a bounded size.

Keeper, broker and all daemons of a mount append to one file, of which they have only
the descriptor, since its directory may be root's. So the file can't be rotated: after
a rename the processes would continue to write to the renamed file. Instead one call
of fallocate(2) cuts the oldest lines out of the file, while all processes append.
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

# The number of bytes that are cut from a full log; a full log has twice as many.
PART = 10 << 20
# The number of lines between two checks of the size.
LOOK_EVERY = 256


class BoundedHandler(logging.StreamHandler[TextIO]):
    """A handler that writes to a file's descriptor and keeps the file below 2 * `part` bytes."""

    def __init__(self, fd: int, part: int = PART) -> None:
        stream = os.fdopen(fd, "w", closefd=False, encoding="utf-8", errors="backslashreplace")
        super().__init__(stream)
        self._fd = fd
        self._part = part
        self._lines = 0
        # The offset of the first data, behind the freed blocks of a file that can't be shortened.
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
                # This file system cannot cut the part out, but can free its blocks.
                self._start = size - self._part
                libc.allocate(self._fd, libc.PUNCH_HOLE | libc.KEEP_SIZE, 0, self._start)
        except OSError:
            self.handleError(logging.makeLogRecord({}))


class OneLineFormatter(logging.Formatter):
    """A formatter that escapes newlines and other control characters, which keys may contain."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        message = shown(record.getMessage())
        return log_line.line(record.levelname, record.name, message, record.created, trace)


def set_up(settings: MountSettings) -> None:
    """Log to standard error; bound the size if standard error is a file that fusefs opened."""
    is_ours = settings.log_file is not None or not settings.foreground
    is_file = stat.S_ISREG(os.fstat(2).st_mode)
    handler = BoundedHandler(2) if is_ours and is_file else logging.StreamHandler()
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("fusefs").setLevel(settings.log_level.upper())
    root.setLevel(logging.WARNING)
