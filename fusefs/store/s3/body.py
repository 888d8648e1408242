"""A slice of a local file on its way into a request.

boto3 takes a file-like object and sends what `read` gives. Ours has one
buffer of a mebibyte, however large the part is, so that uploads fit into the
memory that the connection budget allows for. The checksum goes ahead of the
bytes, in a header, so the slice is read twice, the second time from the page
cache. Should the file change in between, S3 refuses the part.

Every S3 compares Content-MD5, but an MD5 takes almost four times as long as a
CRC32 (1.6 ms of a MiB). So it is sent where the store is not known to compare
CRC32s (Ceph's gateway passes over them).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable
from typing import NamedTuple

from fusefs.store.checksum import crc32
from fusefs.store.errors import AttemptError, Failure, StoreError
from fusefs.store.http.threads import Attempt

PIECE = 1 << 20


class Sums(NamedTuple):
    """What S3 compares a body with: its CRC32, and its MD5 (in base64) if that is sent."""

    crc: int
    md5: str | None

    @property
    def crc32(self) -> str:
        """The CRC32 in base64."""
        return encoded(self.crc.to_bytes(4, "big"))

    def headers(self) -> dict[str, str]:
        """The headers, with names in lower case."""
        md5 = {} if self.md5 is None else {"content-md5": self.md5}
        return {"x-amz-checksum-crc32": self.crc32, **md5}

    def parameters(self) -> dict[str, str]:
        """boto3's parameters."""
        md5 = {} if self.md5 is None else {"ContentMD5": self.md5}
        return {"ChecksumCRC32": self.crc32, **md5}


def sums_of(pieces: Iterable[bytes | bytearray | memoryview], *, with_md5: bool) -> Sums:
    """The checksums of bytes that come in pieces."""
    crc = 0
    md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
    for piece in pieces:
        crc = crc32(piece, crc)
        if md5 is not None:
            md5.update(piece)
    encoded_md5 = encoded(md5.digest()) if md5 is not None else None
    return Sums(crc, encoded_md5)


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
        return self.sums(with_md5=False).crc32

    def sums(self, *, with_md5: bool) -> Sums:
        """What goes with the bytes. Blocks."""
        self.seek(0)
        sums = sums_of(iter(self.read, b""), with_md5=with_md5)
        self.seek(0)
        return sums

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

        Whatever `_size` is, it has up to `PIECE` bytes: urllib3 asks for
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
    """S3's CRC32 of an object of parts with these CRC32s."""
    crc = crc32(b"".join(base64.b64decode(checksum) for checksum in checksums))
    return f"{encoded(crc.to_bytes(4, 'big'))}-{len(checksums)}"
