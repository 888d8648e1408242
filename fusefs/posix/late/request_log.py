"""The log of changes that are under way: each is recorded before its request is sent.

    DIRECTORY/requests    one slot for each change that is under way
    DIRECTORY/batch-N     the keys of one DeleteObjects request

The server may execute requests of a killed process later (uncertain_keys.py). The log gives the
next process the keys of such requests, and the tokens that their results carry.

The slots are in a file that is mapped shared. Recording a change is a copy into memory, which the
kernel keeps when the process is killed; a crash of the machine ends the requests as well. A slot
holds a CRC, a length and the change: a length of 0 marks a free slot. A slot with a wrong CRC was
being filled at the kill, so its request was never sent. The blocks are allocated before they are
written, so that a full disk is an error and not a SIGBUS. If no slot is free, a change is sent
unrecorded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("fusefs.late")

PUT = "PUT"
COPY = "COPY"
DELETE = "DELETE"

# In bytes. The longest key has 1,024; an ETag has 34, or a few more with the count of parts.
SLOT = 1536
# The initial slots; the file grows if more changes are under way at once.
SLOTS = 64
# CRC of the rest of the slot, and its length in bytes.
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


class Change(NamedTuple):
    """One change of one key. A tuple is created in less time than an object, once per request.

    An object made by the change may carry any of `tokens`; `etag` is the source's ETag if the
    change copies an object with its metadata, else "".
    """

    kind: str
    key: str
    tokens: tuple[str, ...] = ()
    etag: str = ""

    def text(self) -> bytes:
        return "\0".join((self.kind, self.etag, " ".join(self.tokens), self.key)).encode(
            "utf-8", "surrogateescape"
        )

    @staticmethod
    def from_text(text: bytes) -> Change:
        kind, etag, tokens, key = text.decode("utf-8", "surrogateescape").split("\0", 3)
        return Change(kind, key, tuple(tokens.split()), etag)


class RequestLog:
    """The log of one mount's changes that are under way. Belongs to the event loop."""

    def __init__(self, directory: Path) -> None:
        """Open and clear the log; call `unanswered_in` before. OSError if the disk is full."""
        self._directory = directory
        self._fd = os.open(directory / "requests", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Only blocks beyond the first SLOTS are freed, as the disk may be full by now.
            os.ftruncate(self._fd, min(os.fstat(self._fd).st_size, SLOTS * SLOT))
            os.posix_fallocate(self._fd, 0, SLOTS * SLOT)
            self._map = mmap.mmap(self._fd, SLOTS * SLOT)
        except OSError:
            os.close(self._fd)
            raise
        self._map[:] = bytes(SLOTS * SLOT)
        self._count = SLOTS
        self._free = list(range(SLOTS))
        self._batches = 0
        for path in directory.glob("batch-*"):
            path.unlink()

    def begin(self, change: Change) -> int:
        """Record a change before it is sent; return its slot, -1 if no slot can hold it."""
        text = change.text()
        if not self._free:
            self._grow()
        if not self._free or len(text) > SLOT - _HEAD.size:
            return -1
        slot = self._free.pop()
        at = slot * SLOT
        start = at + _HEAD.size
        self._map[start : start + len(text)] = text
        _HEAD.pack_into(self._map, at, zlib.crc32(text), len(text))
        return slot

    def end(self, slot: int) -> None:
        """Free the slot of a change that has been answered, or is recorded elsewhere."""
        if slot >= 0:
            _LENGTH.pack_into(self._map, slot * SLOT + 4, 0)
            self._free.append(slot)

    def begin_batch(self, keys: Iterable[str]) -> Path | None:
        """Record the keys of one DeleteObjects request; return the file, None if the disk fails.

        Blocks for as long as creating a file does.
        """
        self._batches += 1
        path = self._directory / f"batch-{self._batches}"
        try:
            path.write_text(json.dumps(list(keys)))
        except OSError as error:
            logger.info("deletes are not on record while they are sent: %s", error)
            return None
        return path

    def end_batch(self, batch: Path | None) -> None:
        """Remove a batch's file: all its deletes have been answered, or are recorded elsewhere."""
        if batch is not None:
            with contextlib.suppress(OSError):  # a file that stays costs the next process checks
                batch.unlink()

    def _grow(self) -> None:
        count = 2 * self._count
        try:
            os.posix_fallocate(self._fd, 0, count * SLOT)
            self._map.resize(count * SLOT)
        except OSError as error:
            logger.info("changes are not on record while they are sent: %s", error)
            return
        self._free = list(range(self._count, count))
        self._count = count

    def close(self, *, remove: bool) -> None:
        """Close the log; `remove` the file if no change is under way any more."""
        self._map.close()
        os.close(self._fd)
        if remove:
            (self._directory / "requests").unlink(missing_ok=True)


def unanswered_in(directory: Path) -> list[Change]:
    """Read the changes that were under way when the log's process was killed. Blocks."""
    left: list[Change] = []
    try:
        data = (directory / "requests").read_bytes()
    except FileNotFoundError:
        data = b""
    for at in range(0, len(data) - SLOT + 1, SLOT):
        checksum, length = _HEAD.unpack_from(data, at)
        text = data[at + _HEAD.size : at + _HEAD.size + length]
        if length and length <= SLOT - _HEAD.size and zlib.crc32(text) == checksum:
            left.append(Change.from_text(text))
    for path in directory.glob("batch-*"):
        # If the process was killed while it wrote this file, it had not sent the request.
        with contextlib.suppress(ValueError):
            left += [Change(DELETE, key) for key in json.loads(path.read_text())]
    return left
