"""A slice of a local file on its way into a request.

boto3 takes a file-like object and sends what `read` gives. Ours has one
buffer of a mebibyte, however large the part is, so that uploads fit into the
memory that the connection budget allows for. The checksum goes ahead of the
bytes, in a header, so the slice is read twice, the second time from the page
cache. Should the file change in between, S3 refuses the part.
"""

from __future__ import annotations

import base64
import os
import zlib

from fusefs.store.errors import Failure, StoreError
from fusefs.store.stream import Attempt, AttemptError

PIECE = 1 << 20


class Body:
    """The bytes [start, stop) of an open file; a `Transfer`, and file-like for boto3."""

    def __init__(self, fd: int, start: int, stop: int) -> None:
        self._fd = fd
        self._start = start
        self._stop = stop
        self._position = start
        self._buffer = memoryview(b"")
        self._attempt: Attempt | None = None

    def begin(self) -> Attempt:
        self._attempt = Attempt()
        self._position = self._start
        return self._attempt

    def has_progressed(self) -> bool:
        return False  # each attempt sends all of it

    def checksum(self) -> str:
        """The CRC32 of the bytes in base64, as S3 writes it. Blocks."""
        crc = 0
        self.seek(0)
        while piece := self.read():
            crc = zlib.crc32(piece, crc)
        self.seek(0)
        return encoded(crc.to_bytes(4, "big"))

    def whole(self) -> bytes:
        """All the bytes, which must be few. Blocks."""
        assert self._attempt is not None
        data = self._attempt.locally(lambda: os.pread(self._fd, len(self), self._start))
        if len(data) < len(self):
            raise _too_short()
        return data

    # --- what boto3 calls ---

    def __len__(self) -> int:
        return self._stop - self._start

    def seek(self, offset: int) -> None:
        self._position = self._start + offset

    def tell(self) -> int:
        return self._position - self._start

    def read(self, _size: int = -1) -> memoryview:
        """The next piece, valid until the one after; empty at the end.

        Whatever is asked for, it has up to `PIECE` bytes: urllib3 asks for
        16 KiB at a time.

        Raises:
            AttemptError: the file is too short.
            OSError: it can't be read.
        """
        assert self._attempt is not None
        length = min(PIECE, self._stop - self._position)
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        count = self._attempt.locally(lambda: self._fill(length)) if length else 0
        self._position += count
        return self._buffer[:count]

    def _fill(self, length: int) -> int:
        count = os.preadv(self._fd, [self._buffer[:length]], self._position)
        if count == 0:
            raise _too_short()
        return count


def _too_short() -> AttemptError:
    return AttemptError(Failure(StoreError, "the file became shorter while it was sent"))


def encoded(checksum: bytes) -> str:
    """A checksum as S3 writes it."""
    return base64.b64encode(checksum).decode()


def composed(checksums: list[str]) -> str:
    """The CRC32 that S3 tells for an object of parts with these CRC32s."""
    crc = zlib.crc32(b"".join(base64.b64decode(checksum) for checksum in checksums))
    return f"{encoded(crc.to_bytes(4, 'big'))}-{len(checksums)}"
