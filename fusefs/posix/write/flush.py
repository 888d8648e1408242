"""What is staged on its way to being kept: FLUSH, FSYNC, the last close, the end of the mount.

FLUSH (close) and FSYNC of a file that has changed return when the bucket has
it, or with local durability when it and the record of its upload are safe on
the local disk. How it gets into the bucket is told in uploader.py. What could
not be uploaded stays staged, the error is told to whoever closes, and it is
tried again until it is there. Once nobody has the file open, the staged
content becomes the cached copy of the version that it was uploaded as.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import trio

from fusefs.cache.file_cache import FileCache
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import ABSENT, Absent
from fusefs.posix.late.requests import LateRequests
from fusefs.posix.metadata import object_metadata
from fusefs.posix.metadata.attribute_log import AttributeLog, Recorded
from fusefs.posix.metadata.deferred_attributes import DEFER_S, Deferred, DeferredAttributes
from fusefs.posix.metadata.object_metadata import Meta
from fusefs.posix.namespace.removals import Removal, Removals
from fusefs.posix.nodes.handles import FileHandle, HandleTable
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.posix.types import Answer, waiting
from fusefs.posix.write import staged_sums
from fusefs.posix.write.exclusive import ExclusiveCreates
from fusefs.posix.write.sparse_edit import Editor
from fusefs.posix.write.staging import Staging
from fusefs.posix.write.uploader import Uploads
from fusefs.store.errors import CredentialsError
from fusefs.store.interface import ObjectInfo, Store

logger = logging.getLogger("fusefs.writing")

WRITING = os.O_WRONLY | os.O_RDWR
# How often uploads that failed are tried again.
RETRY_S = 5.0
# With local durability a file is uploaded when it has been left alone this
# long: the rename of a temporary file then costs no copy in the bucket.
LATER_S = 1.0
# An end that takes longer says what it waits for.
SLOW_S = 3.0
# The state of a file that is on its way.
UPLOADING = "uploading"


@dataclass(frozen=True, slots=True)
class Rules:
    """How a mount writes; see the settings of the same names."""

    is_local: bool = False
    fails_on_conflict: bool = False
    may_delete: bool = True
    flush_interval_s: float = 0.0
    reserves_always: bool = False


@dataclass(frozen=True, slots=True)
class Writing:
    """What a writable mount has beside a read-only one.

    Uploads, and changes that somebody was killed over, live in `nursery`.
    Renames of directories are on record in `renames`.
    `make_room` has the cache give up what the disk needs. `late` are the keys that
    requests without an answer may change still.
    """

    staging: Staging
    renames: Path
    nursery: trio.Nursery
    rules: Rules
    make_room: Callable[[], Awaitable[None]]
    late: LateRequests | None = None


class Writeback:
    """What is staged of one mount, and what becomes of it. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        removals: Removals,
        directories: Directories,
        cache: FileCache,
        writing: Writing,
        inodes: InodeTable,
        handles: HandleTable,
        editor: Editor,
        outdate: Callable[[Inode], None],
    ) -> None:
        self.directories = directories
        self._cache = cache
        self._store = store
        self._outdate = outdate
        self.staging = writing.staging
        self.staging.cache = cache
        self.editor = editor
        self._nursery = writing.nursery
        # Whether a thread closes its files because its process is killed; set by a session
        # that can tell.
        self.was_killed: Callable[[int], Awaitable[bool]] = _not_known
        self.inodes = inodes
        self._handles = handles
        self._rules = writing.rules
        self.uploads = Uploads(
            store, writing.staging, editor, writing.nursery,
            self._landed, self._kept_apart, self._set_aside,
            fails_on_conflict=self._rules.fails_on_conflict,
            sends_ahead=not self._rules.is_local,
        )  # fmt: skip
        self.exclusive = ExclusiveCreates(
            writing.nursery, self.uploads.reserve, reserves_always=self._rules.reserves_always
        )
        self.deferred = DeferredAttributes(
            writing.nursery, AttributeLog(writing.staging.directory),
            self._describe, self._attributes_landed, self._attributes_lost,
        )  # fmt: skip
        self.removals = removals
        removals.landed = self._removed
        directories.local.is_leaving = removals.__contains__
        self.held: Callable[[StagedFile], AbstractAsyncContextManager[None]] = self.uploads.held

    @property
    def may_delete(self) -> bool:
        return self._rules.may_delete

    def flush(self, fh: int, pid: int = 0) -> Answer[None]:
        """A descriptor of an open file is closed: have what was written kept.

        A program that forks closes each of its files once more in each child.
        Such a file is uploaded every flush interval and at its last close.
        The thread `pid` does it, if that is known: a killed one has not meant to.
        """
        handle = self._handles.files.get(fh)
        if handle is None or handle.inode.staged is None or not handle.flags & WRITING:
            return None
        staged = handle.inode.staged
        if staged.creator:
            self.exclusive.wrote(staged.creator, staged.size())
        if not staged.is_dirty:
            return None
        # No other close costs a look at the process.
        if staged.is_rewrite and pid and self._can_be_undone(staged):
            return waiting(self._flush_unless_killed(handle, staged, pid))
        return self._flush(handle, staged)

    async def _flush_unless_killed(self, handle: FileHandle, staged: StagedFile, pid: int) -> None:
        # A killed program's request is soon cancelled, and the answer is needed then.
        with trio.CancelScope(shield=True):
            staged.is_abandoned = await self.was_killed(pid)
        if staged.is_abandoned:
            logger.info("the process %d was killed while it rewrote %s", pid, staged.key)
        elif staged.is_dirty and staged.inode.staged is staged:
            answer = self._flush(handle, staged)
            if answer is not None:
                await answer

    def _flush(self, handle: FileHandle, staged: StagedFile) -> Answer[None]:
        if not staged.is_content_dirty:
            self.uploads.start(staged, DEFER_S)  # it may be closed here and open elsewhere
            return None
        now = trio.current_time()
        wait_s = handle.flushed_at + self._rules.flush_interval_s - now
        if wait_s > 0 and not self._rules.is_local:
            self.uploads.start(staged, wait_s)
            return None
        handle.flushed_at = now
        return waiting(self.upload(staged, is_closing=True))

    def fsync(self, fh: int) -> Answer[None]:
        """Have what was written so far kept."""
        handle = self._handles.files.get(fh)
        if handle is None:
            return None
        staged, info = handle.inode.staged, handle.inode.info
        if staged is not None:
            return waiting(self.upload(staged, is_closing=True)) if staged.is_dirty else None
        if info is not None and self.deferred.has(info.key):
            return waiting(self.deferred.flush(info.key))
        return None

    def _can_be_undone(self, staged: StagedFile) -> bool:
        """Whether nothing was written to a file but what no program has closed yet."""
        is_known = staged.is_closed or self.uploads.is_under_way(staged)
        return staged.is_content_dirty and not is_known

    async def _undo(self, staged: StagedFile) -> None:
        """Let the object stay as it is, and forget what a killed program wrote."""
        inode = staged.inode
        async with self.held(staged):
            is_wanted = not staged.is_abandoned or self._may_be_written(inode)
            if is_wanted or inode.staged is not staged or not staged.is_dirty:
                return
            assert inode.info is not None
            logger.warning(
                "%s stays as it was: what was to rewrite it was killed before it closed the file",
                staged.key,
            )
            if staged.is_meta_dirty:
                self._keep_attributes(staged, inode.info)
            # As with a file that is removed: whoever has it open reads what was written.
            staged.is_unlinked = True
            self.staging.record(staged)
            if inode.is_current:
                assert inode.parent is not None
                self.inodes.supersede(inode)
                prefix = self.inodes.key(inode.parent)
                self.directories.changed(prefix, inode.name, inode.info)
        if inode.staged is staged and not inode.served:
            self._release(staged)

    def _keep_attributes(self, staged: StagedFile, info: ObjectInfo) -> None:
        """Modes, owners and attributes that were set are not what a killed program wrote."""
        mtime_ns = staged.before.mtime_ns if staged.before is not None else None
        try:
            self.deferred.put(info, staged.meta.changed(mtime_ns=mtime_ns))
        except OSError as error:
            logger.error("the attributes of %s are lost: %s", staged.key, error.strerror)

    async def upload(self, staged: StagedFile, *, is_closing: bool = False) -> None:
        """Have the last content of a file in the bucket.

        With `is_closing` a program waits for the content to be kept: local
        durability is enough, and if the program can't wait, or the upload
        fails, the content is on record to be uploaded whatever happens.
        """
        if is_closing and self._rules.is_local:
            await staged_sums.note(staged)
            await self.staging.make_safe(staged)
            self.uploads.closes.note()
            self.uploads.start(staged, LATER_S)
            return
        try:
            await self.uploads.wait(staged)
        except BaseException:
            if is_closing and staged.is_dirty:
                self.staging.close(staged)
            raise

    async def finish(self, inode: Inode) -> None:
        """Upload what nobody will close any more, and make it the cached copy."""
        staged = inode.staged
        if staged is None or self._may_be_written(inode):
            return
        if staged.is_dirty:
            await self.upload(staged, is_closing=True)
        else:
            self._settle(staged)

    def described(self, inode: Inode) -> None:
        """The attributes of a staged file have changed: have them sent if nobody will close it."""
        staged = inode.staged
        if staged is None or self._may_be_written(inode) or self._defer(staged):
            return
        if not staged.is_closed:
            self.staging.close(staged)
        self.uploads.start(staged, LATER_S)

    def _defer(self, staged: StagedFile) -> bool:
        """Keep attributes that changed alone apart, so that the content need not stay staged.

        False where they go along with the content, or somebody has the file open.
        """
        inode, info = staged.inode, staged.inode.info
        if (
            staged.is_content_dirty or not staged.is_dirty or staged.lock.locked() or inode.served
            or info is None or staged.etag is None or staged.etag != info.etag or staged.is_leftover
        ):  # fmt: skip
            return False
        self.deferred.put(info, staged.described())
        staged.is_meta_dirty = False
        self._settle(staged)
        return True

    async def _describe(self, info: ObjectInfo, said: Meta) -> ObjectInfo:
        """Have an object say what its attributes are now.

        Raises:
            StoreError: it could not be done, or there is no such version any more.
        """
        own = self.uploads.own.get(info)
        return await self._store.copy(
            own or info.version, info.key, metadata=said.as_metadata(), is_own=own is not None
        )

    async def _attributes_landed(self, old: ObjectInfo, new: ObjectInfo) -> None:
        """A version's object has other attributes, and is another version for that."""
        if self.uploads.own.get(old) is not None:
            self.uploads.own.note(new)
        # The copy may have another ETag, and has the same bytes.
        await self._cache.move(old.version, new.version)
        prefix = old.key[: old.key.rfind("/") + 1]
        name = old.key[len(prefix) :]
        inode = self._node_of(prefix, name, old)
        if inode is not None:
            if inode.staged is not None and inode.staged.etag == old.etag:
                inode.staged.etag = new.etag
                self.staging.record(inode.staged)
            self._has(inode, new)
            return
        known = self.directories.lookup_now(self.directories.get(prefix), name)
        if known is not None and isinstance(known[0], ObjectInfo) and known[0].etag == old.etag:
            self.directories.changed(prefix, name, new)

    def _attributes_lost(self, info: ObjectInfo) -> None:
        """There is no such version any more whose attributes were changed."""
        prefix = info.key[: info.key.rfind("/") + 1]
        inode = self._node_of(prefix, info.key[len(prefix) :], info)
        if inode is not None and inode.staged is None:
            self._outdate(inode)

    def _removed(self, key: str) -> None:
        """The bucket is without an object that was removed."""
        prefix = key[: key.rfind("/") + 1]
        name = key[len(prefix) :]
        if isinstance(self.directories.local.get(prefix, name), Absent):
            self.directories.changed(prefix, name, ABSENT)

    def _node_of(self, prefix: str, name: str, info: ObjectInfo) -> Inode | None:
        """The node that a version is shown as, if the kernel knows it."""
        parent = self.inodes.at(prefix)
        inode = (parent.children or {}).get(name) if parent is not None else None
        is_it = inode is not None and inode.info is not None and inode.info.version == info.version
        return inode if is_it else None

    def adopt_attributes(self, one: Recorded) -> None:
        """Take up what an earlier process was to have an object say."""
        default = Meta(stat.S_IFREG | 0o644, os.geteuid(), os.getegid())
        self.deferred.adopt(one, object_metadata.read(one.metadata, default))

    def adopt_removal(self, key: str, etag: str, removed_ns: int, *, is_on_record: bool) -> None:
        """Take up what an earlier process was to delete.

        Raises:
            OSError: it is not on record here, and the disk does not take it.
        """
        self.removals.adopt(key, etag, removed_ns, is_on_record=is_on_record)
        self.deferred.drop(key)
        prefix = key[: key.rfind("/") + 1]
        self.directories.changed(prefix, key[len(prefix) :], ABSENT)

    def _may_be_written(self, inode: Inode) -> bool:
        """Whether somebody has a staged file open for writing, and so will close it."""
        return bool(inode.served) and any(
            one.inode is inode and one.flags & WRITING for one in self._handles.files.values()
        )

    def pending(self, key: str) -> list[StagedFile]:
        """What is staged and not in the bucket of a file or of what is below a prefix.

        That of everything for "".
        """
        below = key if not key or key.endswith("/") else key + "/"
        return [one for one in self.staging.pending if one.key == key or one.key.startswith(below)]

    def unsent(self, key: str) -> list[StagedFile | Deferred | Removal]:
        """As `pending`, with the attributes that the bucket lacks, and what is to go from it."""
        return [*self.pending(key), *self.deferred.pending(key), *self.removals.pending(key)]

    def state(self, staged: StagedFile | Deferred | Removal) -> str:
        """What happens to a file that is not in the bucket, for people to read."""
        if isinstance(staged, Deferred | Removal):
            return UPLOADING if staged.error is None else "failed"
        if self.uploads.is_under_way(staged):
            is_refused = isinstance(staged.error, CredentialsError)
            return "waiting for credentials" if is_refused else UPLOADING
        if staged.error is not None:
            return "failed"
        return "open" if staged.inode.served else "waiting"

    def begin_sync(self, key: str) -> None:
        """Have everything at or below a key uploaded now, also what is open."""
        self.deferred.hurry(key)
        self.removals.hurry(key)
        for staged in self.pending(key):
            staged.error = None
            self.uploads.start(staged).hurry.set()

    def _landed(self, staged: StagedFile, info: ObjectInfo) -> None:
        """The bucket has the content of a file."""
        self._has(staged.inode, info)
        self._settle(staged)
        if staged.inode.staged is staged:
            self.staging.record(staged)

    def _kept_apart(self, staged: StagedFile, info: ObjectInfo, theirs: ObjectInfo | None) -> None:
        """The content is in the bucket under another name than it was to have."""
        inode = staged.inode
        assert inode.info is not None
        assert inode.parent is not None
        self.exclusive.lost(staged.creator)
        prefix, name = self.inodes.key(inode.parent), inode.name
        # The kernel goes on to believe that the node has the name, until it opens it.
        self.inodes.supersede(inode)
        inode.name = info.key[len(prefix) :]
        self.directories.changed(prefix, name, ABSENT if theirs is None else theirs)
        self._landed(staged, info)

    def _set_aside(self, staged: StagedFile, theirs: ObjectInfo | None) -> None:
        """What was written to a file that can't be whole any more stays on the disk alone."""
        inode = staged.inode
        assert inode.info is not None
        assert inode.parent is not None
        prefix, name = self.inodes.key(inode.parent), inode.name
        self.inodes.supersede(inode)
        self.directories.changed(prefix, name, ABSENT if theirs is None else theirs)
        kept = self.staging.set_aside(staged)
        logger.error("%s was replaced while it was edited: the edits are in %s", staged.key, kept)
        self.inodes.drop_unknown(inode)

    def _has(self, inode: Inode, info: ObjectInfo) -> None:
        """The bucket has a version of ours: the node stands for it from now on."""
        assert inode.info is not None
        self.inodes.replace_version(inode, info)
        prefix = info.key[: len(info.key) - len(inode.name)]
        self.directories.changed(prefix, inode.name, info, lasting=inode.staged is not None)

    def _settle(self, staged: StagedFile) -> None:
        """Keep the content as the cached copy, if nobody has the file open."""
        inode = staged.inode
        if staged.is_dirty or inode.served or inode.staged is not staged:
            return
        is_taken = False
        if not staged.is_unlinked and inode.info is not None and inode.info.size:
            own = None if staged.base is None else staged.base.own(inode.info.size)
            is_taken = self._cache.adopt_uploaded(inode.info.version, staged.path, staged.fd, own)
        inode.meta = staged.described()
        self._release(staged, is_taken=is_taken)
        if not staged.is_unlinked and inode.info is not None:
            prefix = inode.info.key[: len(inode.info.key) - len(inode.name)]
            self.directories.settled(prefix, inode.name)

    def _release(self, staged: StagedFile, *, is_taken: bool = False) -> None:
        self.staging.release(staged, is_taken=is_taken)
        # Without the kernel's knowing it, it was here for its content alone.
        self.inodes.drop_unknown(staged.inode)

    def released(self, inode: Inode) -> None:
        """A handle of a staged file is gone."""
        staged = inode.staged
        if staged is None or self._may_be_written(inode):
            return
        if not staged.is_dirty:
            self._settle(staged)
            return
        if staged.is_abandoned and self._can_be_undone(staged):
            self._nursery.start_soon(self._undo, staged)
            return
        if self._defer(staged):
            return
        if not staged.is_closed:
            self.staging.close(staged)
        attempt = self.uploads.start(staged, LATER_S if self._rules.is_local else 0.0)
        if not self._rules.is_local:
            attempt.hurry.set()  # it may be waiting for the flush interval to pass

    def restore(self, inode: Inode) -> None:
        """Take up what an earlier process had staged under a node."""
        staged = self.staging.restore(inode)
        if staged is None:
            return
        if staged.is_unlinked:
            if inode.is_current:
                self.inodes.supersede(inode)
            state = staged.upload_state.plain() if staged.upload_state is not None else None
            self.uploads.abort_later(staged.key, state, staged.begun_ns)
            staged.upload_state = staged.begun_ns = None
        else:
            self.list_staged(inode)
            if staged.exclusive is not None:
                self.exclusive.watch(staged)

    def let_go_unlinked(self) -> None:
        """Forget what an earlier process had unlinked, and nobody has open."""
        for staged in self.staging:
            if staged.is_unlinked and not staged.inode.served:
                staged.inode.meta = staged.described()
                self.staging.release(staged)

    def list_staged(self, inode: Inode) -> None:
        """Have listings show a staged file."""
        assert inode.info is not None
        prefix = inode.info.key[: len(inode.info.key) - len(inode.name)]
        self.directories.changed(prefix, inode.name, inode.info, lasting=True)

    async def drain(self, limit_s: float) -> None:
        """Upload what is pending, once, if that takes no longer; the rest stays on the disk.

        What a program has still open, in a mount that was ended by force, is not whole.
        """
        finished = [one for one in self.staging.pending if one.is_closed or not one.inode.served]
        for staged in finished:
            self.uploads.start(staged).hurry.set()
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._say_if_slow, finished)
                for staged in finished:
                    await self.uploads.ended(staged)
                await self.deferred.drain()
                await self.removals.drain()
                nursery.cancel_scope.cancel()
        for staged in self.staging.pending:
            if staged in finished:
                self.staging.close(staged)
            logger.error("%s is not in the bucket; kept in %s", staged.key, staged.path)
        for one in self.deferred.pending(""):
            logger.error("the attributes of %s are not in the bucket; kept on record", one.key)
        for gone in self.removals.pending(""):
            logger.error("%s is not deleted in the bucket; that is kept on record", gone.key)
        self.deferred.close()
        self.removals.close()
        self.staging.remove_if_empty()

    async def _say_if_slow(self, files: list[StagedFile]) -> None:
        await trio.sleep(SLOW_S)
        left = [one for one in files if one.is_dirty]
        size = sum(one.size() for one in left)
        logger.info("ending waits for uploads of %d files, %d bytes", len(left), size)

    async def run(self) -> None:
        """Try again what could not be uploaded, until cancelled."""
        while True:
            await trio.sleep(RETRY_S)
            for staged in self.staging.pending:
                if not self._may_be_written(staged.inode):
                    self.uploads.start(staged)


async def _not_known(_pid: int) -> bool:
    return False
