"""The types and interfaces through which the rest of fusefs uses the bucket.

All code above this package speaks of keys (full and decoded), versions and byte ranges. A caller
awaits one call and handles one error: the store does connections, retries and time-outs.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fusefs.store.errors import StoreError
from fusefs.store.fencing import CHANGE, ChangeToken, TokenSource


class Priority(enum.IntEnum):
    """Priority of a request when connections are scarce: the lowest number goes first."""

    DEMAND = 0
    WRITE = 1
    PREFETCH = 2


# In bytes. A request with a larger answer counts as a stream, as does each body from a file.
LARGE = 256 << 10

# A function that returns a request's present priority, called each time a connection is free: the
# priority of a download that a prefetch has started rises when a reader joins it.
Urgency = Callable[[], Priority]


def demanded() -> Priority:
    """Return the priority of requests that a program waits for: the default `Urgency`."""
    return Priority.DEMAND


def writing() -> Priority:
    """Return the priority of uploads: the `Urgency` of writes."""
    return Priority.WRITE


# A tuple for speed: a change of a file creates, compares and looks up a dozen of these.
class ObjectVersion(NamedTuple):
    """One immutable content of one key; a cache file holds the bytes of one version.

    `etag` is the quoted value as S3 gives it; `size` is in bytes.
    """

    key: str
    etag: str
    size: int


# Not frozen, though no instance is ever changed: creating a frozen one takes four times as long
# (0.9 us), and a page of a listing has a thousand.
@dataclass(slots=True, unsafe_hash=True)
class ObjectInfo:
    """Description of an object, from a listing, a HEAD or a write; never changed once it is made.

    `mtime_ns` is nanoseconds since the epoch. `content_type`, `version_id` and `metadata` (the
    user's, keys in lower case) are None in a listing. `crc32` is known after a PUT of this process.
    """

    key: str
    size: int
    etag: str
    mtime_ns: int
    storage_class: str = "STANDARD"
    content_type: str | None = None
    version_id: str | None = None
    metadata: Mapping[str, str] | None = field(default=None, hash=False)
    crc32: int | None = field(default=None, compare=False)

    @property
    def version(self) -> ObjectVersion:
        return ObjectVersion(self.key, self.etag, self.size)

    @property
    def token(self) -> ChangeToken | None:
        """The token of the change that made the object, or None if none is known (fencing.py)."""
        return ChangeToken.parse(self.metadata)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing. `is_ordered` is False if the entries are not in the order of keys.

    `prefixes` are the common prefixes with their trailing delimiter. `next_token` is None on the
    last page. `last` is the last key or prefix ("" on an empty page), after which the listing
    continues. The ETag "" marks an entry of which only the key is usable; `unnamed` counts entries
    without a usable key. `listed_at` is the start of the saved listing that the page was read from
    (sorted_listing.py), in monotonic seconds, or infinite if S3 has just sent the page.
    """

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None
    last: str
    unnamed: int = 0
    listed_at: float = math.inf
    is_ordered: bool = True


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Condition: write only if the key's object has this (quoted) ETag, or no object (None)."""

    etag: str | None


@dataclass(frozen=True, slots=True)
class Expect:
    """Condition: the mount expects the key to have this (quoted) ETag, or no object (None).

    If the key has another object, the change is repeated over that object (store/fencing.py). The
    change fails only if it would write a directory's marker over content (ConflictError).
    """

    etag: str | None


IF_ABSENT = IfMatch(None)
# A condition that must hold. None writes unconditionally.
Strict = IfMatch | None
Condition = Strict | Expect


Revision = Callable[[ObjectInfo], Mapping[str, str] | None]


# A tuple for speed: each small PUT makes a copy of it, with a token.
class Write(NamedTuple):
    """The properties of a new object (by PUT, upload or copy), and the condition of the write.

    The keys of `metadata` are HTTP tokens in lower case; its values are printable ASCII, not empty,
    without spaces at the ends. S3 allows 2 KiB. None means no metadata, or in a copy the source's
    metadata. The `token` is added to the metadata (store/fencing.py).

    For copies only: `revise` gets the source, with its metadata, and returns the copy's metadata or
    None. `is_own` states that the source, an `ObjectInfo`, has no headers but its content type and
    metadata, so that no HEAD has to look for others.
    """

    metadata: Mapping[str, str] | None = None
    content_type: str | None = None
    condition: Condition = None
    token: ChangeToken | None = None
    revise: Revision | None = None
    is_own: bool = False

    def with_token(self, tokens: TokenSource) -> Write:
        """Return this write with a token: its own, or else the next one of `tokens`."""
        return self if self.token is not None else self._replace(token=tokens.next())

    def stamped(self) -> dict[str, str]:
        """Return the metadata with the token added."""
        assert self.token is not None
        return {**(self.metadata or {}), CHANGE: str(self.token)}


PLAIN = Write()


class Part(NamedTuple):
    """A part of an upload, as stored in the bucket; `number` counts from 1, `size` is in bytes.

    `checksum` is the CRC32 in base64, or "" if S3 does not report it for a copied part.
    """

    number: int
    size: int
    etag: str
    checksum: str


class UploadState(NamedTuple):
    """The state from which another process can resume an upload; part 1 has `part_size` bytes."""

    key: str
    upload_id: str
    part_size: int
    metadata: Mapping[str, str]
    parts: tuple[Part, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the state as a dict that can be written as JSON."""
        return {**self._asdict(), "metadata": dict(self.metadata)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> UploadState:
        return UploadState(**{**plain, "parts": tuple(Part(*fields) for fields in plain["parts"])})


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A multipart upload of any client that is neither completed nor aborted."""

    key: str
    upload_id: str
    begun_ns: int


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, with the error."""

    key: str
    error: StoreError | OSError


class NewFile(Protocol):
    """A file that the engine's thread will create for a whole object of at most LARGE bytes."""

    def new_path(self) -> str:
        """Return a path without a file, a new one at each call; the engine creates its folder."""

    def created(self, path: str, fd: int) -> int:
        """Take over the engine's new file `fd` at `path`; return the fd that the download uses."""


class Sink(Protocol):
    """The file into which one download is written. Belongs to the event loop.

    Engine threads write into the file at the object's offsets; the source of the bytes reports
    progress to `arrived`. An OSError that the sink raises ends the download.
    """

    async def open(self) -> int | NewFile:
        """Return the file's descriptor, or a `NewFile` if the engine is to create the file."""

    async def write(self, offset: int, data: memoryview) -> None:
        """Write the object's bytes `data` at `offset`; called by sources other than the engine."""

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        """Record that all requested bytes before the object's offset `stop` are written.

        `sums` has (start, stop, CRC32) of new ranges; each ends at a whole MiB or an answer's end.
        """


class UploadLog:
    """Log of the multipart uploads of `put_file` and `copy`; this base class records nothing."""

    def begun(self, key: str, upload_id: str) -> None:
        """Record an upload that has begun: if this process dies, its successor has to abort it."""

    def ended(self, upload_id: str) -> None:
        """Remove the record of an upload that was completed or aborted."""

    def add(self, key: str, upload_id: str) -> None:
        """Record an upload whose abort failed: it is still to be aborted."""


UNRECORDED = UploadLog()


class WholeFileSink:
    """A sink that writes a download into the file `fd`, at the object's offsets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def open(self) -> int:
        return self._fd

    async def write(self, offset: int, data: memoryview) -> None:
        os.pwrite(self._fd, data, offset)

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        """Ignore the progress."""


class Source(Protocol):
    """A source of objects' bytes."""

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        sink: Sink,
        *,
        priority: Urgency = demanded,
    ) -> None:
        """Download the bytes [start, stop) of exactly `version` into `sink`, in order.

        An exception of the sink or its file ends the download and is raised. A broken download is
        resumed where it stopped. After the return nothing writes to the sink any more.

        Raises:
            StaleVersionError: the object is no longer this version.
            StoreError: S3 could not serve the range in the retry time.
        """

    def hurry(self) -> None:
        """Reconsider the order of requests that wait for a connection: a priority has risen."""


async def read_bytes(source: Source, version: ObjectVersion, start: int, stop: int) -> bytearray:
    """Return the bytes [start, stop) of a version; raises as `Source.download` does."""
    with os.fdopen(os.memfd_create("fusefs-bytes", os.MFD_CLOEXEC), "rb") as file:
        await source.download(version, start, stop, WholeFileSink(file.fileno()))
        data = bytearray(stop - start)
        os.preadv(file.fileno(), [data], start)
        return data


class UnansweredChanges:
    """Changes that were sent and got no answer, so that S3 may still carry them out later.

    This class records no changes. A subclass that records them (posix/late) overrides everything.
    """

    @property
    def unsettled_s(self) -> float:
        """Seconds from now for which requests of an earlier, killed process may still reach S3."""
        return 0.0

    def concerns(self, key: str) -> bool:
        """True if an unanswered change of `key` is known."""
        return False

    def tokens(self, key: str) -> list[str]:
        """Return the tokens that objects made by the unanswered changes of `key` would have."""
        return []

    def may_have_made(self, found: ObjectInfo) -> bool:
        """True if an unanswered change may have made the object `found`."""
        return False

    def has_undone(self, key: str, found: ObjectInfo | None) -> bool:
        """True if `found` at `key` (None: no object) shows that a late request undid a change."""
        return False

    def may_have_undone(self, key: str) -> bool:
        """True if an unanswered change may have removed or replaced the object at `key`."""
        return False

    def expected_below(self, prefix: str) -> dict[str, ObjectInfo | None]:
        """Return what should be at keys that late requests may have changed (None: no object)."""
        return {}

    def unconfirmed_below(self, prefix: str) -> list[str]:
        """Return the keys below a prefix whose last change got no answer."""
        return []

    def renamed_below(self, prefix: str) -> None:
        """Record that no object should be left below a prefix: the directory was renamed."""

    async def restored(self, key: str) -> ObjectInfo | None:
        """Check `key` now, and redo a change that was undone; return the key's object or None."""
        return None

    def counters(self) -> dict[str, int]:
        """Return the number of keys with unanswered changes, and of changes that were redone."""
        return {"uncertain": 0, "repairs": 0}
