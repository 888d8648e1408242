"""The memory for bytes that are read past the cache, however many readers there are.

Where the cache has no room, each read is downloaded into memory, with some more
bytes for the reader's next reads. All such buffers together have one limit. A
download waits until its bytes fit; what was kept for next reads makes room
first, the least recently read before. The more readers there are, the less is
read ahead for each, so that none drops what another is about to read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from fusefs.telemetry.stalls import WaitCause, stage

# The most that is read for one reader at a time: what it may keep for its next reads.
AHEAD = 2 << 20


class UnkeptReader(Protocol):
    """A reader with what it last read past the cache: an offset in the file, and the bytes."""

    unkept: tuple[int, bytearray]


class UnkeptBuffers:
    """The buffers of one mount, of at most `limit` bytes. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._under_way = 0
        self._kept = 0
        # All that have read past the cache and are open, the least recent first.
        self._readers: OrderedDict[int, UnkeptReader] = OrderedDict()
        self._changed = trio.Event()

    @property
    def used(self) -> int:
        """Bytes that are downloaded or kept."""
        return self._under_way + self._kept

    def ahead(self, reader: UnkeptReader) -> int:
        """The least number of bytes to download for a read of `reader`."""
        readers = len(self._readers) + (id(reader) not in self._readers)
        return min(AHEAD, self.limit // readers)

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Wait for room for `size` bytes; a download above the limit runs alone."""
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
        """Keep what was downloaded for a reader's next reads, as long as there is room."""
        self.drop(reader)
        self._readers[id(reader)] = reader
        if self.used + len(data) <= self.limit:
            reader.unkept = start, data
            self._kept += len(data)

    def drop(self, reader: UnkeptReader) -> None:
        """Drop what was kept for a reader, which has ended or reads elsewhere."""
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
