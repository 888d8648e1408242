"""The memory for bytes that are read past the cache, with one limit for all readers.

If the cache has no room, each read is downloaded into memory, together with some
more bytes for the reader's next reads. A download waits until its bytes fit into
the limit. Bytes kept for next reads are dropped first, the least recent reader's
first. The more readers there are, the fewer bytes are read ahead for each, so that
no reader's download drops bytes that another reader is about to read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from fusefs.telemetry.stalls import WaitCause, stage

# The most bytes that are downloaded for one reader at a time.
AHEAD = 2 << 20


class UnkeptBuffers:
    """One mount's buffers for reads past the cache, `limit` bytes at most. For the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._under_way = 0
        self._kept_bytes = 0
        # The bytes kept for each reader (an open handle that has read past the cache), with their
        # offset in the file; the least recent reader first.
        self._kept: OrderedDict[object, tuple[int, bytearray]] = OrderedDict()
        self._changed = trio.Event()

    @property
    def used(self) -> int:
        """The number of bytes that are being downloaded or kept for next reads."""
        return self._under_way + self._kept_bytes

    def of(self, reader: object) -> tuple[int, bytearray]:
        """Return (offset in the file, bytes) of what is kept for a reader; (0, b"") if nothing."""
        return self._kept.get(reader, (0, bytearray()))

    def ahead(self, reader: object) -> int:
        """The size to which a smaller read of `reader` is extended, for the reader's next reads."""
        readers = len(self._kept) + (reader not in self._kept)
        return min(AHEAD, self.limit // readers)

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes fit, or none are in use; reserve them for the `with` block."""
        while self.used + size > self.limit and self.used:
            if self._kept_bytes:
                self._empty(next(reader for reader, (_, data) in self._kept.items() if data))
            else:
                with stage(WaitCause.CACHE_FULL):
                    await self._changed.wait()
        self._under_way += size
        try:
            yield
        finally:
            self._under_way -= size
            self._changed.set()
            self._changed = trio.Event()

    def keep(self, reader: object, start: int, data: bytearray) -> None:
        """Keep downloaded bytes for a reader's next reads, if they fit into the limit."""
        self.drop(reader)
        self._kept[reader] = 0, bytearray()
        if self.used + len(data) <= self.limit:
            self._kept[reader] = start, data
            self._kept_bytes += len(data)

    def drop(self, reader: object) -> None:
        """Drop the bytes kept for a reader, which has ended or reads elsewhere."""
        self._kept_bytes -= len(self._kept.pop(reader, (0, b""))[1])

    def _empty(self, reader: object) -> None:
        self._kept_bytes -= len(self._kept[reader][1])
        self._kept[reader] = 0, bytearray()
