"""The ways of a staged file into the bucket: in one request, in parts, or as a copy on the server.

Attributes that changed alone are a copy of the object onto itself. A large
file goes up in parts; its upload is on record before its first part, and
another process goes on with it: what the bucket has, and the file still has,
is not sent again. Of an object that is edited the parts that no program wrote to
are copied on the server.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from fusefs.posix.metadata.deferred_attributes import OwnObjects
from fusefs.posix.nodes import names, object_metadata
from fusefs.posix.nodes.edit_base import IN_PARTS, EditBase
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.tasks import for_each
from fusefs.posix.types import find
from fusefs.posix.write.aborts import MAY_PASS, PendingAborts
from fusefs.posix.write.sparse_edit import SparseEditor
from fusefs.posix.write.staging import Staging
from fusefs.store.contract import Store
from fusefs.store.errors import (
    AccessDeniedError,
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
# The metadata that marks the empty object by which a name was reserved (exclusive.py).
CREATED_BY = "created-by"
# So many contents are kept apart from one key within a second.
MOST_APART = 100
# S3 tells when an upload was begun in whole seconds, and by its own clock.
CLOCKS_NS = 5_000_000_000


class UploadSteps:
    """The requests that send one mount's files. Belongs to the event loop.

    `aborts` are the uploads that S3 has not given up yet, and may later.
    """

    def __init__(
        self,
        store: Store,
        staging: Staging,
        editor: SparseEditor,
        aborts: PendingAborts,
        *,
        fails_on_conflict: bool,
    ) -> None:
        self._store = store
        self._staging = staging
        self._editor = editor
        self._aborts = aborts
        self._fails_on_conflict = fails_on_conflict
        self._has_conditions = True
        self.own = OwnObjects()

    async def send(self, staged: StagedFile, commit: Callable[[], None]) -> ObjectInfo:
        """Have the bucket have a file, which is locked, as it is; return what it has.

        `commit` is called before what may come to pass even if it is cancelled.

        Raises:
            StoreError: it could not be sent.
            ConflictError, StaleVersionError: somebody else has changed the object.
        """
        size = staged.begin_sending()
        if not staged.is_content_dirty and staged.etag is not None:
            commit()
            return await self._describe(staged)
        try:
            return await self._send_content(staged, commit, size)
        except UnsupportedError:
            if not self._is_built(staged):
                raise
        logger.warning("this store knows no conditions: the last node to close a file wins")
        self._has_conditions = False
        return await self._send_content(staged, commit, size)

    async def _send_content(
        self, staged: StagedFile, commit: Callable[[], None], size: int
    ) -> ObjectInfo:
        if staged.upload_state is None and staged.upload is None and size <= IN_PARTS:
            # A request that was cancelled may come to pass all the same.
            if staged.base is not None:
                await self._editor.fill(staged.base, staged.fd, 0, size)
            commit()
            staged.sending = size
            try:
                info = await self._put(staged, staged.key, size, self._condition(staged))
            finally:
                staged.sending = None
            self.own.note(info)
            return info
        return await self._send_parts(staged, commit, size)

    async def put_new(
        self, staged: StagedFile, key: str, condition: Condition = IF_ABSENT
    ) -> ObjectInfo:
        """Have the bucket have what a locked file has now under another key than its own.

        Raises:
            StoreError: it could not be sent.
            ExistsError: there is an object, against the condition.
        """
        size = staged.begin_sending()
        if staged.base is not None:
            await self._editor.fill(staged.base, staged.fd, 0, size)
        info = await self._put(staged, key, size, condition)
        if size <= IN_PARTS:
            self.own.note(info)
        return info

    async def reserve(self, staged: StagedFile) -> ObjectInfo:
        """Put an empty object under the key of a file that is to be new.

        Raises:
            ConflictError: there is another one.
            StoreError: it could not be sent.
        """
        assert staged.exclusive is not None
        metadata = staged.metadata() | {CREATED_BY: staged.exclusive}
        write = Write(metadata, content_type(staged.key), IF_ABSENT)
        return await self._store.put_file(staged.key, staged.fd, 0, write)

    async def _put(
        self, staged: StagedFile, key: str, size: int, condition: Condition
    ) -> ObjectInfo:
        write = Write(staged.metadata(), content_type(key), condition)
        return await self._store.put_file(key, staged.fd, size, write)

    def _condition(self, staged: StagedFile) -> Condition:
        if not self.is_careful(staged):
            return Expect(staged.etag)
        return IF_ABSENT if staged.etag is None else IfMatch(staged.etag)

    def is_careful(self, staged: StagedFile) -> bool:
        """True if somebody else's object is not to be replaced."""
        is_new = staged.is_leftover or staged.exclusive is not None
        return is_new or self._fails_on_conflict or self._is_built(staged)

    def _is_built(self, staged: StagedFile) -> bool:
        """True if a file is built on the object, and the store can be asked for that one."""
        return self._has_conditions and (not staged.is_anew or staged.only_appended)

    async def _describe(self, staged: StagedFile) -> ObjectInfo:
        """Have the object say what the file's attributes are now.

        Raises:
            NotFoundError, StaleVersionError: somebody else has removed or replaced it.
        """
        version = staged.inode.info
        assert version is not None
        own = self.own.get(version)
        write = Write(staged.metadata(), is_own=own is not None)
        info = await self._store.copy(own or version.version, staged.key, write)
        if own is not None:
            self.own.note(info)
        return info

    async def _send_parts(
        self, staged: StagedFile, commit: Callable[[], None], size: int
    ) -> ObjectInfo:
        upload = await self._resumed(staged, size)
        if upload is None and size:
            upload = await self.begin(staged, staged.metadata())
        if upload is None:
            commit()
            return await self._put(staged, staged.key, 0, self._condition(staged))
        for is_last in (False, True):
            try:
                if staged.base is not None:
                    await self._copy_parts(staged, staged.base, upload, size)
                await upload.send(staged.fd, upload.missing(size), size)
                # By its parts and its token the next process knows the object that comes of it.
                self._staging.record(staged)
                commit()
                info = await self._store.complete(upload, size, self._condition(staged))
                break
            except (NotFoundError, PartsError) as error:
                if isinstance(error, PartsError):
                    await self.abandon(staged)
                await self._lost(staged)
                if is_last:
                    raise
            upload = await self.begin(staged, staged.metadata())
        staged.upload = staged.upload_state = None
        return await self._corrected(staged, upload, info)

    async def _lost(self, staged: StagedFile) -> None:
        """There is no such upload any more: somebody, or the bucket's own rules, have aborted it.

        Or it was completed without anybody's hearing of it, and the object replaced since.

        Raises:
            ConflictError: another object is there, which is not to be replaced.
        """
        staged.upload = staged.upload_state = None
        self._staging.record(staged)
        if self.is_careful(staged):
            found = await find(self._store, staged.key)
            if (found.etag if found is not None else None) != staged.etag:
                raise ConflictError("the object has been replaced")

    async def _copy_parts(
        self, staged: StagedFile, base: EditBase, upload: Upload, size: int
    ) -> None:
        """Have S3 copy the parts that no program wrote to, and bring what the others lack."""
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
            # Each fill leaves the time as it is, but not beside others.
            os.utime(staged.fd, ns=(modified_ns, modified_ns))
        if failure is not None:
            raise failure

    async def _corrected(self, staged: StagedFile, upload: Upload, info: ObjectInfo) -> ObjectInfo:
        """Have a new object say what was not known when its upload was begun."""
        sent, described = without_token(upload.state.metadata), staged.described()
        is_dated = object_metadata.read_time(sent) is not None
        wanted = described if is_dated else described.changed(mtime_ns=None)
        if sent != wanted.as_metadata():
            info = await self._store.copy(info.version, staged.key, Write(staged.metadata()))
        elif not is_dated:
            # The time that everybody else sees.
            os.utime(staged.fd, ns=(info.mtime_ns, info.mtime_ns))
        return info

    async def begin(self, staged: StagedFile, metadata: dict[str, str]) -> Upload:
        """Begin an upload, which is on record before and after."""
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
        """The upload that is under way, if there is one and it can be gone on with."""
        if staged.begun_ns is not None:
            await self._find_and_abort(staged.key, staged.begun_ns)
            staged.begun_ns = None
        state = staged.upload_state
        if staged.upload is None and state is not None:
            with suppress(NotFoundError):  # begun anew
                if state.key == staged.key:
                    staged.upload = await self._verified(state, staged.fd, size)
                else:
                    await self._store.abort_upload(state.key, state.upload_id)
            staged.upload_state = None
        if staged.upload is not None and not size:
            await self.abandon(staged)
        return staged.upload

    async def _verified(self, state: UploadState, fd: int, size: int) -> Upload | None:
        """Another process's upload with the parts that the file still has.

        None if its parts can't be listed: the file is sent anew, or it would never arrive.
        """
        try:
            upload = await self._store.resume_upload(state)
        except (*MAY_PASS, NotFoundError):
            raise
        except StoreError as error:
            why = _want_of("s3:ListMultipartUploadParts", error)
            logger.warning("%s: sent anew%s: %s", state.key, why, error)
            await self.abort(state.key, state, None)
            return None
        await upload.verify(fd, size)
        return upload

    async def _find_and_abort(self, key: str, begun_ns: int) -> None:
        """As `_abort_lost`, where uploads can be listed: the file's own way must not end here."""
        try:
            await self._abort_lost(key, begun_ns)
        except MAY_PASS:
            raise
        except StoreError as error:
            why = _want_of("s3:ListBucketMultipartUploads", error)
            logger.warning("%s: an upload of it may stay in the bucket%s: %s", key, why, error)

    async def _abort_lost(self, key: str, begun_ns: int) -> None:
        """Abort what was begun for a key when its process died before it knew the id."""
        for lost in await self._store.list_uploads(key):
            if lost.key == key and lost.begun_ns >= begun_ns - CLOCKS_NS:
                await self._store.abort_upload(lost.key, lost.upload_id)

    async def abandon(self, staged: StagedFile) -> None:
        """Give up the upload that is under way, if there is one; the record goes last."""
        upload = staged.upload.state if staged.upload is not None else staged.upload_state
        if upload is None and staged.begun_ns is None:
            return
        await self.abort(staged.key, upload, staged.begun_ns)
        staged.upload = staged.upload_state = staged.begun_ns = None
        self._staging.record(staged)

    async def abort(self, key: str, upload: UploadState | None, begun_ns: int | None) -> None:
        """Abort the upload of a file, and what an earlier process may have begun at `begun_ns`."""
        try:
            if begun_ns is not None:
                await self._abort_lost(key, begun_ns)
            if upload is not None:
                await self._store.abort_upload(upload.key, upload.upload_id)
        except StoreError as error:
            logger.warning("%s: its upload could not be aborted: %s", key, error)
            if upload is not None and isinstance(error, MAY_PASS):
                self._aborts.add(upload.key, upload.upload_id)

    async def give_up(self, staged: StagedFile) -> ObjectInfo | None:
        """Send a file no more; return what the bucket has under its key."""
        await self.abandon(staged)
        return await find(self._store, staged.key)

    async def store_beside(self, staged: StagedFile) -> ObjectInfo:
        """Keep the content under a key of its own, beside the object that somebody else made.

        Raises:
            ConflictError: there are many such objects already.
            StoreError: S3 did not take it.
        """
        for key in _keys_apart(staged.key):
            with suppress(ConflictError):  # another mount of this machine was as late
                info = await self.put_new(staged, key)
                break
        else:
            raise ConflictError(f"{staged.key}: there are many of its conflicts already")
        logger.error(
            "%s was replaced by somebody else: this content is in %s%s",
            staged.key,
            key,
            _database_of(staged.fd),
        )
        return info


def _keys_apart(key: str) -> Iterator[str]:
    """Keys for a content beside that of a key, which names can express: long ones are cut."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    prefix, name = names.split_key(key)
    longest = min(names.NAME_MAX, names.LONGEST_KEY - len(prefix.encode()))
    for number in range(1, MOST_APART + 1):
        ending = f".conflict-{os.uname().nodename}-{stamp}" + (f"-{number}" if number > 1 else "")
        room = max(1, longest - len(ending.encode()))
        yield prefix + name.encode()[:room].decode(errors="ignore") + ending


def _want_of(permission: str, error: StoreError) -> str:
    """The permission or quota that a refused request lacks, for a message."""
    return f", for want of {permission}" if isinstance(error, AccessDeniedError) else ""


def _database_of(fd: int) -> str:
    """The name of a database that a file is, for a message: locks do not hold between nodes."""
    head = os.pread(fd, 20, 0)
    for magic, name in ((b"SQLite format 3\0", "SQLite"), (b"\xde\xc0\xef\xbe", "LMDB")):
        if magic in head:
            return f"; it is an {name} database, which is for one node at a time"
    return ""


def content_type(key: str) -> str | None:
    """The media type of an object, by its name, for browsers."""
    import mimetypes  # it reads the system's tables, too: the first upload's time, not a start's

    name = key.rpartition("/")[2]
    return mimetypes.guess_type(name)[0] if "." in name else None
