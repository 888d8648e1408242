"""One ranged GET in a worker thread: checked, counted, resumed, and abandoned without a trace.

A thread that waits for the network can't be stopped, only left alone. Once an
attempt has been abandoned its thread never touches the caller's file again; if
it did so in that very moment, whoever abandons it waits for that one read or
write of the local disk.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from fusefs.store.errors import Failure, StaleVersionError, StoreError, UnreachableError, translate
from fusefs.store.http.exchange import Answer
from fusefs.store.interface import ChunkWriter, ObjectVersion
from fusefs.store.s3 import list_parser

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

T = TypeVar("T")

# Control characters, and segments that are empty or dots.
_ODD = re.compile("[\x00-\x1f\x7f]|(?:^|/)\\.{0,2}(?:/|$)")

# The unit in which bytes are handed on: large enough that a chunk's share of
# Python's work does not count, small enough that a reader need not wait long.
CHUNK = 1 << 20
# What the event loop has the time to receive and to write to the local disk.
SMALL = 256 << 10


class AttemptError(Exception):
    """One attempt of a request failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


class _AbandonedError(Exception):
    """Ends the thread of an abandoned attempt; nobody sees it."""


class Attempt:
    """One run of a request in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a moment only, also by the event loop
        self._is_abandoned = False
        self._is_local = False
        self._local_error: Exception | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._left = trio.Event()

    def guarded(self, work: Callable[..., T]) -> Callable[..., T]:
        """`work` with all exceptions as `AttemptError` but those of `locally`."""

        def run(*arguments: object) -> T:
            try:
                return work(*arguments)
            except _AbandonedError:
                raise
            # Anything may come from two HTTP libraries fed with a stranger's answers.
            except Exception as error:
                if self._local_error is not None:  # the library may have wrapped it
                    raise self._local_error from None
                if isinstance(error, AttemptError):
                    raise
                raise AttemptError(translate(error)) from error

        return run

    def locally(self, work: Callable[[], T]) -> T:
        """Call `work`, which uses a local file, unless abandoned. Blocks, in the thread."""
        with self._lock:
            if self._is_abandoned:
                raise _AbandonedError
            self._is_local = True
        try:
            return work()
        except Exception as error:
            self._local_error = error
            raise
        finally:
            with self._lock:
                self._is_local = False
                if self._is_abandoned:
                    self._token.run_sync_soon(self._left.set)

    async def abandon(self) -> None:
        """Have nothing run locally, now or later; waits for the local disk at most."""
        with self._lock:
            self._is_abandoned = True
            is_local = self._is_local
        if is_local:
            with trio.CancelScope(shield=True):
                await self._left.wait()


class Transfer(Protocol):
    """A request whose thread uses a local file, over several attempts."""

    def begin(self) -> Attempt:
        """Begin an attempt."""

    def has_progressed(self) -> bool:
        """Whether the last attempt achieved something that the next need not repeat."""


class Stream:
    """The bytes [start, stop) of a version on their way into `write`, over several attempts."""

    def __init__(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        note_bytes: Callable[[int], None],
    ) -> None:
        self.version = version
        self._position = start
        self._stop = stop
        self._write = write
        self._note_bytes = note_bytes
        self._attempt: Attempt | None = None
        self._began_at = start
        self.has_if_match = True

    def begin(self) -> Attempt:
        self._attempt = Attempt()
        self._began_at = self._position
        return self._attempt

    def has_progressed(self) -> bool:
        """Whether the last attempt brought anything."""
        return self._position > self._began_at

    @property
    def key(self) -> str:
        return self.version.key

    @property
    def missing(self) -> int:
        """How many bytes have not come yet."""
        return self._stop - self._position

    def asked(self) -> dict[str, str]:
        """The headers of a request for what is missing."""
        headers = {"range": self._range}
        if self.has_if_match:
            headers["if-match"] = self.version.etag
        return headers

    @property
    def _range(self) -> str:
        return f"bytes={self._position}-{self._stop - 1}"

    def take(self, answer: Answer) -> None:
        """Take in the answer to what was `asked`, in the event loop.

        Raises:
            AttemptError: it is not what was asked for, or not all of it.
        """
        chunk = self._checked(answer)[: self.missing]
        self._write(self._position, chunk)
        self._position += len(chunk)
        self._note_bytes(len(chunk))
        self._check_end()

    def run(self, clients: Clients) -> None:
        """Stream what is missing. Blocks.

        Raises:
            AttemptError: the stream broke, or is not what was asked for.
        """
        is_for_obstore = is_plain(self.version.key) and not clients.is_confined
        is_short = self.missing <= (SMALL if is_for_obstore else CHUNK)
        is_done = (is_short and self._run_direct(clients)) or self._run_plain(clients)
        if not is_done and is_for_obstore:
            is_done = self._run_obstore(clients)
        if not is_done:
            self._run_boto(clients)
        self._check_end()

    def _check_end(self) -> None:
        if self._position < self._stop:
            raise AttemptError(
                Failure(UnreachableError, "the answer was too short", is_retryable=True)
            )

    def _run_obstore(self, clients: Clients) -> bool:
        """False if obstore can't connect: its TLS may refuse what Python's does not."""
        import obstore

        assert clients.objects is not None
        options: obstore.GetOptions = {"range": (self._position, self._stop)}
        if self.has_if_match:
            options["if_match"] = self.version.etag
        try:
            answer = obstore.get(clients.objects, self.version.key, options=options)
        except Exception as error:
            if clients.confine_for(error):
                return False
            raise
        self._compare(answer.meta["e_tag"], answer.range[0])
        if answer.range[1] - self._position <= CHUNK:
            self._take(memoryview(answer.bytes()))  # a thread switch less than a stream of one
            return True
        for chunk in answer.stream(min_chunk_size=CHUNK):
            self._take(memoryview(chunk))
        return True

    def _run_boto(self, clients: Clients) -> None:
        """For keys that obstore's paths can't hold, and where it must not follow redirects."""
        condition = {"IfMatch": self.version.etag} if self.has_if_match else {}
        answer = clients.s3.get_object(
            **clients.request, **condition, Key=self.version.key, Range=self._range
        )
        self._compare(answer["ETag"], _first_byte(answer.get("ContentRange")))
        for chunk in answer["Body"].iter_chunks(CHUNK):
            self._take(memoryview(chunk))

    def _run_direct(self, clients: Clients) -> bool:
        """For one chunk, in a third of the time; False if one of the libraries has to ask."""
        answer = clients.direct.send("GET", self.key, headers=self.asked())
        if answer is None:
            return False
        self._take(self._checked(answer))
        return True

    def _run_plain(self, clients: Clients) -> bool:
        """Without TLS the kernel does nearly all of it; False if a library has to ask."""
        return clients.direct.download(
            self.key, self.asked(), self.missing, self._check, self._take
        )

    def _check(self, headers: Mapping[str, str]) -> None:
        self._compare(headers.get("etag"), _first_byte(headers.get("content-range")))

    def _checked(self, answer: Answer) -> memoryview:
        self._check(answer.headers)
        return memoryview(answer.content)

    def _compare(self, etag: str | None, start: int) -> None:
        """Some servers ignore If-Match, and some ignore ranges."""
        if etag is None or list_parser.quoted(etag) != self.version.etag:
            sentence = "the object has been replaced"
            raise AttemptError(Failure(StaleVersionError, sentence))
        if start != self._position:
            raise AttemptError(Failure(StoreError, "S3 sent another range than it was asked for"))

    def _take(self, chunk: memoryview) -> None:
        assert self._attempt is not None
        chunk = chunk[: self.missing]
        self._attempt.locally(lambda: self._write(self._position, chunk))
        self._position += len(chunk)
        self._note_bytes(len(chunk))


def _first_byte(content_range: str | None) -> int:
    shown = re.match(r"bytes (\d+)-", content_range or "")
    return int(shown[1]) if shown else 0


def is_plain(key: str) -> bool:
    """Whether obstore's path type can hold a key as it is."""
    return _ODD.search(key) is None
