"""The bucket as the rest of fusefs sees it: a few types and one interface.

Everything above this package speaks of keys, versions and byte ranges. A key
is the object's full key in the bucket, decoded. An `ObjectVersion` names one
immutable content; a download asks for exactly that version and nothing else.
A caller has one wait and one error to look at: connections, retries and time-outs are the store's.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    `mtime_ns` is nanoseconds since the epoch. `content_type`, `version_id` and
    `metadata` (the user's, with keys in lower case) are None where the source
    (a listing) does not tell them. `crc32` is the content's, known of what was just sent.
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

    `prefixes` are the common prefixes with their trailing delimiter.
    `next_token` is None on the last page. `last` is the last key or prefix on
    the page ("" on an empty one), after which the listing continues. An object
    of which the page says nothing that can be used has the ETag "", and is there
    for its key alone; `unnamed` entries had no key below the prefix. A page that was
    listed before it was requested says when, in monotonic seconds (`listed_at`).
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

    Where another object is there, the change is repeated over that one: the last to close wins
    (store/fencing.py). The request carries the condition, so that it has no effect if it is
    executed late. It fails only where a directory's marker is written over content (ConflictError).
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
    """A part of an upload that the bucket has.

    `number` counts from 1, `size` is in bytes; `checksum` is the CRC32 in
    base64, which S3 has compared ("" if S3 does not tell that of a copied part).
    """

    number: int
    size: int
    etag: str
    checksum: str


class UploadState(NamedTuple):
    """All that another process needs to go on with an upload.

    The first parts have `part_size` bytes, later ones more (store/s3/multipart.py).
    """

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
    """The destination of one download. Its methods are called in the event loop.

    The engine's threads write into the file that `open` gives, and `arrived` tells how far they
    are. Without a file all comes through `write`. An OSError ends the download.
    """

    async def open(self) -> int | NewFile | None:
        """The descriptor of a file with the object's bytes at their own offsets, or None."""

    async def write(self, offset: int, data: memoryview) -> None:
        """Write bytes that begin at `offset` of the object."""

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        """The file has all bytes before `stop` that were requested.

        `sums` are the new CRC32s of what was written, as (start, stop, CRC32), each of a
        mebibyte of the object at most that ends where one ends, or where the writing stopped.
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


class Upload(Protocol):
    """A multipart upload under way, of a file that may still grow. Belongs to the event loop.

    Parts are counted from 1; where they begin does not depend on the file's size. An upload stays
    in the bucket, and is paid for, until it is completed or aborted.
    """

    @property
    def state(self) -> UploadState:
        """The state to put on record; it changes with each part."""

    def part_at(self, offset: int) -> int:
        """The number of the part that has this byte; a ValueError if no object is as large."""

    def part_range(self, number: int, size: int) -> tuple[int, int]:
        """The bytes [start, stop) of a part of a file; a ValueError if it has no such part."""

    def part_count(self, size: int) -> int:
        """The number of parts of a file of `size` bytes."""

    def has(self, number: int) -> bool:
        """True if the part has been sent or copied, and not been dropped since."""

    def missing(self, size: int) -> list[int]:
        """The parts to be sent or copied before a file of `size` bytes is complete."""

    def drop(self, number: int) -> None:
        """The file has other bytes in this part now: what was sent, or is being sent, is void."""

    async def send(self, fd: int, numbers: Iterable[int], size: int) -> None:
        """Send these parts of a file of `size` bytes, in parallel, unless they have been sent.

        Also waits for those that another task sends. After the return, also by cancellation, `fd`
        is not used any more, and the parts that were done stay done.

        Raises:
            StoreError: a part could not be sent in the retry time, or the file
                is shorter than `size`.
            ValueError: a file of `size` bytes has no such part.
        """

    async def copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        """Have S3 copy the bytes [start, stop) of exactly `source` into a part.

        Only the last part may be shorter than it should be.

        Raises:
            StaleVersionError: the source is no longer this version.
            UnsupportedError: some stores take another object for the source.
            ValueError: the range is larger than the part.
        """

    async def verify(self, fd: int, size: int) -> None:
        """Drop what another process sent and the file, of `size` bytes, does not have.

        After the return, also by cancellation, `fd` is not used any more.

        Raises:
            NotFoundError: the upload has been completed, but not with what the
                file has: another one is to be begun.
            StoreError: the file is shorter than `size`.
        """

    async def complete(self, size: int, condition: Condition = None) -> ObjectInfo:
        """Make an object of the first `size` bytes' parts, and forget the others.

        Cancelled, it may come into being all the same.

        Raises:
            ConflictError: the condition does not hold.
            NotFoundError: the upload was aborted.
            PartsError: the store takes no object of these parts; Ceph's gateway takes none of
                fewer parts than were sent. Another upload is to be begun.
            ValueError: parts are missing or not verified, or `size` is 0.
        """


class UploadLog:
    """The record of uploads that a store begins by itself, for one object each; here none is."""

    def begun(self, key: str, upload_id: str) -> None:
        """One has begun: if its process dies, the next one has to abort it."""

    def ended(self, upload_id: str) -> None:
        """It has been completed or aborted."""

    def add(self, key: str, upload_id: str) -> None:
        """It could not be aborted yet."""


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

        An exception of the sink ends the download and is raised here, and so is an OSError of
        its file. A broken answer is resumed where it stopped. After the return, also by
        cancellation, nothing writes any more.

        Raises:
            StaleVersionError: the object is no longer this version.
            StoreError: S3 could not serve the range in the retry time.
        """

    def hurry(self) -> None:
        """Look again at who waits for a connection: a priority has risen."""


class UnansweredChanges:
    """Changes that were sent and got no answer, so that S3 may carry them out later.

    Here none are known: of a store that keeps no record of them. A store that does so
    (posix/late) overrides all of it.
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


class Store(Source, Protocol):
    """One bucket. All methods raise `StoreError` (see store/errors.py).

    `tokens` are those of the changes; see store/fencing.py. Callers that find out what became
    of an earlier change look at the `unanswered` ones, too.
    """

    tokens: TokenSource
    unanswered: UnansweredChanges

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
        sorts: bool = True,
    ) -> ListPage:
        """Return one page of the keys that start with `prefix`.

        `start_after` is a full key and exclusive; a page's `last` continues the
        listing. Cancelling abandons the request. Where the store lists in no order, the
        folder is listed whole and sorted first (store/s3/sorted_listing.py); with `sorts`
        False the page is returned as it is, and not `is_ordered`. So are the entries of a
        page of less than 1,000.
        """

    async def head(self, key: str) -> ObjectInfo:
        """Return what HEAD tells about `key`.

        Raises:
            NotFoundError: there is no such object.
        """

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        """Make the first `size` bytes of a file the object `key`.

        One PUT up to `part_size` bytes, beyond it a multipart upload, which is
        aborted if it fails or is cancelled. S3 compares a checksum of all that
        is sent. After the return, also by cancellation, `fd`
        is not used any more. A single PUT that is cancelled may come to pass.

        After a single PUT `mtime_ns` is this machine's, to the second: S3 tells its own only to a
        HEAD, which would take half as long again as the PUT of a small file. The metadata of the
        answer have the token.

        A store that knows no conditions answers a strict one with status 501
        (`UnsupportedError`), or ignores them, which the probes find (probing.py).

        Raises:
            ConflictError: the condition does not hold; `.errno` is EEXIST for
                IF_ABSENT and ESTALE for IfMatch.
            CredentialsError: they are expired or rejected, and were not
                renewed in the retry time.
            ValueError: the metadata can't be sent.
        """

    async def begin_upload(self, key: str, write: Write = PLAIN) -> Upload:
        """Begin a multipart upload, of whatever size; the condition is given to `complete`.

        Raises:
            ValueError: the metadata can't be sent.
        """

    async def resume_upload(self, state: UploadState) -> Upload:
        """Go on with an upload that perhaps another process began.

        The bucket tells which parts it has; `verify` compares them with the file.
        If the upload has been completed meanwhile, `complete` returns the object.

        Raises:
            NotFoundError: the upload was aborted, or the object replaced.
        """

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Give an upload up and have its parts deleted; no error if there is none."""

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """All multipart uploads below `prefix`, whoever began them.

        Only those whose ids are on one's own record may be aborted.
        """

    async def copy(
        self,
        source: ObjectInfo | ObjectVersion,
        key: str,
        write: Write = PLAIN,
    ) -> ObjectInfo:
        """Have S3 copy exactly `source` to `key`, however large it is.

        Content type, storage class, tags and the like are kept, and so is the
        user metadata, unless another is given. `key` may be the source's if
        metadata is given. The copy may have another ETag than the source.

        An `ObjectInfo` as source spares a HEAD, if the metadata is kept; what it does not tell, as
        a listed one does not, the answer does not either. A store that answers that it knows no
        conditions of copies copies without. A copy that keeps the metadata keeps the token.

        Raises:
            ConflictError: the strict condition does not hold; `ExistsError` of IF_ABSENT.
            NotFoundError: there is no such source.
            StaleVersionError: the source is no longer this version.
        """

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        """Delete an object; no error if there is none.

        With a (quoted) `etag`, and where the store honours it, the object with
        that ETag: another one stays, without an error. With `adopts` another
        one is deleted in its place, but never once an answer was lost: the
        first attempt may have deleted what was meant.

        Raises:
            ConflictError: a directory's marker was to be deleted, and an object with
                content is there.
        """

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        """Delete objects, a thousand with each request; return what failed.

        `etags` are those of keys that are to be deleted as `delete` does with an ETag.
        """

    def counters(self) -> dict[str, int]:
        """Requests and bytes since the start, by the names that `status` shows.

        `awaiting_credentials` and `connections` are of the moment: how many
        requests try again because their credentials were refused, and how many
        may run at once.
        """
