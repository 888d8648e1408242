"""The store of a writable mount: each change is on record while it is under way.

A change of a key that no request is out for costs two copies into memory beside
the request itself (request_log.py). Where an attempt of it got no answer, the
key is uncertain once the change has ended, well or badly (late_requests.py).

A change of an uncertain key takes longer: it is made alone, its content is
copied to the local disk before it is sent, and what it made of the key is on
record before it counts as acknowledged. Where the store's conditions do not
keep a request of a killed process from undoing it, it waits until such a
request is unlikely.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from fusefs.posix.late_requests import LateRequests, State, Uncertain, boottime
from fusefs.posix.request_log import COPY, DELETE, PUT, Change
from fusefs.posix.segments import ABSENT
from fusefs.store.base import (
    Condition,
    DeleteFailure,
    ObjectInfo,
    ObjectVersion,
    Upload,
    UploadState,
)
from fusefs.store.errors import StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.s3 import S3Store

logger = logging.getLogger("fusefs.late")

_PIECE = 8 << 20
# A content that is in the bucket alone is fetched before its change is acknowledged, up to this
# size; what is larger would hold up a close for too long, and is fetched at the next look.
FETCHED_AT_ONCE = 64 << 20


class _Open:
    """A change that is under way; `keys` has more than one for a DeleteObjects request."""

    __slots__ = ("change", "is_doubtful", "keys")

    def __init__(self, change: Change, keys: Iterable[str] = ()) -> None:
        self.change = change
        self.keys = frozenset(keys)
        self.is_doubtful = False

    def concerns(self, key: str) -> bool:
        return key == self.change.key or key in self.keys


class WatchedStore:
    """As `Store`; belongs to the event loop."""

    def __init__(self, store: S3Store, late: LateRequests) -> None:
        self.inner = store
        self.late = late
        self.tokens = store.tokens
        self._open: set[_Open] = set()
        self._copying = trio.CapacityLimiter(4)
        store.unanswered = self._unanswered
        # What changes nothing is the store's.
        self.list_page = store.list_page
        self.head = store.head
        self.download = store.download
        self.abort_upload = store.abort_upload
        self.list_uploads = store.list_uploads
        self.hurry = store.hurry
        self.counters = store.counters

    def _unanswered(self, key: str) -> None:
        """An attempt of a change got no answer."""
        for one in self._open:
            if one.concerns(key):
                one.is_doubtful = True

    def close(self, *, remove: bool) -> None:
        """Nothing is under way any more; with `remove` the mount has ended."""
        self.late.close(remove=remove and not self._open)

    def is_uncertain(self, key: str) -> bool:
        """Whether a request without an answer may change a key still."""
        return self.late.get(key) is not None

    # Changes

    async def put_file(
        self, key: str, fd: int, size: int, *, metadata: Mapping[str, str],
        content_type: str | None, condition: Condition = None, token: ChangeToken | None = None,
    ) -> ObjectInfo:  # fmt: skip
        """As `Store.put_file`."""
        token = token or self.tokens.next()
        change = Change(PUT, key, (str(token),))
        entry = self.late.get(key)
        if entry is None:
            opened, slot = self.begin(change)
            try:
                return await self.inner.put_file(
                    key, fd, size, metadata=metadata, content_type=content_type,
                    condition=condition, token=token,
                )  # fmt: skip
            finally:
                self.end(opened, slot)
        async with self._alone(key, is_covered=self._covers(key, condition)) as held:
            content = await self._copied(held, fd, size)
            opened, slot = self.begin(change)
            try:
                info = await self.inner.put_file(
                    key, fd, size, metadata=metadata, content_type=content_type,
                    condition=condition, token=token,
                )  # fmt: skip
            except BaseException:
                if content is not None:
                    (self.late.directory / content).unlink(missing_ok=True)
                raise
            finally:
                self.end(opened, slot)
            self._acknowledged(held, info, content)
            return info

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, *,
        metadata: Mapping[str, str] | None = None, keeps_mtime: bool = False,
        condition: Condition = None, token: ChangeToken | None = None, is_own: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """As `Store.copy`."""
        token = token or self.tokens.next()
        tokens, etag = [str(token)], ""
        if metadata is None:
            etag = source.etag
            if isinstance(source, ObjectInfo) and source.token is not None:
                tokens.append(str(source.token))
        change = Change(COPY, key, tuple(tokens), etag)

        async def send() -> ObjectInfo:
            opened, slot = self.begin(change)
            try:
                return await self.inner.copy(
                    source, key, metadata=metadata, keeps_mtime=keeps_mtime, condition=condition,
                    token=token, is_own=is_own,
                )  # fmt: skip
            finally:
                self.end(opened, slot)

        if self.late.get(key) is None:
            return await send()
        is_covered = key != source.key and self._covers(key, condition)
        async with self._alone(key, is_covered=is_covered) as held:
            info = await send()
            await self._acknowledge_anew(held, info)
            return info

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        """As `Store.delete`."""
        change = Change(DELETE, key)

        async def send() -> None:
            opened, slot = self.begin(change)
            try:
                await self.inner.delete(key, etag, adopts=adopts)
            finally:
                self.end(opened, slot)

        if self.late.get(key) is None:
            await send()
            return
        async with self._alone(key, is_covered=False) as held:
            await send()
            self._acknowledged(held, ABSENT, None)

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        """As `Store.delete_many`."""
        keys = list(keys)
        async with AsyncExitStack() as stack:
            held = [
                await stack.enter_async_context(self._alone(key, is_covered=False))
                for key in sorted(keys)
                if self.late.get(key) is not None
            ]
            opened = _Open(Change(DELETE, keys[0] if keys else ""), keys)
            batch = self.late.log.begin_batch(keys)
            self._open.add(opened)
            try:
                failures = await self.inner.delete_many(keys, etags)
            finally:
                self._open.remove(opened)
                if opened.is_doubtful:
                    for key in keys:
                        self.late.note(Change(DELETE, key))
                self.late.log.end_batch(batch)
            failed = {failure.key for failure in failures}
            for entry in held:
                if entry.key not in failed:
                    self._acknowledged(entry, ABSENT, None)
            return failures

    async def begin_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str | None,
        token: ChangeToken | None = None,
    ) -> Upload:  # fmt: skip
        """As `Store.begin_upload`."""
        upload = await self.inner.begin_upload(
            key, metadata=metadata, content_type=content_type, token=token
        )
        return _WatchedUpload(upload, self)

    async def resume_upload(self, state: UploadState) -> Upload:
        """As `Store.resume_upload`."""
        return _WatchedUpload(await self.inner.resume_upload(state), self)

    async def complete(self, upload: Upload, size: int, condition: Condition) -> ObjectInfo:
        """As `Upload.complete`; executed late it fails, for the upload is gone by then."""
        key = upload.state.key
        if self.late.get(key) is None:
            return await upload.complete(size, condition)
        async with self._alone(key, is_covered=self._covers(key, condition)) as held:
            info = await upload.complete(size, condition)
            await self._acknowledge_anew(held, info)
            return info

    # What they have in common

    def begin(self, change: Change) -> tuple[_Open, int]:
        """Put a change on record that is about to be sent; `end` takes what this returns."""
        opened = _Open(change)
        self._open.add(opened)
        return opened, self.late.log.begin(change)

    def end(self, opened: _Open, slot: int) -> None:
        """The change has been answered, or given up."""
        self._open.remove(opened)
        if opened.is_doubtful:
            self.late.note(opened.change)
        self.late.log.end(slot)

    @asynccontextmanager
    async def _alone(self, key: str, *, is_covered: bool) -> AsyncIterator[Uncertain]:
        """Change an uncertain key while nobody else does.

        Its record stays until the end, also when its time is over meanwhile.
        """
        while True:
            entry = self.late.get(key)
            if entry is None:
                # Its time was over while this waited: it may be kept for this change as well.
                entry = Uncertain(key, 0, 0.0, is_over=True)
            async with entry.lock:
                if entry.is_over and self.late.get(key) is not None:
                    continue
                if not is_covered and (wait_s := entry.settled_at - boottime()) > 0:
                    await trio.sleep(wait_s)
                yield entry
                return

    def _covers(self, key: str, condition: Condition) -> bool:
        """Whether a condition keeps a request of a killed process from undoing a change."""
        is_relied_on = condition is not None and self.inner.fence.relies_on("put_if_match")
        return is_relied_on and not key.endswith("/")

    def _acknowledged(self, entry: Uncertain, state: State, content: str | None) -> None:
        """A change of an uncertain key has been answered."""
        if not entry.is_over:
            self.late.expect(entry, state, content)
        elif content is not None:
            (self.late.directory / content).unlink(missing_ok=True)

    async def _acknowledge_anew(self, entry: Uncertain, info: ObjectInfo) -> None:
        """As `_acknowledged`, of a content that is in the bucket alone, and is fetched."""
        if entry.is_over:
            return
        if info.metadata is None:
            with suppress(StoreError):
                found = await self.inner.head(info.key)
                if found.etag == info.etag:  # else something has replaced it already
                    info = found
        content = entry.content
        expected = entry.expected
        if content is None or not isinstance(expected, ObjectInfo) or expected.etag != info.etag:
            is_small = info.size <= FETCHED_AT_ONCE
            content = await self._fetched(entry, info) if is_small else None
        self.late.expect(entry, info, content)

    async def fetch_content(self, entry: Uncertain) -> None:
        """Have a copy of the content that is expected under a key, if there is none yet.

        The key may be changed meanwhile.
        """
        info = entry.expected
        if not isinstance(info, ObjectInfo) or entry.content is not None:
            return
        content = await self._fetched(entry, info)
        if content is None:
            return
        if entry.is_over or entry.expected is not info or entry.content is not None:
            (self.late.directory / content).unlink(missing_ok=True)
            return
        entry.content = content
        self.late.record(entry)

    # The copies of contents

    async def _copied(self, entry: Uncertain, fd: int, size: int) -> str | None:
        """Copy a content that is about to be sent; None if it is empty, or the disk is full."""
        if entry.is_over or not size:
            return None
        path = self.late.content_path(entry)
        try:
            await trio.to_thread.run_sync(_copy_file, fd, size, path, limiter=self._copying)
        except OSError as error:
            self._not_kept(entry, path, error)
            return None
        return path.name

    async def _fetched(self, entry: Uncertain, info: ObjectInfo) -> str | None:
        if not info.size:
            return None
        path = self.late.content_path(entry)
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            write_fd = fd
            await self.inner.download(
                info.version, 0, info.size,
                lambda offset, chunk: _write(write_fd, offset, chunk),
            )  # fmt: skip
        except (OSError, StoreError) as error:
            self._not_kept(entry, path, error)
            return None
        finally:
            if fd >= 0:
                os.close(fd)
        return path.name

    def _not_kept(self, entry: Uncertain, path: Path, error: Exception) -> None:
        path.unlink(missing_ok=True)
        logger.warning(
            "%s: a late request could undo it for good, it is not kept here: %s", entry.key, error
        )


class _WatchedUpload:
    """A multipart upload, whose completion may concern an uncertain key."""

    def __init__(self, upload: Upload, store: WatchedStore) -> None:
        self._upload = upload
        self._watched = store
        self.part_at = upload.part_at
        self.part_range = upload.part_range
        self.part_count = upload.part_count
        self.has = upload.has
        self.missing = upload.missing
        self.drop = upload.drop
        self.send = upload.send
        self.copy_part = upload.copy_part
        self.verify = upload.verify

    @property
    def state(self) -> UploadState:
        return self._upload.state

    async def complete(self, size: int, condition: Condition = None) -> ObjectInfo:
        """As `Upload.complete`."""
        return await self._watched.complete(self._upload, size, condition)


def _copy_file(fd: int, size: int, path: Path) -> None:
    """Copy the first `size` bytes of a file. Blocks."""
    with path.open("xb") as file:
        done = 0
        while done < size:
            piece = os.pread(fd, min(_PIECE, size - done), done)
            if not piece:
                raise OSError("the file is shorter than it was")
            file.write(piece)
            done += len(piece)


def _write(fd: int, offset: int, chunk: Any) -> None:
    """Write a chunk where it belongs. Blocks."""
    view = memoryview(chunk)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
