"""A log of what is still to be sent of some keys: a file of lines that is appended to.

Each line is JSON, and the last of a key holds. A line is one write, so a process
that is killed leaves whole lines; what a power cut has torn is passed over. Once
nothing is left the file is empty, and it is written anew when it has become large.
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
    """One log. Belongs to the event loop; a write is to the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self._compact_from = COMPACT_FROM
        # Whether the last line has no end, and would swallow the next one.
        self._is_torn = False

    def append(self, lines: bytes) -> None:
        """Add some lines, all of them or none; OSError if the disk does not take them."""
        if self._fd < 0:
            self._open()
        whole = b"\n" + lines if self._is_torn else lines
        if os.write(self._fd, whole) < len(whole):
            # Half a line would spoil the next one as well, which opens the log anew.
            self._close()
            os.truncate(self._path, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(whole)
        self._is_torn = False

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        # A power cut may have torn what an earlier process has written last.
        last = os.pread(self._fd, 1, self._size - 1) if self._size else b"\n"
        self._is_torn = last != b"\n"

    def done(self, keys: Iterable[str]) -> None:
        """Nothing is left to be sent of some keys. What can't be written is sent once more."""
        with contextlib.suppress(OSError):
            self.append(b"".join(line([key]) for key in keys))

    @property
    def is_large(self) -> bool:
        return self._size > self._compact_from

    def write_anew(self, lines: Iterable[bytes]) -> bool:
        """Have nothing on record but this; False if the disk does not take it: it is as it was."""
        whole = b"".join(lines)
        try:
            if whole:
                files.replace(self._path, whole)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(self._path, 0)  # also what an earlier process has written
        except OSError as error:
            logger.warning("%s can't be written anew: %s", self._path, error.strerror)
            return False
        if whole:
            self._close()
        self._size = len(whole)
        # What is long because much is left is not written anew for each line.
        self._compact_from = max(COMPACT_FROM, 2 * len(whole))
        self._is_torn = False
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self, *, remove: bool) -> None:
        """Stop writing, and `remove` the log if nothing on it is of use any more."""
        self._close()
        if remove:
            self._path.unlink(missing_ok=True)


def line(fields: list[Any]) -> bytes:
    """A line of the log: a key and its fields; a key without fields is off the record."""
    return json.dumps(fields).encode() + b"\n"


def load_lines(path: Path) -> dict[str, list[Any]]:
    """The last fields of each key that is on record. Blocks."""
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
