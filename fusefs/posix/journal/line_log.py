"""A log of the changes of keys that are still to be sent to S3: lines appended to a file.

Each line is JSON, and the last line of a key counts. A line is one write, so a process
that is killed leaves whole lines; a line torn by a power cut is skipped. When no change
is left the file is emptied, and it is rewritten when it has become large.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusefs.linux import files

logger = logging.getLogger("fusefs.log")

# A line has some 100 to 300 bytes.
COMPACT_FROM = 1 << 20


class LineLog:
    """The changes still to be sent, in a file. For the event loop; writes go to the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._compact_from = COMPACT_FROM
        # True if the last line lacks its newline, so that the next one would join it.
        self._is_torn = False

    def append(self, lines: bytes) -> None:
        """Add some lines, all of them or none; OSError if the disk does not take them."""
        if self._fd < 0:
            self._open()
        whole = b"\n" + lines if self._is_torn else lines
        if os.write(self._fd, whole) < len(whole):
            # Half a line would spoil the next one as well. The next append opens the log anew.
            self._close()
            os.truncate(self._path, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(whole)
        self._is_torn = False

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        # A power cut may have torn the last line.
        last = os.pread(self._fd, 1, self._size - 1) if self._size else b"\n"
        self._is_torn = last != b"\n"

    def done(self, keys: Iterable[str]) -> None:
        """Log that some keys have no change left to send; ignore errors, as resending is safe."""
        with contextlib.suppress(OSError):
            self.append(b"".join(line([key]) for key in keys))

    @property
    def is_large(self) -> bool:
        return self._size > self._compact_from

    def write_anew(self, lines: Iterable[bytes]) -> bool:
        """Replace the whole log by these lines; False if the disk fails: the old log stays."""
        whole = b"".join(lines)
        try:
            if whole:
                files.replace(self._path, whole)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(self._path, 0)  # also the lines of an earlier process
        except OSError as error:
            logger.warning("%s can't be written anew: %s", self._path, error.strerror)
            return False
        if whole:
            self._close()
        self._size = len(whole)
        # A log that is long because many changes wait is not rewritten for each line.
        self._compact_from = max(COMPACT_FROM, 2 * len(whole))
        self._is_torn = False
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self, *, remove: bool) -> None:
        """Stop writing; `remove` the file if no change is left to send."""
        self._close()
        if remove:
            self._path.unlink(missing_ok=True)


def line(fields: list[Any]) -> bytes:
    """Encode a line: [key, *fields], or only [key] if the key has no change left to send."""
    return json.dumps(fields).encode() + b"\n"


def load_lines(path: Path) -> dict[str, list[Any]]:
    """Read a log; return by key the fields of the key's last line, if it has fields. Blocks."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    by_key: dict[str, list[Any]] = {}
    for text in lines:
        try:
            key, *rest = json.loads(text)
            if rest:
                by_key[str(key)] = rest
            else:
                by_key.pop(key, None)
        except (ValueError, TypeError):
            logger.warning("%s: a line that can't be read is passed over", path)
    return by_key
