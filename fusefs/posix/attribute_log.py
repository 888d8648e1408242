"""Attributes that the bucket does not have yet, on record: a file that is appended to.

    STAGING/attributes       one line of JSON for each change, the last of a key holds

It lies beside the staged files, and like them it is found by the next daemon,
and by the next mount. A line is one write, so a process that is killed leaves
whole lines; what a power cut has torn is passed over. Once nothing is left to
be sent the file is empty, and it is written anew when it has become large.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusefs.store.base import ObjectInfo

logger = logging.getLogger("fusefs.attributes")

NAME = "attributes"
# A line has about 300 bytes.
COMPACT_FROM = 1 << 20


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an object is to say: `info` is its version, `metadata` all of its user metadata."""

    info: ObjectInfo
    metadata: dict[str, str]

    def line(self) -> bytes:
        info = self.info
        fields = [info.key, info.etag, info.size, info.mtime_ns, self.metadata]
        return json.dumps(fields).encode() + b"\n"


class AttributeLog:
    """The record of one mount. Belongs to the event loop; a write is to the page cache."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._fd = -1
        self._size = 0

    def put(self, one: Recorded) -> None:
        """Put on record what an object is to say.

        Raises:
            OSError: the disk does not take it.
        """
        self._append(one.line())

    def done(self, key: str) -> None:
        """An object is not to be changed any more. What can't be written is sent once more."""
        with contextlib.suppress(OSError):
            self._append(json.dumps([key]).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):
            # Half a line would spoil the next one as well.
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    @property
    def is_large(self) -> bool:
        return self._size > COMPACT_FROM

    def rewrite(self, left: Iterable[Recorded]) -> None:
        """Have nothing on record but this; what the disk does not take leaves it as it was."""
        whole = b"".join(one.line() for one in left)
        unfinished = self._path.with_suffix(".new")
        try:
            if whole:
                unfinished.write_bytes(whole)
                os.rename(unfinished, self._path)
            elif self._fd >= 0:
                os.ftruncate(self._fd, 0)
        except OSError as error:
            logger.warning("%s can't be written anew: %s", self._path, error.strerror)
            return
        if whole:
            self._close()
        self._size = len(whole)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self, *, remove: bool) -> None:
        self._close()
        if remove:
            self._path.unlink(missing_ok=True)


def load(directory: Path) -> list[Recorded]:
    """What is on record in a staging directory. Blocks."""
    try:
        lines = (directory / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: dict[str, Recorded | None] = {}
    for line in lines:
        try:
            key, *rest = json.loads(line)
            if rest:
                etag, size, mtime_ns, metadata = rest
                found[key] = Recorded(ObjectInfo(key, size, etag, mtime_ns), dict(metadata))
            else:
                found[key] = None
        except (ValueError, TypeError):
            logger.warning("%s: a line that can't be read is passed over", directory / NAME)
    return [one for one in found.values() if one is not None]
