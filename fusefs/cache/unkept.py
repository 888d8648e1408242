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
from typing import Protocol

import trio

from fusefs.telemetry.stalls import WaitCause, stage

# The most bytes that are downloaded for one reader at a time.
AHEAD = 2 << 20


class UnkeptReader(Protocol):
    """A reader; `unkept` has bytes read past the cache for it, with their offset in the file."""

    unkept: tuple[int, bytearray]


class UnkeptBuffers:
    """One mount's buffers for reads past the cache, `limit` bytes at most. For the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._under_way = 0
        self._kept = 0
        # All open readers that have read past the cache, the least recent first.
        self._readers: OrderedDict[int, UnkeptReader] = OrderedDict()
        self._changed = trio.Event()

    @property
    def used(self) -> int:
        """The number of bytes that are being downloaded or kept for next reads."""
        return self._under_way + self._kept

    def ahead(self, reader: UnkeptReader) -> int:
        """The number of bytes to download at least for a read of `reader`."""
        readers = len(self._readers) + (id(reader) not in self._readers)
        return min(AHEAD, self.limit // readers)

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes in the block after waiting for room; above the limit only alone."""
        while self.used + size > self.limit and self.used:
            if self._kept:
                self._drop_oldest()
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

    def keep(self, reader: UnkeptReader, start: int, data: bytearray) -> None:
        """Keep downloaded bytes for a reader's next reads, if they fit into the limit."""
        self.drop(reader)
        self._readers[id(reader)] = reader
        if self.used + len(data) <= self.limit:
            reader.unkept = start, data
            self._kept += len(data)

    def drop(self, reader: UnkeptReader) -> None:
        """Drop the bytes kept for a reader, which has ended or reads elsewhere."""
        if self._readers.pop(id(reader), None) is not None:
            self._empty(reader)

    def _drop_oldest(self) -> None:
        for reader in self._readers.values():
            if reader.unkept[1]:
                self._empty(reader)
                return

    def _empty(self, reader: UnkeptReader) -> None:
        self._kept -= len(reader.unkept[1])
        reader.unkept = 0, bytearray()
