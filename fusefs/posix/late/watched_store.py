"""A store wrapper for writable mounts that records each change while it is under way.

For a key that is not uncertain, a change costs two copies into memory besides
the request itself (request_log.py). If one of its attempts got no answer, the
key is uncertain once the change has succeeded or failed (uncertain_keys.py).

A change of an uncertain key takes longer: it holds the key's lock, its content is copied to
the local disk before it is sent, and its result is recorded before it counts as acknowledged.
If no condition prevents requests of a killed process from undoing the change, the change first
waits until such requests are unlikely to come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import trio

from fusefs.posix.late.request_log import COPY, DELETE, PUT, Change
from fusefs.posix.late.uncertain_keys import ABSENT, KeyState, UncertainKey, UncertainKeys, boottime
from fusefs.store.contract import find
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.fencing import CHANGE
from fusefs.store.interface import (
    PLAIN,
    UNRECORDED,
    Condition,
    DeleteFailure,
    Expect,
    IfMatch,
    ObjectInfo,
    ObjectVersion,
    UnansweredChanges,
    UploadLog,
    WholeFileSink,
    Write,
)
from fusefs.store.s3.multipart import Upload
from fusefs.store.s3.requester import ChangeUnderWay
from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.late")

Result = TypeVar("Result")

_PIECE = 8 << 20
# Up to this size, a content that only the bucket has is downloaded before its change is
# acknowledged. A larger one would delay a close for too long, and is downloaded just after that.
FETCHED_AT_ONCE = 64 << 20
# The most attempts at a copy that late requests keep undoing.
TRIES = 5


class WatchedStore:
    """A `Store` that records changes while they are under way. Belongs to the event loop."""

    def __init__(
        self, store: S3Store, uncertain_keys: UncertainKeys, log: UploadLog = UNRECORDED
    ) -> None:
        """Wrap a store; `log` records the multipart uploads that the store begins by itself."""
        self.inner = store
        self._log = log
        self.uncertain_keys = uncertain_keys
        self.tokens = store.tokens
        self.unanswered: UnansweredChanges = uncertain_keys
        self._open = store.requester.changes
        self._copying = trio.CapacityLimiter(4)
        # Requests that change no object need no record.
        self.list_page = store.list_page
        self.head = store.head
        self.begin_upload = store.begin_upload
        self.resume_upload = store.resume_upload
        self.abort_upload = store.abort_upload
        self.list_uploads = store.list_uploads

    def close(self, *, remove: bool) -> None:
        """Close the records; `remove` them after the mount's end, unless a change is under way."""
        self.uncertain_keys.close(remove=remove and not self._open)

    # Changes

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        write = write.with_token(self.tokens)
        change = Change(PUT, key, (str(write.token),))
        send = partial(self.inner.put_file, key, fd, size, write, self._log)
        if self.uncertain_keys.get(key) is None:
            return await self.recorded(change, send)
        async with self._alone(key, is_covered=self._covers(key, write.condition)) as held:
            content = await self._copied(held, fd, size)
            with ExitStack() as undo:
                if content is not None:
                    undo.callback(self.uncertain_keys.remove, content)
                info = await self.recorded(change, send)
                undo.pop_all()
            self._acknowledged(held, info, content)
            return info

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, write: Write = PLAIN
    ) -> ObjectInfo:
        write = write.with_token(self.tokens)
        tokens, etag = [str(write.token)], ""
        if write.metadata is None:
            etag = source.etag
            if isinstance(source, ObjectInfo) and source.token is not None:
                tokens.append(str(source.token))
        change = Change(COPY, key, tuple(tokens), etag)
        send = partial(self.inner.copy, source, key, write, self._log)
        if self.uncertain_keys.get(key) is None:
            return await self.recorded(change, send)
        is_covered = key != source.key and self._covers(key, write.condition)
        async with self._alone(key, is_covered=is_covered) as held:
            for _ in range(TRIES):
                info = await self.recorded(change, send)
                if await self._acknowledge_anew(held, info):
                    return info
            raise StoreError(f"late requests of this mount undo each copy to {key}")

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        change, send = Change(DELETE, key), partial(self.inner.delete, key, etag, adopts=adopts)
        if self.uncertain_keys.get(key) is None:
            await self.recorded(change, send)
            return
        async with self._alone(key, is_covered=False) as held:
            await self.recorded(change, send)
            self._acknowledged(held, ABSENT, None)

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        keys = list(keys)
        async with AsyncExitStack() as stack:
            held = [
                await stack.enter_async_context(self._alone(key, is_covered=False))
                for key in sorted(keys)
                if self.uncertain_keys.get(key) is not None
            ]
            opened = ChangeUnderWay(frozenset([*keys, ""]))  # a DeleteObjects request has no key
            self._open.add(opened)
            batch = self.uncertain_keys.log.begin_batch(keys)
            try:
                failures = await self.inner.delete_many(keys, etags)
            finally:
                self._open.remove(opened)
                if opened.is_doubtful:
                    for key in keys:
                        self.uncertain_keys.note_unanswered(Change(DELETE, key))
                self.uncertain_keys.log.end_batch(batch)
            failed = {failure.key for failure in failures}
            for entry in held:
                if entry.key not in failed:
                    self._acknowledged(entry, ABSENT, None)
            return failures

    async def complete(self, upload: Upload, size: int, condition: Condition = None) -> ObjectInfo:
        key = upload.state.key
        change = Change(PUT, key, (upload.state.metadata.get(CHANGE, ""),))
        send = partial(upload.complete, size, condition)
        if self.uncertain_keys.get(key) is None:
            return await self.recorded(change, send)
        async with self._alone(key, is_covered=self._covers(key, condition)) as held:
            info = await self.recorded(change, send)
            if not await self._acknowledge_anew(held, info):
                raise NotFoundError(f"{key} was undone by a late request of this mount")
            return info

    # Records and locks of changes

    async def recorded(self, change: Change, send: Callable[[], Awaitable[Result]]) -> Result:
        """Send a change of one key, which is recorded until it is answered or given up."""
        opened = ChangeUnderWay((change.key,))
        self._open.add(opened)
        slot = self.uncertain_keys.log.begin(change)
        try:
            return await send()
        finally:
            self._open.remove(opened)
            if opened.is_doubtful:
                self.uncertain_keys.note_unanswered(change)
            self.uncertain_keys.log.end(slot)

    @asynccontextmanager
    async def _alone(self, key: str, *, is_covered: bool) -> AsyncIterator[UncertainKey]:
        """Lock a key; unless a condition guards the change (`is_covered`), await `waits_until`."""
        while True:
            entry = self.uncertain_keys.get(key)
            if entry is None:
                # The key has become certain while this task waited.
                entry = UncertainKey(key, 0, 0.0, is_over=True)
            async with entry.lock:
                if entry.is_over and self.uncertain_keys.get(key) is not None:
                    continue
                if not is_covered and (wait_s := entry.waits_until - boottime()) > 0:
                    await trio.sleep(wait_s)
                yield entry
                return

    def _covers(self, key: str, condition: Condition) -> bool:
        """True if a condition prevents requests of a killed process from undoing a change."""
        if isinstance(condition, Expect):
            condition = IfMatch(condition.etag)
        return self.inner.fence.relies_on("PUT", condition) and not key.endswith("/")

    def _acknowledged(self, entry: UncertainKey, state: KeyState, content: str | None) -> None:
        """Record a key's state after a change; delete the file `content` if the key is certain."""
        if not entry.is_over:
            self.uncertain_keys.expect(entry, state, content)
        elif content is not None:
            self.uncertain_keys.remove(content)

    async def confirm(self, key: str, found: ObjectInfo | None) -> None:
        entry = self.uncertain_keys.get(key)
        if entry is None:
            return
        if found is None:  # without the lock, so that a repair that is under way notices
            self.uncertain_keys.expect(entry, ABSENT, None)
            return
        async with self._alone(key, is_covered=True) as held:
            there = await find(self.inner, key)
            is_same = there is not None and (there.etag, there.token) == (found.etag, found.token)
            if not is_same or not await self._acknowledge_anew(held, found):
                raise StoreError(f"{key} was undone by a late request of this mount")

    async def adopt(self, entry: UncertainKey, found: KeyState) -> None:
        """Expect the state that an unanswered request after the last acknowledged change has made.

        The content of the older state is kept as long as that of the newer one is not here.
        """
        content, older = None, entry.expected
        if isinstance(found, ObjectInfo):
            if isinstance(older, ObjectInfo) and older.etag == found.etag:
                content = entry.content
            elif found.size <= FETCHED_AT_ONCE:
                with suppress(NotFoundError, StaleVersionError):
                    content = await self._fetched(entry, found)
            if content is None and found.size and entry.content is not None:
                return
        self.uncertain_keys.expect(entry, found, content, is_acknowledged=False)

    async def current_state(self, key: str) -> KeyState:
        """Request the state of a key: its object, or ABSENT."""
        return await find(self.inner, key) or ABSENT

    async def _acknowledge_anew(self, entry: UncertainKey, info: ObjectInfo) -> bool:
        """Record a key's state after a change; download its content, which only the bucket has.

        Returns False if a late request has undone the change already. Then the change must not be
        acknowledged, because the caller may remove the source next.

        Raises:
            StoreError: the object is gone, and the HEAD for the key's state failed.
        """
        if entry.is_over:
            return True
        if info.metadata is None:
            with suppress(StoreError):
                found = await self.inner.head(info.key)
                if found.etag == info.etag:  # else another object has replaced it already
                    info = found
        content = entry.content
        expected = entry.expected
        if content is None or not isinstance(expected, ObjectInfo) or expected.etag != info.etag:
            is_small = info.size <= FETCHED_AT_ONCE
            try:
                content = await self._fetched(entry, info) if is_small else None
            except (NotFoundError, StaleVersionError):
                if entry.possible_makers(await self.current_state(info.key)):
                    return False
                content = None
        self.uncertain_keys.expect(entry, info, content)
        if info.size and content is None:
            self.uncertain_keys.check_soon(entry)  # it fetches the content
        return True

    async def fetch_content(self, entry: UncertainKey) -> None:
        """Download a key's expected content if the disk lacks it; drop it if the key changes."""
        info = entry.expected
        if not isinstance(info, ObjectInfo) or entry.content is not None:
            return
        content = None
        with suppress(NotFoundError, StaleVersionError):
            content = await self._fetched(entry, info)
        if content is None:
            return
        if entry.is_over or entry.expected is not info or entry.content is not None:
            self.uncertain_keys.remove(content)
            return
        entry.content = content
        self.uncertain_keys.record(entry)

    # The copies of contents

    async def _copied(self, entry: UncertainKey, fd: int, size: int) -> str | None:
        """Copy a file before it is sent; return the copy's name, None if empty or not copied."""
        if entry.is_over or not size:
            return None
        path = self.uncertain_keys.content_path(entry)
        try:
            await trio.to_thread.run_sync(_copy_file, fd, size, path, limiter=self._copying)
        except OSError as error:
            _warn_not_kept(entry, error)
            return None
        return path.name

    async def _fetched(self, entry: UncertainKey, info: ObjectInfo) -> str | None:
        """Download an object's content; return the file's name, None if empty or after a failure.

        Raises StaleVersionError or NotFoundError if the object is gone.
        """
        if not info.size:
            return None
        path = self.uncertain_keys.content_path(entry)
        try:
            with _new_file(path) as file:
                await self.inner.download(info.version, 0, info.size, WholeFileSink(file.fileno()))
        except (NotFoundError, StaleVersionError):
            raise
        except (OSError, StoreError) as error:
            _warn_not_kept(entry, error)
            return None
        return path.name


def _warn_not_kept(entry: UncertainKey, error: Exception) -> None:
    logger.warning(
        "%s: a late request could undo it for good, it is not kept here: %s", entry.key, error
    )


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file, in a directory that only this user can read; remove it on failure."""
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        with open(path, "xb") as file:
            yield file
        undo.pop_all()


def _copy_file(fd: int, size: int, path: Path) -> None:
    """Copy the first `size` bytes of the open file `fd` to a new file. Blocks."""
    with _new_file(path) as copy:
        while missing := size - copy.tell():
            piece = os.pread(fd, min(_PIECE, missing), copy.tell())
            if not piece:
                raise OSError("the file is shorter than it was")
            copy.write(piece)
