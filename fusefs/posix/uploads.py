"""Staged files on their way into the bucket.

An upload is a task of its own: who waits for it may be cancelled (a program
that is killed in its close), and it goes on. It holds the file's lock, so
that writes wait and no object is a mix of two contents. Attributes that
changed alone are a copy on the server.

A file that grows from its start on is sent while it is being written: each
part as soon as it is full, so that close has to wait for the last ones only.
Such an upload is on record before its first part, and another process goes on
with it: what the bucket has, and the file still has, is not sent again.

What failed stays staged and dirty, and whoever waits is told. Rejected
credentials are no failure: the upload waits until they are renewed.
"""

from __future__ import annotations

import errno
import logging
import mimetypes
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import trio

from fusefs.posix.editing import Base, Editor
from fusefs.posix.staging import Staged, Staging
from fusefs.store.base import IF_ABSENT, Condition, IfMatch, ObjectInfo, Store, Upload, UploadState
from fusefs.store.errors import (
    ConflictError,
    CredentialsError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
)

logger = logging.getLogger("fusefs.uploads")

# From this size on a file goes up in parts.
IN_PARTS = 8 << 20
# A file is sent while it is written once it has this much, which is two parts.
AHEAD = 16 << 20
COPIES_AT_ONCE = 8
# How often it is tried again with credentials that were rejected.
CREDENTIALS_S = 5.0
# S3 tells when an upload was begun in whole seconds, and by its own clock.
CLOCKS_NS = 5_000_000_000


class Attempt:
    """One upload of one file. `scope` may be cancelled while `is_cancellable`."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.hurry = trio.Event()
        self.error: Exception | None = None
        self.scope = trio.CancelScope()
        self.is_cancellable = True


class Ahead:
    """The sending of a file while it is being written."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.is_last = False


class Uploads:
    """The uploads of one mount. Belongs to the event loop.

    `landed` is told what the bucket has of a file, and `kept_apart` what it was
    kept as because somebody else's object (or nothing) is under its key.
    """

    def __init__(
        self,
        store: Store,
        staging: Staging,
        editor: Editor,
        nursery: trio.Nursery,
        landed: Callable[[Staged, ObjectInfo], None],
        kept_apart: Callable[[Staged, ObjectInfo, ObjectInfo | None], None],
        *,
        fails_on_conflict: bool,
        sends_ahead: bool,
    ) -> None:
        self._store = store
        self._staging = staging
        self._editor = editor
        self._nursery = nursery
        self._landed = landed
        self._kept_apart = kept_apart
        self._fails_on_conflict = fails_on_conflict
        self._sends_ahead = sends_ahead
        self._attempts: dict[Staged, Attempt] = {}
        self._aheads: dict[Staged, Ahead] = {}

    # Asking for it

    async def wait(self, staged: Staged) -> None:
        """Have the content and what belongs to it as of now in the bucket.

        Cancelling leaves the upload going on.

        Raises:
            StoreError, OSError: it is not there; it stays staged.
        """
        wanted = staged.changes
        while staged.is_dirty and (staged.uploaded < wanted or staged.is_meta_dirty):
            attempt = self._attempts.get(staged) or self.start(staged)
            attempt.hurry.set()
            await attempt.done.wait()
            if attempt.error is not None:
                raise attempt.error

    def start(self, staged: Staged, delay_s: float = 0.0) -> Attempt:
        """Have a file uploaded, after a while; whoever waits for it cuts that short."""
        attempt = self._attempts.get(staged)
        if attempt is None:
            attempt = self._attempts[staged] = Attempt()
            self._nursery.start_soon(self._run, staged, attempt, delay_s)
        return attempt

    async def ended(self, staged: Staged) -> None:
        """Wait until a file's upload, if there is one, has come to its end, good or bad."""
        attempt = self._attempts.get(staged)
        if attempt is not None:
            await attempt.done.wait()

    def is_under_way(self, staged: Staged) -> bool:
        return staged in self._attempts

    @asynccontextmanager
    async def held(self, staged: Staged) -> AsyncIterator[None]:
        """Keep a file from being written or uploaded, to give it another key or none.

        An upload under way is cancelled where that leaves nothing in the
        bucket, else waited for. Who waits for it will have it under the new key.
        """
        attempt = self._attempts.get(staged)
        if attempt is not None and attempt.is_cancellable:
            attempt.scope.cancel()
        await self._stop_ahead(staged)
        async with staged.lock:
            key = staged.key
            yield
            if staged.key != key or staged.is_unlinked:
                await self._abandon(staged)

    async def _run(self, staged: Staged, attempt: Attempt, delay_s: float) -> None:
        try:
            with trio.move_on_after(delay_s):
                await attempt.hurry.wait()
            while staged.is_dirty:
                with attempt.scope:
                    async with staged.lock:
                        await self._upload(staged, attempt)
                if not attempt.scope.cancelled_caught:
                    break
                attempt.scope = trio.CancelScope()
            staged.error = None
        except (StoreError, OSError) as error:
            staged.error = attempt.error = error
            logger.warning("%s is not in the bucket yet: %s", staged.key, error)
        finally:
            del self._attempts[staged]
            attempt.done.set()

    async def _upload(self, staged: Staged, attempt: Attempt) -> None:
        """Upload a file that is locked, also with credentials that come later."""
        while staged.is_dirty:
            try:
                info = await self._send(staged, attempt)
                base = staged.base
                if base is not None and base.file.is_complete:
                    # So that the new version is as whole in the cache as the old one was.
                    await self._editor.fill(base, staged.fd, 0, base.size)
                self._note_uploaded(staged, info)
                self._landed(staged, info)
                return
            except CredentialsError as error:
                staged.error = error
                logger.warning("%s waits for other credentials: %s", staged.key, error)
            except (ConflictError, StaleVersionError) as error:
                if not self._is_careful(staged):
                    raise
                if await self._keep_apart(staged):
                    return
                raise OSError(errno.ESTALE, "somebody else has replaced the object") from error
            finally:
                attempt.is_cancellable = True
            await trio.sleep(CREDENTIALS_S)

    def _note_uploaded(self, staged: Staged, info: ObjectInfo) -> None:
        """The bucket has what the file, which is locked, has now."""
        staged.meta = replace(staged.described(), mtime_ns=None)
        staged.uploaded = staged.changes
        staged.is_meta_dirty = staged.is_closed = staged.is_leftover = False
        staged.etag = info.etag
        self._staging.rebase(staged, info.version)

    # Sending

    async def _send(self, staged: Staged, attempt: Attempt) -> ObjectInfo:
        size = staged.size()
        if not staged.is_content_dirty and staged.etag is not None:
            attempt.is_cancellable = False
            return await self._describe(staged)
        if staged.upload_state is None and staged.upload is None and size <= IN_PARTS:
            # A request that was cancelled may come to pass all the same.
            if staged.base is not None:
                await self._editor.fill(staged.base, staged.fd, 0, size)
            attempt.is_cancellable = False
            return await self._store.put_file(
                staged.key, staged.fd, size, metadata=staged.metadata(),
                content_type=content_type(staged.key), condition=self._condition(staged),
            )  # fmt: skip
        return await self._send_parts(staged, attempt, size)

    def _condition(self, staged: Staged) -> Condition:
        if not self._is_careful(staged):
            return None
        return IF_ABSENT if staged.etag is None else IfMatch(staged.etag)

    def _is_careful(self, staged: Staged) -> bool:
        """Whether somebody else's object is not to be replaced."""
        return self._fails_on_conflict or staged.is_leftover

    async def _describe(self, staged: Staged) -> ObjectInfo:
        """Have the object say what the file's attributes are now."""
        version = staged.inode.info
        assert version is not None
        try:
            return await self._store.copy(version.version, staged.key, metadata=staged.metadata())
        except (NotFoundError, StaleVersionError):
            if self._is_careful(staged):
                raise
            # Somebody else has removed or replaced it: the last one to change it is here.
            staged.changes += 1
            return await self._store.put_file(
                staged.key, staged.fd, staged.size(), metadata=staged.metadata(),
                content_type=content_type(staged.key),
            )  # fmt: skip

    async def _send_parts(self, staged: Staged, attempt: Attempt, size: int) -> ObjectInfo:
        ahead = self._aheads.get(staged)
        if ahead is not None:
            ahead.is_last = True
            if staged.upload is None:
                await ahead.done.wait()  # it is just beginning
        upload = await self._resumed(staged, size)
        if upload is None and size:
            upload = await self._begun(staged, staged.metadata())
        if upload is None:
            attempt.is_cancellable = False
            return await self._store.put_file(
                staged.key, staged.fd, 0, metadata=staged.metadata(),
                content_type=content_type(staged.key), condition=self._condition(staged),
            )  # fmt: skip
        try:
            if staged.base is not None:
                await self._copy_parts(staged, staged.base, upload, size)
            await upload.send(staged.fd, upload.missing(size), size)
            attempt.is_cancellable = False
            info = await upload.complete(size, self._condition(staged))
        except NotFoundError:
            # Somebody has aborted it, or the bucket's own rules have.
            staged.upload = staged.upload_state = None
            self._staging.record(staged)
            raise
        staged.upload = staged.upload_state = None
        return await self._corrected(staged, upload, info)

    async def _copy_parts(self, staged: Staged, base: Base, upload: Upload, size: int) -> None:
        """Have S3 copy the parts that nobody wrote to, and bring what the others lack."""
        limiter = trio.CapacityLimiter(COPIES_AT_ONCE)

        async def settle(number: int) -> None:
            start, stop = upload.part_range(number, size)
            async with limiter:
                if base.keeps(start, stop):
                    with suppress(NotFoundError, StaleVersionError, UnsupportedError):
                        await upload.copy_part(number, base.version, start, stop)
                        return
                await self._editor.fill(base, staged.fd, start, stop)

        async with trio.open_nursery(strict_exception_groups=False) as nursery:
            for number in upload.missing(size):
                nursery.start_soon(settle, number)

    async def _corrected(self, staged: Staged, upload: Upload, info: ObjectInfo) -> ObjectInfo:
        """Have a new object say what was not known when its upload was begun."""
        said, wanted = dict(upload.state.metadata), staged.metadata()
        if "mtime" not in said:
            wanted.pop("mtime", None)
        if said != wanted:
            info = await self._store.copy(info.version, staged.key, metadata=staged.metadata())
        elif "mtime" not in said:
            # The time that everybody else sees.
            os.utime(staged.fd, ns=(info.mtime_ns, info.mtime_ns))
        return info

    async def _begun(self, staged: Staged, metadata: dict[str, str]) -> Upload:
        """Begin an upload, which is on record before and after."""
        staged.begun_ns = time.time_ns()
        self._staging.record(staged)
        staged.upload = await self._store.begin_upload(
            staged.key, metadata=metadata, content_type=content_type(staged.key)
        )
        staged.begun_ns = None
        self._staging.record(staged)
        return staged.upload

    async def _resumed(self, staged: Staged, size: int) -> Upload | None:
        """The upload that is under way, if there is one and it can be gone on with."""
        if staged.begun_ns is not None:
            await self._abort_lost(staged.key, staged.begun_ns)
            staged.begun_ns = None
        state = staged.upload_state
        if staged.upload is None and state is not None:
            try:
                if state.key == staged.key:
                    staged.upload = await self._store.resume_upload(state)
                    await staged.upload.verify(staged.fd, size)
                else:
                    await self._store.abort_upload(state.key, state.upload_id)
            except NotFoundError:
                staged.upload = None
            staged.upload_state = None
        if staged.upload is not None and not size:
            await self._abandon(staged)
        return staged.upload

    async def _abort_lost(self, key: str, begun_ns: int) -> None:
        """Abort what was begun for a key when its process died before it knew the id."""
        for lost in await self._store.list_uploads(key):
            if lost.key == key and lost.begun_ns >= begun_ns - CLOCKS_NS:
                await self._store.abort_upload(lost.key, lost.upload_id)

    async def _abandon(self, staged: Staged) -> None:
        """Give up the upload that is under way, if there is one; the record goes last."""
        upload = staged.upload.state if staged.upload is not None else staged.upload_state
        if upload is None and staged.begun_ns is None:
            return
        await self._abort(staged.key, upload, staged.begun_ns)
        staged.upload = staged.upload_state = staged.begun_ns = None
        self._staging.record(staged)

    async def _abort(self, key: str, upload: UploadState | None, begun_ns: int | None) -> None:
        try:
            if begun_ns is not None:
                await self._abort_lost(key, begun_ns)
            if upload is not None:
                await self._store.abort_upload(upload.key, upload.upload_id)
        except StoreError as error:
            logger.warning("%s: its upload could not be aborted: %s", key, error)

    def abort_later(self, key: str, upload: Mapping[str, Any] | None, begun_ns: int | None) -> None:
        """Abort what an earlier process has left of a file that is not to be uploaded."""
        state = UploadState.from_plain(upload) if upload is not None else None
        if state is not None or begun_ns is not None:
            self._nursery.start_soon(self._abort, key, state, begun_ns)

    async def _keep_apart(self, staged: Staged) -> bool:
        """Keep the content under a key of its own, beside the object that somebody else made.

        Tells whether the object is this very content, which a process
        uploaded that died before it could say so.
        """
        await self._abandon(staged)
        try:
            theirs = await self._store.head(staged.key)
        except NotFoundError:
            theirs = None
        if theirs is not None and _is_content_of(theirs, staged):
            self._note_uploaded(staged, theirs)
            self._landed(staged, theirs)
            return True
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        key = f"{staged.key}.conflict-{os.uname().nodename}-{stamp}"
        if staged.base is not None:
            await self._editor.fill(staged.base, staged.fd, 0, staged.size())
        info = await self._store.put_file(
            key, staged.fd, staged.size(), metadata=staged.metadata(),
            content_type=content_type(staged.key),
        )  # fmt: skip
        logger.error("%s was replaced by somebody else: this content is in %s", staged.key, key)
        self._note_uploaded(staged, info)
        self._kept_apart(staged, info, theirs)
        return False

    # While it is written

    def wrote(self, staged: Staged, start: int, stop: int) -> None:
        """Note that the bytes [start, stop) have been written."""
        staged.touch()
        if staged.base is not None:
            staged.base.wrote(start, stop)
        self._drop(staged, start, stop)
        if start <= staged.written_to < stop:
            # A part is full with every few writes; looking each time would cost more.
            is_full = staged.written_to // IN_PARTS < stop // IN_PARTS
            staged.written_to = stop
            if is_full and stop >= AHEAD and self._sends_ahead:
                self._send_ahead(staged)

    def truncated(self, staged: Staged, size: int) -> None:
        """Note that the file is `size` bytes long now."""
        staged.touch()
        if staged.base is not None:
            staged.base.size = min(staged.base.size, size)
            self._staging.record(staged)
        self._drop(staged, size, max(size, staged.written_to) + 1)
        staged.written_to = min(staged.written_to, size)

    def _drop(self, staged: Staged, start: int, stop: int) -> None:
        """Forget the parts of which the file has other bytes now."""
        upload = staged.upload
        if upload is not None:
            for number in range(upload.part_at(start), upload.part_at(stop - 1) + 1):
                upload.drop(number)

    def _send_ahead(self, staged: Staged) -> None:
        """Have the full parts sent, if nobody does that already."""
        if staged in self._aheads or staged.upload_state is not None or staged.is_unlinked:
            return
        if staged.upload is None or _full_parts(staged, staged.upload):
            ahead = self._aheads[staged] = Ahead()
            self._nursery.start_soon(self._run_ahead, staged, ahead)

    async def _run_ahead(self, staged: Staged, ahead: Ahead) -> None:
        try:
            with ahead.scope:
                upload = staged.upload
                if upload is None:
                    # The time of the content is known at the end only.
                    metadata = replace(staged.described(), mtime_ns=None).as_metadata()
                    upload = await self._begun(staged, metadata)
                while not ahead.is_last and (parts := _full_parts(staged, upload)):
                    await upload.send(staged.fd, parts, staged.written_to)
                    # Not every store tells of parts as much as it takes to know them again.
                    self._staging.record(staged)
        except (StoreError, OSError) as error:
            logger.info("%s could not be sent while it is written: %s", staged.key, error)
        finally:
            del self._aheads[staged]
            ahead.done.set()

    async def _stop_ahead(self, staged: Staged) -> None:
        ahead = self._aheads.get(staged)
        if ahead is not None:
            ahead.scope.cancel()
            await ahead.done.wait()


def _full_parts(staged: Staged, upload: Upload) -> list[int]:
    """The parts that are written to their end and that the bucket does not have."""
    return [n for n in range(1, upload.part_at(staged.written_to)) if not upload.has(n)]


def _is_content_of(info: ObjectInfo, staged: Staged) -> bool:
    """Whether an object says of itself what this file says, to the nanosecond."""
    told = (info.metadata or {}).get("mtime")
    return info.size == staged.size() and told == staged.metadata()["mtime"]


def content_type(key: str) -> str | None:
    """What a browser would take an object for, by its name."""
    return mimetypes.guess_type(key)[0]
