"""Ranged GETs of exactly one version: checked, counted, resumed where a stream broke.

A small range is read in the event loop, by a GET that may be sent a second time where its
answer is slow to begin (hedging.py); what that can't do, in a thread.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from fusefs.store import object_checksum
from fusefs.store.admission.hedging import Hedging
from fusefs.store.errors import (
    AttemptError,
    Failure,
    StaleVersionError,
    StoreError,
    UnreachableError,
    UnsupportedError,
)
from fusefs.store.http.answers import LONGEST_SIZE, Answer
from fusefs.store.http.threads import Attempt
from fusefs.store.interface import ChunkWriter, ObjectInfo, ObjectVersion, Urgency, demanded
from fusefs.store.object_checksum import ASKING
from fusefs.store.s3.head import META, head, parse_head
from fusefs.store.s3.list_parser import quoted
from fusefs.store.s3.requester import Requester, RetryBudget
from fusefs.telemetry.s3_requests import first_byte, handling_answer, note_sent

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

logger = logging.getLogger("fusefs.store")

# What obstore's paths can't hold: control characters, and segments that are empty or dots.
_ODD = re.compile("[\x00-\x1f\x7f]|(?:^|/)\\.{0,2}(?:/|$)")
# What obstore says of an answer that is not the range which it wanted.
_WITHOUT_RANGE = "non-partial response"

# The unit in which bytes are handed on: large enough that a chunk's share of
# Python's work does not count, small enough that a reader need not wait long.
CHUNK = 1 << 20
# What the event loop has the time to receive and to write to the local disk.
SMALL = 256 << 10
# An attempt that brings less has brought nothing: others that are alike would go on for ever.
PROGRESS = 16 << 10
# How long a library may have no chunk, which it waits for as long as a byte comes now and then.
STALLED_S = 300.0
# For how long an object is fetched again that arrives with other bytes than S3 has.
WRONG_BYTES_S = 10.0

_STALLED = Failure(UnreachableError, "the answer hardly gets on", is_retryable=True)


class Getter:
    """Downloads from one bucket. Belongs to the event loop."""

    def __init__(self, requester: Requester) -> None:
        self._requester = requester
        self.hedging = Hedging(requester.connections, requester.counted)
        # Called with an object that has metadata, where the answer to a download has shown that.
        self.described: Callable[[ObjectInfo], None] = lambda _info: None
        self._has_if_match = True  # whether this server's If-Match can be relied on
        self._has_checksums = True  # whether requests may want the checksums of objects

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        priority: Urgency,
        *,
        in_loop: bool,
    ) -> None:
        """As `Store.download`."""
        requester = self._requester
        part = RangeDownload(version, start, stop, write, requester.counted)
        part.has_checksums = self._has_checksums
        while True:
            part.has_if_match = self._has_if_match
            try:
                await self._download(part, priority, in_loop=in_loop)
                self._describe(part)
                break
            except StaleVersionError:
                if not part.has_if_match:
                    raise
                info, _ = await head(requester, version.key, demanded)
                if info.version != version:
                    raise
                # This server's If-Match refuses the very ETag that the server gives.
                bucket = requester.settings.bucket
                logger.info("%s: If-Match is not to be relied on here", bucket)
                self._has_if_match = False
            except StoreError as error:
                # What a server says that does not know the header.
                is_refused = type(error) in (StoreError, UnsupportedError)
                if not is_refused or not part.is_whole_and_small:
                    raise
                part.has_checksums = False
        if self._has_checksums and not part.has_checksums:
            bucket = requester.settings.bucket
            logger.info("%s: the store refuses to show checksums: none is compared", bucket)
            self._has_checksums = False

    async def _download(self, part: RangeDownload, priority: Urgency, *, in_loop: bool) -> None:
        if in_loop and part.size <= SMALL and await self._read(part, priority):
            return
        send = partial(self._stream, part, priority)
        await self._requester.retried("GET", part.version.key, send, progress=part)

    async def _read(self, part: RangeDownload, priority: Urgency) -> bool:
        """Read what is missing in the event loop; False if a thread is to go on."""
        requester, key = self._requester, part.version.key
        answer = await requester.send_now(
            "GET",
            key,
            headers=part.request_headers(),
            size=part.size,
            priority=priority,
            hedge=self.hedging,
        )
        if answer is None:
            return False
        try:
            part.take(answer)
        except AttemptError as error:
            if not error.failure.is_retryable:
                raise requester.failed("GET", key, error.failure) from error
            return False
        return True

    def _describe(self, part: RangeDownload) -> None:
        """Hand on what the answer to a download has said of its object."""
        if any(name.startswith(META) for name in part.headers):
            length = {"content-length": str(part.version.size)}
            with suppress(AttemptError):
                self.described(parse_head(part.version.key, {**part.headers, **length}))

    async def _stream(self, part: RangeDownload, priority: Urgency, budget: RetryBudget) -> None:
        """One attempt in a thread.

        Raises:
            AttemptError: the stream broke, hardly gets on, or is not what was requested.
        """
        requester, key = self._requester, part.version.key
        if not part.size:  # what was given up brought the last bytes in that moment
            return
        async with requester.connected("GET", priority, key, budget) as clients:
            part.begin()
            stream = GetStream(part)
            failure: Exception | None = AttemptError(_STALLED)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(part.watch, nursery.cancel_scope)
                try:
                    await requester.in_thread("GET", stream.attempt, partial(stream.run, clients))
                    failure = None
                except Exception as error:  # raised below, as the nursery would wrap it
                    failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure


class RangeDownload:
    """The download of the bytes [start, stop) of a version into `write`, over several attempts."""

    def __init__(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        counted: Counter[str],
    ) -> None:
        self.version = version
        self.position = start
        self._stop = stop
        self._write = write
        self._counted = counted
        self._began_at = start
        self.has_if_match = True
        self.has_checksums = True
        self.headers: Mapping[str, str] = {}  # of the last answer

    def begin(self) -> None:
        """Begin an attempt."""
        self._began_at = self.position

    def has_progressed(self) -> bool:
        """Whether the last attempt brought what is worth another one."""
        return self.position - self._began_at >= PROGRESS

    @property
    def size(self) -> int:
        """How many bytes have not come yet."""
        return self._stop - self.position

    @property
    def stop(self) -> int:
        return self._stop

    def request_headers(self) -> dict[str, str]:
        """The headers of a request for what is missing."""
        headers = dict(ASKING) if self.is_whole_and_small else {"range": self.range}
        if self.has_if_match:
            headers["if-match"] = self.version.etag
        return headers

    @property
    def is_whole_and_small(self) -> bool:
        """Whether a whole object is missing, and will be in memory before any of it is written.

        Then the checksum that S3 has of it is compared. S3 shows none of a range, and what is
        written in pieces is read before its end is there.
        """
        is_whole = self.position == 0 and 0 < self._stop == self.version.size
        return self.has_checksums and is_whole and self._stop <= SMALL

    @property
    def range(self) -> str:
        """What is missing, as the header `Range` says it."""
        return f"bytes={self.position}-{self._stop - 1}"

    def take(self, answer: Answer) -> None:
        """Take in the answer to `request_headers`, in the event loop.

        Raises:
            AttemptError: it is not what was requested, or not all of it.
        """
        # Of what came in chunks only the bytes themselves tell how many they are.
        self.check({**answer.headers, "content-length": str(len(answer.content))})
        self.verify(answer.headers, answer.content)
        self.add(memoryview(answer.content)[: self.size])
        self.check_end()

    def check(self, headers: Mapping[str, str]) -> None:
        """See whether an answer's headers are those of an answer to `request_headers`.

        Raises:
            AttemptError: they are not.
        """
        self.headers = headers
        shown, length = headers.get("content-range"), headers.get("content-length", "")
        self.compare(headers.get("etag"), _first_byte(shown), _size_of(shown, length))

    def compare(self, etag: str | None, start: int, size: int | None) -> None:
        """As `check`: some servers ignore If-Match, and some ignore ranges.

        `size` is the whole object's as the answer has it, None where it does not tell. What is
        stored compressed may be sent unpacked, with the ETag of what is stored: Google's does.
        """
        if etag is None or quoted(etag) != self.version.etag:
            sentence = "the object has been replaced"
            raise AttemptError(Failure(StaleVersionError, sentence))
        if start != self.position:
            raise AttemptError(Failure(StoreError, "S3 sent another range than the requested one"))
        if size is not None and size != self.version.size:
            sentence = "what S3 sends is not the object as it is stored (is that compressed?)"
            raise AttemptError(Failure(StoreError, sentence))

    def verify(self, headers: Mapping[str, str], content: bytes | bytearray) -> None:
        """Compare the checksums in an answer that is all of a small object.

        Raises:
            AttemptError: the bytes have another one.
        """
        if not self.is_whole_and_small or len(content) != self.size:
            return
        name = object_checksum.mismatch(headers, content)
        if name is not None:
            sentence = f"what arrived has another {name} than the object"
            failure = Failure(
                UnreachableError, sentence, is_retryable=True, longest_s=WRONG_BYTES_S
            )
            raise AttemptError(failure)

    def check_end(self) -> None:
        """See whether nothing is missing any more.

        Raises:
            AttemptError: something is.
        """
        if self.position < self._stop:
            raise AttemptError(
                Failure(UnreachableError, "the answer was too short", is_retryable=True)
            )

    def add(self, chunk: memoryview) -> None:
        """Have the next bytes written."""
        self._write(self.position, chunk)
        self.position += len(chunk)
        self._counted["bytes_fetched"] += len(chunk)

    async def watch(self, attempt: trio.CancelScope) -> None:
        """Give an attempt up that brings nothing more."""
        before = -1
        while before < self.position:
            before = self.position
            await trio.sleep(STALLED_S)
        attempt.cancel()


class GetStream:
    """One request for what is missing, in a thread."""

    def __init__(self, part: RangeDownload) -> None:
        self.attempt = Attempt()
        self._part = part

    def run(self, clients: Clients) -> None:
        """Stream what is missing. Blocks.

        Raises:
            AttemptError: the stream broke, or is not what was requested.
        """
        is_for_obstore = clients.uses_obstore and is_plain(self._part.version.key)
        is_done = is_for_obstore and self._part.size > SMALL and self._run_obstore(clients)
        if not is_done and not self._run_direct(clients):
            self._run_boto(clients)
        self._part.check_end()

    def _run_obstore(self, clients: Clients) -> bool:
        """Over TLS, without holding the GIL; False if obstore can't do it."""
        import obstore

        assert clients.objects is not None
        options: obstore.GetOptions = {"range": (self._part.position, self._part.stop)}
        if self._part.has_if_match:
            options["if_match"] = self._part.version.etag
        note_sent()
        try:
            answer = obstore.get(clients.objects, self._part.version.key, options=options)
        except Exception as error:
            # What comes without a range is looked at where that is understood.
            if clients.confine_for(error) or _WITHOUT_RANGE in str(error):
                return False
            raise
        self._compare(answer.meta["e_tag"], answer.range[0], answer.meta["size"])
        if answer.range[1] - self._part.position <= CHUNK:
            self._take(memoryview(answer.bytes()))  # a thread switch less than a stream of one
            return True
        for chunk in answer.stream(min_chunk_size=CHUNK):
            self._take(memoryview(chunk))
        return True

    def _run_boto(self, clients: Clients) -> None:
        """Before the first LIST, after a redirect, and where requests are signed in other ways."""
        condition = {"IfMatch": self._part.version.etag} if self._part.has_if_match else {}
        answer = clients.s3.get_object(
            **clients.request, **condition, Key=self._part.version.key, Range=self._part.range
        )
        shown, length = answer.get("ContentRange"), str(answer.get("ContentLength", ""))
        self._compare(answer["ETag"], _first_byte(shown), _size_of(shown, length))
        for chunk in answer["Body"].iter_chunks(CHUNK):
            self._take(memoryview(chunk))

    def _run_direct(self, clients: Clients) -> bool:
        """Over our own connections; False if botocore has to send the request."""
        if self._part.size <= SMALL:
            return self._run_small(clients)
        return clients.direct.download(
            self._part.version.key,
            self._part.request_headers(),
            self._part.size,
            self._part.check,
            self._take,
        )

    def _run_small(self, clients: Clients) -> bool:
        """As `_run_direct`, of what is in memory before any of it is written.

        A whole object is compared with its checksum. No more is received than was requested,
        whatever the server has in its place by now, and also if it knows no ranges.
        """
        shown: dict[str, str] = {}
        content = bytearray()

        def begin(headers: Mapping[str, str]) -> None:
            shown.clear()
            shown.update(headers)
            content.clear()
            self._part.check(headers)

        key, size = self._part.version.key, self._part.size
        headers = self._part.request_headers()
        if not clients.direct.download(key, headers, size, begin, content.extend):
            return False
        self._part.verify(shown, content)
        self._take(memoryview(content))
        return True

    def _compare(self, etag: str | None, start: int, size: int | None) -> None:
        first_byte()
        self._part.compare(etag, start, size)

    def _take(self, chunk: memoryview) -> None:
        chunk = chunk[: self._part.size]
        with handling_answer():
            self.attempt.locally(lambda: self._part.add(chunk))


def _first_byte(content_range: str | None) -> int:
    shown = re.match(r"bytes (\d+)-", content_range or "")
    return int(shown[1]) if shown else 0


def _size_of(content_range: str | None, length: str) -> int | None:
    """The size of the object of which an answer has a part, or else all, in `length` bytes.

    None where a part is of something of unknown size; -1 where all comes without a length.
    """
    size = length if content_range is None else content_range.rpartition("/")[2]
    if size.isdecimal() and len(size) <= LONGEST_SIZE:
        return int(size)
    return None if content_range is not None else -1


def is_plain(key: str) -> bool:
    """Whether obstore's path type can hold a key as it is."""
    return _ODD.search(key) is None
