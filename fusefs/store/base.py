"""The bucket as the rest of fusefs sees it: a few types and one interface.

Everything above this package speaks of keys, versions and byte ranges. A key
is the object's full key in the bucket, decoded. An `ObjectVersion` names one
immutable content; a download asks for exactly that version and nothing else.

The interface is asynchronous (trio): the implementation owns its threads,
its connection budget, retries and time-outs, so that a caller has one wait
and one error to look at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Priority(enum.IntEnum):
    """Who goes first when connections are scarce; lower goes first."""

    DEMAND = 0
    PREFETCH = 1


# A download's priority is asked for when a connection is free: it rises when a
# reader joins what a prefetch has started.
Urgency = Callable[[], Priority]


def demanded() -> Priority:
    """The urgency of what somebody waits for."""
    return Priority.DEMAND


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One immutable content of one key: what a cache file holds.

    `etag` is the quoted value as S3 gives it; `size` is in bytes.
    """

    key: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or a HEAD tells about an object.

    `mtime_ns` is nanoseconds since the epoch. `content_type` and
    `version_id` are None where the source (a listing) does not tell them.
    """

    key: str
    size: int
    etag: str
    mtime_ns: int
    storage_class: str = "STANDARD"
    content_type: str | None = None
    version_id: str | None = None

    @property
    def version(self) -> ObjectVersion:
        return ObjectVersion(self.key, self.etag, self.size)


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing, in the bucket's order.

    `prefixes` are the common prefixes with their trailing delimiter.
    `next_token` continues the listing; None means that this was the last
    page. `last` is the last key or prefix on the page ("" on an empty one).
    """

    objects: list[ObjectInfo]
    prefixes: list[str]
    next_token: str | None
    last: str


# Called in a worker thread with (offset in the object, chunk), in order.
ChunkWriter = Callable[[int, memoryview], None]


class Store(Protocol):
    """One bucket. All methods raise `StoreError` (see store/errors.py)."""

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        token: str | None = None,
        max_keys: int = 1000,
        priority: Priority = Priority.DEMAND,
    ) -> ListPage:
        """Return one page of the keys that start with `prefix`.

        `start_after` is a full key and exclusive; `token` continues a listing.
        Cancelling abandons the request.
        """

    async def head(self, key: str, *, priority: Priority = Priority.DEMAND) -> ObjectInfo:
        """Return what HEAD tells about `key`.

        Raises:
            NotFoundError: there is no such object.
        """

    async def download(
        self,
        version: ObjectVersion,
        start: int,
        stop: int,
        write: ChunkWriter,
        *,
        priority: Urgency = demanded,
    ) -> None:
        """Stream the bytes [start, stop) of exactly `version` into `write`.

        `write` runs in a worker thread, once a chunk, in order, without gaps;
        an exception from it ends the download and is raised here. A broken
        stream is resumed where it stopped. After the return, also by
        cancellation, `write` is not running and will not be called again.

        Raises:
            StaleVersionError: the object is no longer this version.
            StoreError: S3 could not serve the range in the retry time.
        """

    def hurry(self) -> None:
        """Look again at who waits for a connection: a priority has risen."""

    def counters(self) -> dict[str, int]:
        """Requests and bytes since the start, by the names that `status` shows."""
