"""The checksums that are sent with the bodies of requests.

The checksum is in a signed header, so the file is read twice, the second time by the engine. If the
file changes in between, S3 refuses the part.

Every S3 server compares Content-MD5, but an MD5 takes almost four times as long as a CRC32 (1.6 ms
per MiB). So an MD5 is sent only if the store may not compare CRC32s, as Ceph's gateway does not.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import trio

from fusefs.store.checksum import crc32
from fusefs.store.engine.engine import FileBody
from fusefs.store.errors import StoreError

PIECE = 1 << 20
_summing = trio.CapacityLimiter(16)  # the threads of the default one write what programs read


class Sums(NamedTuple):
    """Checksums of a body: its CRC32, and its MD5 (in base64), which is None if it is not sent."""

    crc: int
    md5: str | None

    @property
    def crc32(self) -> str:
        """The CRC32 of the body, in base64 as in S3's headers."""
        return encoded(self.crc.to_bytes(4, "big"))

    def headers(self) -> dict[str, str]:
        """Return the checksums' headers, with names in lower case."""
        md5 = {} if self.md5 is None else {"content-md5": self.md5}
        return {"x-amz-checksum-crc32": self.crc32, **md5}


def sums_of(pieces: Iterable[bytes | bytearray | memoryview], *, with_md5: bool) -> Sums:
    """Compute the checksums of bytes that come in pieces."""
    crc = 0
    md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
    for piece in pieces:
        crc = crc32(piece, crc)
        if md5 is not None:
            md5.update(piece)
    encoded_md5 = encoded(md5.digest()) if md5 is not None else None
    return Sums(crc, encoded_md5)


async def sums_of_body(body: bytearray | FileBody, *, with_md5: bool) -> Sums:
    """Compute a body's checksums, of a file in a thread, whose end a cancelled call waits for.

    Raises:
        StoreError: the file is too short.
        OSError: the file can't be read.
    """
    if isinstance(body, bytearray):
        return sums_of((body,), with_md5=with_md5)
    return await trio.to_thread.run_sync(
        lambda: sums_of(_pieces(body), with_md5=with_md5), limiter=_summing
    )


def _pieces(body: FileBody) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE, body.length)))
    at, stop = body.offset, body.offset + body.length
    while at < stop:
        trio.from_thread.check_cancelled()
        count = os.preadv(body.fd, [buffer[: stop - at]], at)
        if not count:
            raise StoreError("the file became shorter while it was sent")
        at += count
        yield buffer[:count]


def encoded(checksum: bytes) -> str:
    """Encode a checksum in base64, as S3 writes it."""
    return base64.b64encode(checksum).decode()
