"""A bucket in memory, which counts its requests and can be slow, fail or die at any of them."""

import hashlib
import itertools
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio

from fusefs.store.errors import ExistsError, NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import TokenSource
from fusefs.store.interface import (
    IF_ABSENT,
    PLAIN,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    PendingUpload,
    Sink,
    UnansweredChanges,
    Write,
)
from fusefs.store.s3 import head
from fusefs.store.s3.multipart import Upload

SECOND_NS = 1_000_000_000


@dataclass
class Stored:
    data: bytes
    info: ObjectInfo


class MemoryStore:
    """A bucket in memory. Each change is a second after the one before.

    It keeps tokens with copies of other metadata alone, and of conditions it knows IF_ABSENT and
    ETags of deletes. It refuses metadata that can't be sent, as `S3Store` does.

    `before` and `after` are called around each request with its name and key,
    and may raise; `pause` is how long one takes. `page_size` is the most that one
    answer lists.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.tokens = TokenSource()
        self.unanswered = UnansweredChanges()
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None]
        self.after: Callable[[str, str], None]
        self.heal()
        self.pause: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.page_size = 1000
        self._clock = itertools.count(1_000_000)

    async def confirm(self, _key: str, _found: ObjectInfo | None) -> None: ...

    def put(self, key: str, data: bytes = b"", **metadata: str) -> None:
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        info = ObjectInfo(
            key,
            len(data),
            etag,
            next(self._clock) * SECOND_NS,
            content_type="x/y",
            metadata=metadata,
        )
        self.objects[key] = Stored(data, info)

    def heal(self) -> None:
        """Have no request fail any more."""
        self.before = self.after = lambda _what, _key: None

    def contents(self) -> dict[str, bytes]:
        """What there is, without the markers of directories."""
        return {key: one.data for key, one in self.objects.items() if not key.endswith("/")}

    def metadata(self, key: str) -> dict[str, str]:
        return dict(self.objects[key].info.metadata or {})

    def count(self, *what: str) -> int:
        return sum(kind in what for kind, _ in self.requests)

    @asynccontextmanager
    async def _request(self, what: str, key: str) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        self.requests.append((what, key))
        self.before(what, key)
        await self.pause()
        yield
        self.after(what, key)

    def _get(self, key: str) -> Stored:
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key]

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
        **_: object,
    ) -> ListPage:
        async with self._request("LIST", prefix):
            keys = self._keys()
            entries: dict[str, bool] = {}  # whether it is a common prefix
            for key in keys[bisect_right(keys, start_after) if start_after else 0 :]:
                if key.startswith(prefix):
                    cut = key.find(delimiter, len(prefix)) if delimiter else -1
                    entries[key if cut < 0 else key[: cut + 1]] = cut >= 0
            page = list(entries)[: min(self.page_size, max_keys)]
            return ListPage(
                [self._listed(key) for key in page if not entries[key]],
                [key for key in page if entries[key]],
                "more" if len(page) < len(entries) else None,
                page[-1] if page else "",
            )

    def _keys(self) -> list[str]:
        """The keys that there are, in order."""
        return sorted(self.objects)

    def _listed(self, key: str) -> ObjectInfo:
        info = self.objects[key].info
        return ObjectInfo(key, info.size, info.etag, info.mtime_ns)

    def _info(self, key: str) -> ObjectInfo:
        """What a HEAD finds.

        Raises:
            NotFoundError: nothing.
        """
        return self._get(key).info

    async def head(self, key: str, **_: object) -> ObjectInfo:
        async with self._request("HEAD", key):
            return self._info(key)

    async def download(
        self, version: ObjectVersion, start: int, stop: int, sink: Sink, **_: object
    ) -> None:
        async with self._request("GET", version.key):
            found = self._get(version.key)
            if found.info.version != version:
                raise StaleVersionError(version.key)
            await sink.write(start, memoryview(found.data)[start:stop])

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        head.check(write.metadata or {})
        async with self._request("PUT", key):
            if write.condition == IF_ABSENT and key in self.objects:
                raise ExistsError(key)
            self.put(key, os.pread(fd, size, 0), **(write.metadata or {}))
        return self._get(key).info

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, write: Write = PLAIN, *_: object
    ) -> ObjectInfo:
        head.check(write.metadata or {})
        version = source.version if isinstance(source, ObjectInfo) else source
        async with self._request("COPY", key):
            found = self._get(version.key)
            if found.info.version != version:
                raise StaleVersionError(version.key)
            if write.condition == IF_ABSENT and key in self.objects:
                raise ExistsError(key)
            attributes = dict(write.metadata or {})
            if write.metadata is None:
                attributes = dict(found.info.metadata or {})
            elif write.token is not None:
                attributes = write.stamped()
            if write.revise is not None:
                attributes = dict(write.revise(found.info) or attributes)
            self.put(key, found.data, **attributes)
        return self._get(key).info

    async def complete(self, upload: Upload, size: int, condition: Condition = None) -> ObjectInfo:
        return await upload.complete(size, condition)

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        async with self._request("DELETE", key):
            self._remove(key, None if adopts else etag)

    def _remove(self, key: str, etag: str | None) -> None:
        """Remove an object, unless it has another ETag than a known one."""
        if key in self.objects and etag in (None, self.objects[key].info.etag):
            del self.objects[key]

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        failures: list[DeleteFailure] = []
        self.requests.append(("DELETES", ""))
        await self.pause()
        for key in keys:
            try:
                self.before("DELETED", key)
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
                continue
            self._remove(key, (etags or {}).get(key))
            self.after("DELETED", key)
        return failures

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        return []

    async def abort_upload(self, key: str, upload_id: str) -> None:
        pass

    def hurry(self) -> None:
        pass


def failing(
    error: BaseException | type[BaseException], *requests: str | tuple[str, str]
) -> Callable[[str, str], None]:
    """A `before` or `after` that raises at requests of these kinds, or of a kind for a key."""

    def fail(what: str, key: str) -> None:
        if what in requests or (what, key) in requests:
            raise error

    return fail


class Stop:
    """The bucket does not answer one request until `go_on` is set, and then with an `error`."""

    def __init__(self, store: MemoryStore, what: str, key: str) -> None:
        self.reached = trio.Event()
        self.go_on = trio.Event()
        self.error: StoreError | None = None
        self._store = store
        self._at = what, key
        store.pause = self._pause

    async def _pause(self) -> None:
        if self._store.requests[-1] == self._at:
            self.reached.set()
            await self.go_on.wait()
            if self.error is not None:
                raise self.error


class HeldCopies:
    """Has the copies of a store have ETags of their own, as those of objects in parts do.

    With `holds` a copy that has been made is answered once `answer` is set; then `is_made` is set.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._objects = store.objects
        self._copy = store.copy
        self._numbers = itertools.count(1)
        self.holds = True
        self.is_made = trio.Event()
        self.answer = trio.Event()
        store.copy = self.copy  # type: ignore[method-assign]

    async def copy(self, source: ObjectInfo, key: str, *write: Any) -> ObjectInfo:
        made = await self._copy(source, key, *write)
        made = replace(made, etag=f'"{next(self._numbers):032x}-2"')
        self._objects[key].info = made
        if self.holds:
            self.is_made.set()
            await self.answer.wait()
        return made
