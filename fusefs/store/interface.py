"""The bucket as the rest of fusefs sees it: a few types and one interface.

Everything above this package speaks of keys (full and decoded), versions and byte ranges. A caller
has one wait and one error to look at: connections, retries and time-outs are the store's.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fusefs.store.errors import StoreError
from fusefs.store.fencing import ChangeToken, TokenSource, stamped


class Priority(enum.IntEnum):
    """The order in which requests get a connection when these are scarce: lower goes first."""

    DEMAND = 0
    WRITE = 1
    PREFETCH = 2


# Bodies of more bytes are read from their file by the engine, and answers written into theirs.
LARGE = 256 << 10

# Called each time a connection is free: a download's priority rises when a reader joins
# what a prefetch has started.
Urgency = Callable[[], Priority]


def demanded() -> Priority:
    """The urgency of what a program waits for."""
    return Priority.DEMAND


def writing() -> Priority:
    """The urgency of uploads."""
    return Priority.WRITE


# A tuple, for a change of a file makes, compares and looks up a dozen of these.
class ObjectVersion(NamedTuple):
    """One immutable content of one key: what a cache file holds.

    `etag` is the quoted value as S3 gives it; `size` is in bytes.
    """

    key: str
    etag: str
    size: int


# Not frozen, though none is ever changed: to make it would take four times as long (0.9 us),
# and a page of a listing has a thousand.
@dataclass(slots=True, unsafe_hash=True)
class ObjectInfo:
    """The facts of an object from a listing or a HEAD; never changed once it is made.

    `mtime_ns` is nanoseconds since the epoch. `content_type`, `version_id` and `metadata` (the
    user's, with keys in lower case) are None in a listing. `crc32` is that of what was just sent.
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
        """The change that made it, if a mount did and the metadata is known (fencing.py)."""
        return ChangeToken.parse(self.metadata)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing, in the bucket's order.

    `prefixes` are the common prefixes with their trailing delimiter. `next_token` is None on the
    last page. `last` is the last key or prefix ("" on an empty page), after which the listing
    continues. An object with the ETag "" is there for its key alone; `unnamed` entries had no key
    below the prefix. `listed_at` is when an older page was listed, in monotonic seconds.
    """

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None
    last: str
    unnamed: int = 0
    listed_at: float = math.inf
    is_ordered: bool = True


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Write only where there is no object (`If-None-Match: *`)."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Write only over the object with this (quoted) ETag."""

    etag: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Write over what the mount knows under the key: this (quoted) ETag, or nothing (None).

    Where another object is there, the change is repeated over that one (store/fencing.py). It
    fails only where a directory's marker is written over content (ConflictError).
    """

    etag: str | None


IF_ABSENT = IfAbsent()
# A condition that must hold. None writes whatever is there.
Strict = IfAbsent | IfMatch | None
Condition = Strict | Expect


# A tuple, for a small PUT gives it a token in a hundredth of its time.
class Write(NamedTuple):
    """The properties of an object that a PUT, an upload or a copy makes, and its condition.

    The keys of `metadata` are HTTP tokens in lower case, its values printable ASCII, not empty,
    without spaces at the ends; S3 takes 2 KiB. None is no metadata, or that of the source of a
    copy. The `token` goes into the metadata (store/fencing.py).

    Of copies alone: with `keeps_mtime` the metadata says when the source was modified, if it does
    not yet. With `is_own` the source, an `ObjectInfo`, has a content type and metadata and nothing
    else, which spares a HEAD.
    """

    metadata: Mapping[str, str] | None = None
    content_type: str | None = None
    condition: Condition = None
    token: ChangeToken | None = None
    keeps_mtime: bool = False
    is_own: bool = False

    def with_token(self, tokens: TokenSource) -> Write:
        """The write with a token, the next one of `tokens` if it has none."""
        return self if self.token is not None else self._replace(token=tokens.next())

    def stamped(self) -> dict[str, str]:
        """The metadata with the token."""
        assert self.token is not None
        return stamped(self.metadata or {}, self.token)


PLAIN = Write()


class Part(NamedTuple):
    """A part of an upload that the bucket has; `number` counts from 1, `size` is in bytes.

    `checksum` is the CRC32 in base64 ("" if S3 does not tell that of a copied part).
    """

    number: int
    size: int
    etag: str
    checksum: str


class UploadState(NamedTuple):
    """All that another process needs to go on with an upload; first parts have `part_size`."""

    key: str
    upload_id: str
    part_size: int
    metadata: Mapping[str, str]
    parts: tuple[Part, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The state as JSON can hold it."""
        return {**self._asdict(), "metadata": dict(self.metadata)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> UploadState:
        parts = tuple(Part(*fields) for fields in plain["parts"])
        return UploadState(**{**plain, "parts": parts})


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A multipart upload, anybody's, that is neither complete nor aborted."""

    key: str
    upload_id: str
    begun_ns: int


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, and why."""

    key: str
    error: StoreError | OSError


class NewFile(Protocol):
    """A file that an engine's thread is to create, with all of an object of LARGE bytes at most."""

    def new_path(self) -> str:
        """Choose a path where no file is, another one each time. Its folder may be missing."""

    def created(self, path: str, fd: int) -> int:
        """Take over the file that was created, and open; return the descriptor of its bytes."""


class Sink(Protocol):
    """The destination of one download: a file, or `write`. Belongs to the event loop.

    The engine's threads write into the file, and `arrived` tells how far they are. An OSError ends
    the download.
    """

    async def open(self) -> int | NewFile | None:
        """The descriptor of a file with the object's bytes at their own offsets, or None."""

    async def write(self, offset: int, data: memoryview) -> None:
        """Write bytes that begin at `offset` of the object."""

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        """The file has all requested bytes before `stop`; `sums` are (start, stop, CRC32) of those.

        Each is of a mebibyte of the object at most that ends where one ends, or the writing did.
        """


class BytesSink:
    """A download into memory: the bytes [start, start + size) of an object, as `data`."""

    def __init__(self, start: int, size: int) -> None:
        self.data = bytearray(size)
        self._start = start

    async def open(self) -> int | None:
        return None

    async def write(self, offset: int, data: memoryview) -> None:
        at = offset - self._start
        self.data[at : at + len(data)] = data

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        raise AssertionError("nothing is written into a file")


class UploadLog:
    """The record of the multipart uploads of `put_file` and `copy`; this one records nothing."""

    def begun(self, key: str, upload_id: str) -> None:
        """One has begun: if its process dies, the next one has to abort it."""

    def ended(self, upload_id: str) -> None:
        """It has been completed or aborted."""

    def add(self, key: str, upload_id: str) -> None:
        """It could not be aborted yet."""


UNRECORDED = UploadLog()


class WholeFileSink:
    """A download into a file of its own, at the object's offsets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def open(self) -> int | None:
        return self._fd

    async def write(self, offset: int, data: memoryview) -> None:
        os.pwrite(self._fd, data, offset)

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        """Nothing is told to anybody."""


class Source(Protocol):
    """The source of the bytes of objects."""

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        sink: Sink,
        *,
        priority: Urgency = demanded,
    ) -> None:
        """Bring the bytes [start, stop) of exactly `version` into `sink`, in order.

        An exception of the sink, or of its file, ends the download and is raised here. A broken
        answer is resumed where it stopped. After the return nothing writes any more.

        Raises:
            StaleVersionError: the object is no longer this version.
            StoreError: S3 could not serve the range in the retry time.
        """

    def hurry(self) -> None:
        """Look again at who waits for a connection: a priority has risen."""


class UnansweredChanges:
    """Changes that were sent and got no answer, so that S3 may carry them out later.

    Here none are known; a store that keeps a record of them (posix/late) overrides all of it.
    """

    @property
    def unsettled_s(self) -> float:
        """The seconds for which requests of a killed process may be on their way still."""
        return 0.0

    def concerns(self, key: str) -> bool:
        """True if such a change of a key is known."""
        return False

    def tokens(self, key: str) -> list[str]:
        """The tokens that an object has if one of them has made it."""
        return []

    def may_have_made(self, found: ObjectInfo) -> bool:
        """True if one of them may have made an object."""
        return False

    def has_undone(self, key: str, found: ObjectInfo | None) -> bool:
        """True if one has undone an acknowledged change, as what is found under the key shows."""
        return False

    def may_have_undone(self, key: str) -> bool:
        """True if one of them may have removed or replaced an object that is expected."""
        return False

    def expected_below(self, prefix: str) -> list[ObjectInfo]:
        """The objects below a prefix which one of them may have removed or replaced."""
        return []

    def unconfirmed_below(self, prefix: str) -> list[str]:
        """The keys below a prefix of which no change was acknowledged since."""
        return []

    def confirm(self, key: str, found: ObjectInfo | None) -> None:
        """Expect what was found under a key: a repeated request has found its change done."""

    def renamed_below(self, prefix: str) -> None:
        """Expect nothing below a prefix any more: the directory was renamed."""

    async def restored(self, key: str) -> ObjectInfo | None:
        """Have a key checked now, and what was undone put back; return the expected object."""
        return None

    def counters(self) -> dict[str, int]:
        """The number of keys that they concern, and of changes that were put back."""
        return {"uncertain": 0, "repairs": 0}
