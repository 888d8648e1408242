"""The requests that upload a staged file: one PUT, a multipart upload, or a copy on the server.

Changed attributes alone are sent as a copy of the object onto itself. A large file is sent in
parts; its upload is recorded before its first part, so that another process can continue it: parts
that the bucket has and that still match the file are not sent again. For an edited object, parts
that no program wrote to are copied on the server.

A content that programs have written from scratch (O_TRUNC) replaces whatever object the
bucket has (condition `Expect`). Any other content is built on one object, and is sent
on the condition that this object is still there. If the bucket refuses the request:

1. If an earlier request for this file made the object there now, the content replaces it.
2. If the object was removed, the content is put as a new object.
3. If the file was only appended to, the appended bytes are put behind the new object.
4. If only attributes were changed, they are given up.
5. Else the object stays, and the content is put under a key of its own; the program gets ESTALE.

With `--conflict fail`, and for a file that is to be new (O_EXCL), only 1, 4 and 5 apply. What an
earlier mount left (LEFTOVER) is sent on that condition in any case, and 2 does not apply to it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import trio

from fusefs.posix.metadata.deferred_attributes import OwnObjects
from fusefs.posix.nodes import names, object_metadata
from fusefs.posix.nodes.edit_base import IN_PARTS, EditBase
from fusefs.posix.nodes.inode import FileState, StagedFile
from fusefs.posix.tasks import for_each
from fusefs.posix.write.aborts import MAY_PASS, want_of
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.sparse_edit import SparseEditor
from fusefs.store.contract import Store, find
from fusefs.store.errors import (
    ConflictError,
    NotFoundError,
    PartsError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.fencing import without_token
from fusefs.store.interface import (
    IF_ABSENT,
    Condition,
    Expect,
    IfMatch,
    ObjectInfo,
    UploadState,
    Write,
)
from fusefs.store.s3.multipart import Upload

logger = logging.getLogger("fusefs.uploads")

COPIES_AT_ONCE = 8
# The metadata key in the empty object that reserves a name (exclusive.py).
CREATED_BY = "created-by"
# The most contents that conflicts keep beside one key within a second.
MOST_APART = 100


class UploadSteps:
    """The requests that send one mount's files. Belongs to the event loop."""

    def __init__(self, store: Store, writing: Writing, editor: SparseEditor) -> None:
        self._store = store
        self._staging = writing.staging
        self._editor = editor
        self.aborts = writing.aborts
        self._fails_on_conflict = writing.rules.fails_on_conflict
        self._has_conditions = True
        self._disk = trio.CapacityLimiter(4)
        self.own = OwnObjects(store)

    async def send(self, staged: StagedFile, commit: Callable[[], None]) -> ObjectInfo:
        """Send a locked file, or its attributes alone; return the new object.

        `commit` is called before a request that may take effect even if it is cancelled.

        Raises:
            StoreError: the file could not be sent.
            ConflictError, StaleVersionError: another client has changed the object.
        """
        size = staged.begin_sending()
        if not staged.is_content_dirty and staged.etag is not None:
            commit()
            return await self.own.describe(
                staged.inode.object, staged.key, Write(staged.described().as_metadata())
            )
        if staged.upload_state is not None or staged.upload is not None or size > IN_PARTS:
            return await self._send_parts(staged, commit, size)
        if staged.base is not None:
            await self._editor.fill(staged.base, staged.fd, 0, size)
        # A request may take effect even if it is cancelled.
        commit()
        staged.sending = size
        try:
            info = await self._put(staged, staged.key, size, self._condition(staged))
        finally:
            staged.sending = None
        self.own.note(info)
        return info

    def lacks_conditions(self, staged: StagedFile) -> bool:
        """Send no more conditions, as the store refused one (501); True to try the upload again.

        False, without a change, unless the refused content is built on an object (`_is_built`).
        """
        if not staged.is_content_dirty or not self._is_built(staged):
            return False
        logger.warning("this store knows no conditions: the last node to close a file wins")
        self._has_conditions = False
        return True

    async def put_new(
        self, staged: StagedFile, key: str, condition: Condition = IF_ABSENT
    ) -> ObjectInfo:
        """Put a locked file under another key than its own; ConflictError if `condition` fails."""
        size = staged.begin_sending()
        if staged.base is not None:
            await self._editor.fill(staged.base, staged.fd, 0, size)
        info = await self._put(staged, key, size, condition)
        if size <= IN_PARTS:
            self.own.note(info)
        return info

    async def _put(
        self, staged: StagedFile, key: str, size: int, condition: Condition
    ) -> ObjectInfo:
        write = Write(staged.described().as_metadata(), content_type(key), condition)
        return await self._store.put_file(key, staged.fd, size, write)

    def _condition(self, staged: StagedFile) -> Condition:
        if not self.is_careful(staged):
            return Expect(staged.etag)
        return IfMatch(staged.etag)

    def is_careful(self, staged: StagedFile) -> bool:
        """True if the upload must not replace an object of another client."""
        is_new = staged.state is FileState.LEFTOVER or staged.exclusive is not None
        return is_new or self._fails_on_conflict or self._is_built(staged)

    def _is_built(self, staged: StagedFile) -> bool:
        """True if a content edits or extends its object, and the store has conditions."""
        return self._has_conditions and (not staged.is_anew or staged.only_appended)

    async def _send_parts(
        self, staged: StagedFile, commit: Callable[[], None], size: int
    ) -> ObjectInfo:
        upload = await self._resumed(staged, size)
        if upload is None and not size:
            commit()
            return await self._put(staged, staged.key, 0, self._condition(staged))
        if upload is None:
            upload = await self.begin(staged, staged.described().as_metadata())
        for is_last in (False, True):
            try:
                if staged.may_be_mapped:
                    await upload.verify(staged.fd, size)  # programs may have stored into its parts
                if staged.base is not None:
                    await self._copy_parts(staged, staged.base, upload, size)
                await upload.send(staged.fd, upload.missing(size), size)
                # The next process recognises the new object by the recorded parts and token.
                self._staging.record(staged)
                commit()
                info = await self._store.complete(upload, size, self._condition(staged))
                break
            except (NotFoundError, PartsError) as error:
                if isinstance(error, PartsError):
                    await self.abandon(staged)
                # Another client, or a rule of the bucket, has aborted the upload. Or its completion
                # got no answer, and the object was replaced since.
                staged.upload = staged.upload_state = None
                self._staging.record(staged)
                if self.is_careful(staged):
                    found = await find(self._store, staged.key)
                    if (found.etag if found is not None else None) != staged.etag:
                        raise ConflictError("the object has been replaced") from error
                if is_last:
                    raise
            upload = await self.begin(staged, staged.described().as_metadata())
        staged.upload = staged.upload_state = None
        return await self._corrected(staged, upload, info)

    async def _copy_parts(
        self, staged: StagedFile, base: EditBase, upload: Upload, size: int
    ) -> None:
        """Copy unchanged parts on the server; download the bytes that the other parts lack."""
        modified_ns, described = os.fstat(staged.fd).st_mtime_ns, staged.meta_changes

        async def have_part(number: int) -> None:
            start, stop = upload.part_range(number, size)
            while base.keeps(start, stop):
                source = base.version
                try:
                    await upload.copy_part(number, source, start, stop)
                    return
                except UnsupportedError:
                    break
                except (NotFoundError, StaleVersionError):
                    if not await self._editor.follow(base, source):
                        break
            await self._editor.fill(base, staged.fd, start, stop)

        failure: Exception | None = None
        try:
            await for_each(have_part, upload.missing(size), COPIES_AT_ONCE)
        except (StoreError, OSError) as error:
            failure = error
        if staged.meta_changes == described:
            # Concurrent fills may not restore the file's time.
            os.utime(staged.fd, ns=(modified_ns, modified_ns))
        if failure is not None:
            raise failure

    async def _corrected(self, staged: StagedFile, upload: Upload, info: ObjectInfo) -> ObjectInfo:
        """Correct an object's metadata if the file's attributes changed during the upload."""
        sent, described = without_token(upload.state.metadata), staged.described()
        is_dated = object_metadata.read_time(sent) is not None
        wanted = described if is_dated else described.changed(mtime_ns=None)
        if sent != wanted.as_metadata():
            info = await self._store.copy(
                info.version, staged.key, Write(staged.described().as_metadata())
            )
        elif not is_dated:
            # The object has no time of its own: other clients see its Last-Modified.
            os.utime(staged.fd, ns=(info.mtime_ns, info.mtime_ns))
        return info

    async def begin(self, staged: StagedFile, metadata: dict[str, str]) -> Upload:
        """Begin a multipart upload, and record it before (without its id) and after."""
        token = self._store.tokens.next()
        staged.tokens.add(str(token))
        staged.begun_ns = time.time_ns()
        self._staging.record(staged)
        write = Write(metadata, content_type(staged.key), token=token)
        staged.upload = await self._store.begin_upload(staged.key, write)
        staged.begun_ns = None
        self._staging.record(staged)
        return staged.upload

    async def _resumed(self, staged: StagedFile, size: int) -> Upload | None:
        """Return the file's multipart upload to be continued; None if there is none."""
        if staged.begun_ns is not None:
            await self.aborts.try_abort_lost(staged.key, staged.begun_ns)
            staged.begun_ns = None
        state = staged.upload_state
        if staged.upload is None and state is not None:
            with suppress(NotFoundError):  # the upload is gone: begin a new one
                if state.key == staged.key:
                    staged.upload = await self._verified(state, staged.fd, size)
                else:
                    await self._store.abort_upload(state.key, state.upload_id)
            staged.upload_state = None
        if staged.upload is not None and not size:
            await self.abandon(staged)
        return staged.upload

    async def _verified(self, state: UploadState, fd: int, size: int) -> Upload | None:
        """Resume an earlier process's upload; None, to begin anew, if S3 doesn't list its parts."""
        try:
            upload = await self._store.resume_upload(state)
        except (*MAY_PASS, NotFoundError):
            raise
        except StoreError as error:
            why = want_of("s3:ListMultipartUploadParts", error)
            logger.warning("%s: sent anew%s: %s", state.key, why, error)
            await self.aborts.abort(state.key, state, None)
            return None
        await upload.verify(fd, size)
        return upload

    async def abandon(self, staged: StagedFile) -> None:
        """Abort a file's multipart upload, if it has one, and then update the record."""
        upload = staged.upload.state if staged.upload is not None else staged.upload_state
        if upload is None and staged.begun_ns is None:
            return
        await self.aborts.abort(staged.key, upload, staged.begun_ns)
        staged.upload = staged.upload_state = staged.begun_ns = None
        self._staging.try_record(staged)  # an old record names an upload that is gone

    # After a conflict with another client

    async def can_go_on(self, staged: StagedFile, theirs: ObjectInfo | None) -> bool:
        """Resolve a conflict with the object `theirs` (None: no object); True to try again."""
        if theirs is not None:
            # The object is the file's own if it is a reservation, or an earlier content that was
            # put by a request without an answer.
            is_own = theirs.etag == staged.etag
            if not is_own and str(theirs.token) in staged.tokens:
                is_own = not await self.is_content_of(theirs, staged)
            if not is_own and staged.exclusive is not None and not theirs.size:
                is_own = (theirs.metadata or {}).get(CREATED_BY) == staged.exclusive
            if is_own:
                staged.etag, staged.exclusive = theirs.etag, None
                return True
        if self._fails_on_conflict or staged.exclusive is not None or not staged.is_content_dirty:
            return False
        if theirs is None:
            is_whole = staged.base is None or not staged.base.lacks(0, staged.size())
            if staged.etag is None or staged.state is FileState.LEFTOVER or not is_whole:
                return False
            staged.etag = None
            return True
        if staged.appended_from is None or staged.backing is not None:
            return False
        if await self.is_content_of(theirs, staged):
            return False
        try:
            await self._append_to(theirs, staged)
        except (NotFoundError, StaleVersionError):
            return True  # the object was replaced again: the next attempt conflicts as well
        except OSError as error:
            logger.warning("%s can't go behind the new object: %s", staged.key, error)
            return False
        logger.info("%s was replaced by another node: what was appended is behind it", staged.key)
        return True

    async def is_content_of(self, info: ObjectInfo, staged: StagedFile) -> bool:
        """True if an object has a file's content: size and time match, and the token or the MD5.

        The time is not enough: it ticks every few ms, and two nodes may write in one tick.
        """
        if (info.size, object_metadata.read_time(info.metadata or {})) != staged.stamp():
            return False
        if str(info.token) in staged.tokens:
            return True
        if info.size > IN_PARTS:
            return False
        found = await trio.to_thread.run_sync(_md5, staged.fd, info.size, limiter=self._disk)
        return info.etag.strip('"') == found

    async def _append_to(self, theirs: ObjectInfo, staged: StagedFile) -> None:
        """Replace a file's content by the object `theirs` with the appended bytes behind it."""
        await self.abandon(staged)
        start, size, at = staged.appended_from, staged.size(), theirs.size
        assert start is not None
        with self._staging.another_content(staged) as fd:
            base = await self._editor.copy(theirs.version, fd, at)
            try:
                if staged.tokens and base is None and start < size <= at:
                    has_tail = partial(_has_tail, fd, staged.fd, start, size)
                    if await trio.to_thread.run_sync(has_tail, limiter=self._disk):
                        start = size  # the bytes are in `theirs`, by an upload without an answer
                if base is not None:
                    await self._editor.fill_edges(base, fd, at, at + size - start)
                    base.wrote(at, at + size - start)
                copy = partial(_copy_tail, staged.fd, start, size, fd, at)
                await trio.to_thread.run_sync(copy, limiter=self._disk)
                self._staging.replace_content(staged, fd, theirs, base)
            except BaseException:
                if base is not None:
                    self._editor.drop(base)
                raise

    async def store_beside(self, staged: StagedFile) -> ObjectInfo:
        """Put the content under a new key beside another client's object; return the new object."""
        for key in _keys_apart(staged.key):
            with suppress(ConflictError):  # another mount of this machine has just used the key
                info = await self.put_new(staged, key)
                break
        else:
            raise ConflictError(f"{staged.key}: there are many of its conflicts already")
        what = "%s was replaced by somebody else: this content is in %s%s"
        logger.error(what, staged.key, key, _database_of(staged.fd))
        return info


def _keys_apart(key: str) -> Iterator[str]:
    """Yield new keys for a content that conflicts with the object at `key`; cut long names."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    prefix, name = names.split_key(key)
    longest = min(names.NAME_MAX, names.LONGEST_KEY - len(prefix.encode()))
    for number in range(1, MOST_APART + 1):
        ending = f".conflict-{os.uname().nodename}-{stamp}" + (f"-{number}" if number > 1 else "")
        room = max(1, longest - len(ending.encode()))
        yield prefix + name.encode()[:room].decode(errors="ignore") + ending


def _database_of(fd: int) -> str:
    """Text for a message if a file is a database, whose locks hold on one node only; else ""."""
    head = os.pread(fd, 20, 0)
    for magic, name in ((b"SQLite format 3\0", "SQLite"), (b"\xde\xc0\xef\xbe", "LMDB")):
        if magic in head:
            return f"; it is an {name} database, which is for one node at a time"
    return ""


def content_type(key: str) -> str | None:
    """The media type of an object, by its name, for browsers; None if unknown."""
    import mimetypes  # reads the system's tables, which would slow down each start

    name = key.rpartition("/")[2]
    return mimetypes.guess_type(name)[0] if "." in name else None


def _md5(fd: int, size: int) -> str:
    return hashlib.md5(os.pread(fd, size, 0), usedforsecurity=False).hexdigest()


def _has_tail(fd: int, source: int, start: int, stop: int) -> bool:
    """True if two files have the same bytes at [start, stop). Blocks."""
    return all(
        os.pread(fd, min(IN_PARTS, stop - at), at) == os.pread(source, min(IN_PARTS, stop - at), at)
        for at in range(start, stop, IN_PARTS)
    )


def _copy_tail(source: int, start: int, stop: int, target: int, at: int) -> None:
    """Copy the bytes [start, stop) of `source` to `at` in `target`, and sync `target`. Blocks."""
    modified_ns = os.fstat(source).st_mtime_ns
    while start < stop and (count := os.copy_file_range(source, target, stop - start, start, at)):
        start, at = start + count, at + count
    os.utime(target, ns=(modified_ns, modified_ns))
    os.fsync(target)
