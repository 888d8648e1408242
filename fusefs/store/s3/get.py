"""Ranged GETs of exactly one version: checked, counted, and resumed where an answer broke off.

The engine compares ETag, range and size, and then writes the range into the sink's file. A slow GET
of a small range may be sent twice (hedging.py). The bytes of a small whole object count as fetched
only after its checksum has been compared.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from fusefs.store import checksum
from fusefs.store.admission.hedging import Hedging
from fusefs.store.checksum import ASKING
from fusefs.store.engine.engine import Completion, Engine, FileSink, Request, Sums, Transfer
from fusefs.store.errors import StoreError, UnreachableError, UnsupportedError
from fusefs.store.fencing import META
from fusefs.store.interface import (
    LARGE,
    NewFile,
    ObjectInfo,
    ObjectVersion,
    Sink,
    Urgency,
    demanded,
)
from fusefs.store.s3.address import Call
from fusefs.store.s3.head import parse_head
from fusefs.store.s3.requester import Requester

logger = logging.getLogger("fusefs.store")

# An attempt that brings fewer bytes counts as no progress, so that retries end.
PROGRESS = 16 << 10
# Seconds for which an object is fetched again if its bytes differ from S3's checksum.
WRONG_BYTES_S = 10.0

# Called with an object's description if the answer to a download shows its metadata.
Described = Callable[[ObjectInfo], None]


class Getter:
    """Downloads from one bucket. Belongs to the event loop."""

    def __init__(self, requester: Requester, described: Described) -> None:
        self._requester = requester
        self._described = described
        self.hedging = Hedging(requester.connections, requester.counted)
        self._has_checksums = True  # False once the store refused to show any

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        sink: Sink,
        *,
        priority: Urgency = demanded,
    ) -> None:
        """Download the bytes [start, stop) of exactly `version` into `sink` (`Source.download`)."""
        part = RangeDownload(version, start, stop, sink, self._requester.counted)
        part.has_checksums = self._has_checksums
        try:
            await self._download(part, priority)
        except StoreError as error:
            # A server that does not know the header `ASKING` answers with such an error.
            is_refused = type(error) in (StoreError, UnsupportedError)
            if not is_refused or not part.is_whole_and_small:
                raise
            part.has_checksums = False
            await self._download(part, priority)
            bucket = self._requester.settings.bucket
            logger.info("%s: the store refuses to show checksums: none is compared", bucket)
            self._has_checksums = False
        if META in "\n".join(part.headers):
            length = {"content-length": str(version.size)}
            with suppress(StoreError):
                self._described(parse_head(version.key, {**part.headers, **length}))

    async def _download(self, part: RangeDownload, priority: Urgency) -> None:
        found = await part.sink.open()
        part.fd, part.new = (found, None) if isinstance(found, int) else (-1, found)
        await self._requester.send(
            part.call,
            part.accept,
            priority=priority,
            progress=part,
            hedge=partial(self._race, part) if part.size <= LARGE else None,
        )

    async def _race(self, part: RangeDownload, engine: Engine, request: Request) -> Completion:
        return part.completed(await self.hedging.race(engine, request))


class RangeDownload:
    """The download of the bytes [start, stop) of a version, over several attempts.

    The bytes before `position` are in the sink's file `fd`, which is -1 if the file does not exist
    yet: then the engine creates it for `new`.
    """

    def __init__(
        self, version: ObjectVersion, start: int, stop: int, sink: Sink, counted: Counter[str]
    ) -> None:
        self.version = version
        self.position = start
        self.stop = stop
        self.sink = sink
        self.fd = -1
        self.new: NewFile | None = None
        self._path: str | None = None  # of the file that this attempt creates
        self._counted = counted
        self._began_at = start
        self._sums: Sums = []
        self.has_checksums = True
        self.headers: Mapping[str, str] = {}  # of the last answer

    @property
    def size(self) -> int:
        """The number of bytes that are still missing."""
        return self.stop - self.position

    @property
    def is_whole_and_small(self) -> bool:
        """True if the missing bytes are a whole small object, for which S3 returns a checksum."""
        is_whole = self.position == 0 and 0 < self.stop == self.version.size
        return self.has_checksums and is_whole and self.stop <= LARGE

    async def call(self) -> Call:
        """Begin an attempt; return the `Call` that fetches the missing bytes, not sent yet."""
        self._began_at = self.position
        etag = self.version.etag
        span = {"range": f"bytes={self.position}-{self.stop - 1}"}
        headers = {**(ASKING if self.is_whole_and_small else span), "if-match": etag}
        start, size = self.position, self.version.size
        self._path = None if self.new is None else self.new.new_path()
        sink = FileSink(self.fd, start, start, self.size, etag, size, True, self._path)
        return Call("GET", "GET", self.version.key, headers=headers, sink=sink)

    def accept(self, answer: Completion) -> None:
        """Compare a small whole object's checksum; the bytes count as fetched if they match.

        Raises:
            StoreError: the bytes have another checksum.
        """
        self.headers = answer.headers
        if not self.is_whole_and_small:
            return
        # The file is in the page cache.
        content = partial(os.pread, self.fd, self.stop, 0)
        name = checksum.mismatch(answer.headers, content, self._sums[0][2])
        if name is not None:
            sentence = f"what arrived has another {name} than the object"
            raise UnreachableError(sentence, is_retryable=True, longest_s=WRONG_BYTES_S)
        self._take(self.stop, self._sums)

    # --- progress of the attempts ---------------------------------------------------

    def has_progressed(self) -> bool:
        """True if the last attempt brought PROGRESS bytes, which justifies another attempt."""
        return self.position - self._began_at >= PROGRESS

    def completed(self, transfer: Transfer) -> Completion:
        """Take over the file and progress of a finished transfer; return the completion."""
        completion = transfer.completion
        assert completion is not None
        if self.new is not None and self._path is not None and (fd := transfer.take_file()) >= 0:
            self.fd, self.new = self.new.created(self._path, fd), None
        if completion.status < 300:
            self.arrived(completion.received, transfer.sums)
        return completion

    def arrived(self, received: int, sums: Sums) -> None:
        """Record that the first `received` bytes of this attempt are in the file, and `sums`."""
        if self.is_whole_and_small:
            self._sums = sums  # `accept` takes these bytes, or they are fetched again
        elif self.fd >= 0:
            self._take(self._began_at + received, sums)

    def _take(self, position: int, sums: Sums) -> None:
        self._counted["bytes_fetched"] += position - self.position
        self.position = position
        self.sink.arrived(position, sums)
