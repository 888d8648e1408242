"""Creation, linking and removal of names. Renames build on these methods (rename.py).

A directory exists if the bucket has its marker (an empty object whose key is the prefix) or objects
below its prefix. Before a directory's last object is removed, this mount puts a marker, so that the
directory stays until rmdir. A bucket has no second name for an object: a hard link is a copy, or a
PUT of the content if the file was not uploaded yet; neither replaces an object.

The kernel sends a request again if a daemon died after it did the work and before it answered.
So a request is recorded after all checks, before it changes anything; if a repeated request finds
its change done, the request succeeds. The copy that the first attempt of such a request made is
recognised by the recorded token, or by the modification time in the metadata.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import trio

from fusefs.posix.directory.segment import ABSENT, UNCOVERED, Absent, Entry
from fusefs.posix.journal.journal import Journal
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.namespace.relocate import Relocator
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.object_metadata import PERMISSIONS, Meta, read
from fusefs.posix.nodes.prefix_lock import Name, PrefixLock
from fusefs.posix.types import Caller
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.writer import Writer
from fusefs.store.contract import find
from fusefs.store.errors import (
    ConflictError,
    ExistsError,
    NotFoundError,
    StaleVersionError,
    StoreError,
    UnsupportedError,
)
from fusefs.store.interface import IF_ABSENT, Condition, Expect, ObjectInfo, Write
from fusefs.telemetry.stalls import WaitCause, stage

Made = TypeVar("Made")

# The longest time that a copy waits for the repair of its source, if a late request has undone
# the source, and the pause between two attempts.
PUT_BACK_S = 10.0
PUT_BACK_PAUSE_S = 0.05


class CreateRemove(MountPart):
    """Creates, links and removes the names of one mount. Belongs to the event loop."""

    def __init__(
        self, state: MountState, writing: Writing, writer: Writer, prefix_lock: PrefixLock
    ) -> None:
        super().__init__(state)
        self._mover = Relocator(state, writing.staging)
        self._owner = state.owner
        self._log = state.journal
        self._writer = writer
        self._rules = writing.rules
        self._unanswered = state.store.unanswered
        self.prefix_lock = prefix_lock
        # The ids of requests that this process has begun and not ended.
        self._under_way: set[int] = set()
        # The node ids of files that an earlier process staged; None before the first change.
        self._inherited: set[int] | None = None

    def write_all(self, log: Journal) -> None:
        """Write the requests under way to a new journal: the kernel may send them again."""
        for unique in self._under_way:
            log.begun(unique)

    @asynccontextmanager
    async def _changing(self, caller: Caller, *names: Name) -> AsyncIterator[None]:
        self._note_inherited()
        try:
            async with self.prefix_lock.change(*names):
                yield
        finally:
            self._under_way.discard(caller.unique)

    async def below(self, name: Name, change: Coroutine[Any, Any, Made]) -> Made:
        """Run a change of a name while no directory above it can be renamed."""
        try:
            async with self.prefix_lock.change(name):
                return await change
        finally:
            change.close()  # in case the coroutine was never started

    def _note_inherited(self) -> None:
        """Remember, before the first change, the files that an earlier process staged."""
        if self._inherited is None:
            self._inherited = {staged.inode.nodeid for staged in self._writer.staging}

    def _may_be_there(self, staged: StagedFile) -> bool:
        """True if the bucket may have the file's object, perhaps by an unanswered request."""
        if self._unanswered.concerns(staged.key):
            return True
        return staged.etag is not None or staged.inode.nodeid in (self._inherited or ())

    def _begin(self, caller: Caller) -> None:
        """Record a request that is about to change something."""
        self._log.begun(caller.unique)
        self._under_way.add(caller.unique)

    def _is_repeated(self, caller: Caller) -> bool:
        """True if an earlier process had begun this request, and may have carried it out."""
        return caller.unique in self._state.begun

    def _correct(self, parent: Inode, name: str) -> None:
        """Mark a directory's listing as outdated: the bucket has this name by now."""
        self._directories.correct(self._directories.get(self._inodes.key(parent)), name, None)

    async def _find(self, parent: Inode, name: str) -> Entry | Absent:
        directory = self._directories.get(self._inodes.key(parent))
        return (await self._directories.lookup(directory, name))[0]

    def _file_now(self, parent: Inode, name: str, entry: ObjectInfo) -> ObjectInfo:
        """The current version of a file listed as `entry`, which this mount may have changed."""
        known = self._directories.lookup_now(self._directories.get(self._inodes.key(parent)), name)
        return known[0] if known is not None and isinstance(known[0], ObjectInfo) else entry

    async def file_now(self, inode: Inode) -> Inode:
        """Return the node that now has a file's name: a write may have given the name a new node.

        Of a file that this mount removed or replaced, return the node with the latest content.
        """
        if inode.lead is not None:
            return inode.lead
        if inode.is_current or inode.staged is not None or inode.info is None:
            return inode
        if inode.parent is None or inode.is_removed:
            return inode
        entry = await self._find(inode.parent, inode.name)
        if isinstance(entry, Absent) or entry is None:
            return inode
        return self._inodes.resolve(inode.parent, inode.name, entry)

    # Making

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        async with self._changing(caller, (parent, name)):
            if not self._is_repeated(caller):
                await self._check_absent(parent, name)
            prefix = self._inodes.key(parent)
            meta = self._owner.of_new(stat.S_IFDIR | mode & PERMISSIONS, caller.uid, caller.gid)
            self._begin(caller)
            try:
                etag = await self._writer.empties.put_marker(prefix + name + "/", meta, None)
            except ConflictError as error:
                self._correct(parent, name)
                raise OSError(errno.EEXIST, name) from error
            self._directories.changed(prefix, name, None)
            if not self._is_repeated(caller):
                self._directories.made(prefix + name + "/")
                self._writer.exclusive.made(prefix + name + "/")
            inode = self._inodes.resolve(parent, name, None)
            inode.meta, inode.marker_etag, inode.packed = meta, etag, None
            self._inodes.entries_changed(parent)
            return inode

    async def symlink(self, parent: Inode, name: str, target: bytes, caller: Caller) -> Inode:
        async with self._changing(caller, (parent, name)):
            if not self._is_repeated(caller):
                await self._check_absent(parent, name)
            prefix = self._inodes.key(parent)
            meta = self._owner.of_new(stat.S_IFLNK | 0o777, caller.uid, caller.gid)
            meta = meta.changed(mtime_ns=time.time_ns())
            self._begin(caller)
            # Not in TMPDIR, which may be on this mount: the daemon would wait for itself.
            memory = os.memfd_create("fusefs-link", os.MFD_CLOEXEC)
            with os.fdopen(memory, "wb", buffering=0) as file:
                file.write(target)

                async def put(condition: Condition) -> ObjectInfo:
                    write = Write(meta.as_metadata(), condition=condition)
                    size = len(target)
                    return await self._store.put_file(prefix + name, file.fileno(), size, write)

                if self._is_repeated(caller):
                    info = await put(Expect(None))
                else:
                    info = await self._put_new(parent, name, put)
            self._directories.changed(prefix, name, info)
            inode = self._inodes.create(parent, name, info)
            inode.meta = meta
            self._inodes.entries_changed(parent)
            return inode

    async def _put_new(
        self, parent: Inode, name: str, put: Callable[[Condition], Awaitable[ObjectInfo]]
    ) -> ObjectInfo:
        """Call `put` under a condition, or after a check by requests; EEXIST if the name exists."""
        try:
            return await put(IF_ABSENT)
        except UnsupportedError:
            await self._look_again(parent, name)
            return await put(Expect(None))
        except ExistsError:
            self._correct(parent, name)
            raise

    async def _look_again(self, parent: Inode, name: str) -> None:
        """Raise EEXIST if the bucket has a file or a directory of this name by now."""
        prefix = self._inodes.key(parent)
        below = await self._store.list_page(f"{prefix}{name}/", delimiter="", max_keys=1)
        if not below.objects and await find(self._store, prefix + name) is None:
            return
        self._correct(parent, name)
        raise OSError(errno.EEXIST, name)

    async def _check_absent(self, parent: Inode, name: str) -> None:
        if not isinstance(await self._find(parent, name), Absent):
            raise OSError(errno.EEXIST, name)

    async def change_directory(self, inode: Inode, meta: Meta) -> None:
        """Write a directory's attributes to its marker; the marker's content, if any, stays."""
        async with self.prefix_lock.change((inode, "")):
            prefix, etag, put = self._inodes.key(inode), None, self._writer.empties.put_marker
            if inode.marker_etag is not None:
                with suppress(ConflictError):
                    etag = await put(prefix, meta, inode.marker_etag)
            if etag is None:
                there = await find(self._store, prefix)
                if there is None or not there.size:
                    etag = await put(prefix, meta, there.etag if there is not None else None)
                else:
                    await self._store.copy(there, prefix, Write(meta.as_metadata()))
            inode.marker_etag, inode.meta = etag, meta

    # Linking, and the copies that renames need

    async def link(self, inode: Inode, to: Inode, name: str, caller: Caller) -> Inode:
        """Create a hard link; EPERM for a directory, ENOENT if removed, EEXIST for a used name."""
        if inode.info is None:
            raise OSError(errno.EPERM, "a directory has one name")
        if inode.parent is None or inode.is_removed:
            raise OSError(errno.ENOENT, "the file has no name any more")
        names = (inode.parent, inode.name), (to, name)
        async with self._changing(caller, *names), AsyncExitStack() as stack:
            prefix = self._inodes.key(to)
            if not self._is_repeated(caller):
                await self._check_absent(to, name)
            self._begin(caller)
            await self._writer.deferred.flush(inode.info.key)
            await stack.enter_async_context(self._writer.not_staged(inode))
            staged = await self._held(stack, inode)
            made = None
            if self._is_repeated(caller):
                made = await self._made_before(inode, prefix + name)
            if made is not None:
                await self._store.confirm(prefix + name, made)
            else:
                copy = partial(self._copy_as_is, inode, staged, prefix + name)
                made = await self._put_new(to, name, copy)
            self._directories.changed(prefix, name, made)
            linked = self._inodes.resolve(to, name, made)
            linked.meta = _said(inode)
            self._inodes.link(linked, inode)
            self._inodes.entries_changed(to)
            return linked

    async def _made_before(self, inode: Inode, key: str) -> ObjectInfo | None:
        """Find the copy that a repeated request's first attempt made, by token or time, or None."""
        found = await find(self._store, key)
        if found is None:
            return None
        if self._unanswered.concerns(key):
            return found if self._unanswered.may_have_made(found) else None
        if inode.staged is None and inode.meta is None:
            source = await find(self._store, inode.object.key)
            if source is None:
                return found  # the rename has deleted the source already
            inode.meta = read(source.metadata or {}, inode.default_meta(self._owner))
        meta = _said(inode)
        there = read(found.metadata or {}, inode.default_meta(self._owner))
        return found if meta is not None and meta.mtime_ns == there.mtime_ns else None

    async def _copy_as_is(
        self, inode: Inode, staged: StagedFile | None, key: str, condition: Condition
    ) -> ObjectInfo:
        """Copy or put a file's current content and attributes under another key."""
        source = inode.info
        assert source is not None
        if staged is not None and (staged.is_content_dirty or staged.etag != source.etag):
            return await self._writer.uploads.put_new(staged, key, condition)
        if self._unanswered.may_have_undone(source.key):
            return (await self._copy_expected(source, key, condition, _said(inode)))[1]
        try:
            if staged is not None and staged.is_meta_dirty:
                return await self._copy_described(source, key, condition, staged.described())
            return await self._copy_marked(source, key, condition)
        except (NotFoundError, StaleVersionError):
            # This makes the kernel look the name up again.
            self._state.mark_stale(inode)
            raise

    async def _copy_marked(self, source: ObjectInfo, key: str, condition: Condition) -> ObjectInfo:
        """Copy a version; if this mount put it recently, the copy gets a token to identify it."""
        own = self._writer.uploads.own.get(source)
        if own is not None and read(own.metadata or {}, self._owner.file).mtime_ns is not None:
            write = Write(own.metadata, condition=condition, is_own=True)
            return await self._store.copy(own, key, write)
        write = Write(condition=condition, revise=self._mover.dating(source))
        return await self._store.copy(source, key, write)

    async def _copy_expected(
        self, source: ObjectInfo, key: str, condition: Condition, meta: Meta | None
    ) -> tuple[ObjectInfo, ObjectInfo]:
        """Copy `source` to `key`; if a late request has undone `source`, retry after its repair.

        Returns (the copied version, the copy). Raises StoreError if the repair takes too long.
        """
        until = trio.current_time() + PUT_BACK_S
        while True:
            try:
                if meta is not None:
                    return source, await self._copy_described(source, key, condition, meta)
                write = Write(condition=condition, revise=self._mover.dating(source))
                return source, await self._store.copy(source, key, write)
            except (NotFoundError, StaleVersionError) as error:
                expected = None
                with trio.move_on_at(until):
                    await trio.sleep(PUT_BACK_PAUSE_S)
                    expected = await self._unanswered.restored(source.key)
                if expected is None or expected.size != source.size:
                    raise undone(source.key) from error
                source = expected

    async def _copy_described(
        self, source: ObjectInfo, key: str, condition: Condition, meta: Meta
    ) -> ObjectInfo:
        write = Write(meta.as_metadata(), condition=condition)
        return await self._writer.uploads.own.describe(source, key, write)

    # Removing

    def unlink_now(self, parent: Inode, name: str, caller: Caller) -> bool:
        """Remove a file whose DELETE may be sent later; return False if `unlink` is needed."""
        prefix = self._inodes.key(parent)
        key = prefix + name
        if not self._writer.removals.may_defer(key) or not self.prefix_lock.is_open((parent, name)):
            return False
        known = self._directories.lookup_now(self._directories.get(prefix), name)
        inode = parent.child(name)
        if known is None or not isinstance(known[0], ObjectInfo) or not self._rules.may_delete:
            return False
        if (inode is not None and inode.staged is not None) or self._writer.deferred.has(key):
            return False
        stays = parent.parent is None or parent.marker_etag is not None
        if not stays and not self._directories.has_other(prefix, name):
            return False
        self._note_inherited()
        self._log.begun(caller.unique)
        if not self._writer.removals.try_defer(key, known[0].etag):
            return False
        self._gone(parent, name)
        return True

    async def unlink(self, parent: Inode, name: str, caller: Caller) -> None:
        async with self._changing(caller, (parent, name)):
            entry = await self._find(parent, name)
            if isinstance(entry, Absent):
                if self._is_repeated(caller):
                    await self._store.confirm(self._inodes.key(parent) + name, None)
                    self._gone(parent, name)
                    return
                raise OSError(errno.ENOENT, name)
            if entry is None:
                raise OSError(errno.EISDIR, name)
            self._check_deleting(name)
            self._begin(caller)
            await self._keep_directory(parent, name)
            await self._delete_file(parent, name, entry)
            self._gone(parent, name)

    async def _delete_file(self, parent: Inode, name: str, entry: ObjectInfo) -> None:
        inode = parent.child(name)
        key = self._inodes.key(parent) + name
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writer.not_staged(inode))
            await stack.enter_async_context(self._writer.deferred.taken(key))
            staged = await self._held(stack, inode)
            if staged is None or self._may_be_there(staged):
                etag = staged.etag if staged else self._file_now(parent, name, entry).etag
                if staged is not None or not self._writer.removals.try_defer(key, etag):
                    await self._store.delete(key, etag or None, adopts=True)
                    self._writer.removals.note_allowed(key)
            if staged is not None:
                self._writer.staging.unlink(staged)
        self._let_go(staged)

    async def rmdir(self, parent: Inode, name: str, caller: Caller) -> None:
        async with self._changing(caller, (parent, name)):
            prefix = self._inodes.key(parent) + name + "/"
            entry = await self._find(parent, name)
            if isinstance(entry, Absent):
                if self._is_repeated(caller):
                    await self._store.confirm(prefix, None)
                    self._gone(parent, name, UNCOVERED)
                    return
                raise OSError(errno.ENOENT, name)
            if entry is not None:
                raise OSError(errno.ENOTDIR, name)
            if not await self._is_empty(prefix):
                raise OSError(errno.ENOTEMPTY, name)
            self._check_deleting(name)
            self._begin(caller)
            await self._keep_directory(parent, name)
            inode = parent.child(name)
            etag = inode.marker_etag if inode is not None else None
            try:
                await self._store.delete(prefix, etag, adopts=True)
            except ConflictError as error:
                raise OSError(errno.ENOTEMPTY, name) from error
            self._writer.exclusive.removed(prefix)
            self._gone(parent, name, UNCOVERED)

    def needs_fsync(self, directory: Inode) -> bool:
        pending = self._writer.removals.pending(self._inodes.key(directory))
        return self._rules.may_be_local or bool(pending)

    async def fsync(self, directory: Inode) -> None:
        """Wait until the removals below a directory are done, and are safe against a power cut."""
        await self._writer.removals.flush_below(self._inodes.key(directory))
        if self._rules.may_be_local:
            staging = self._writer.staging
            with stage(WaitCause.CACHE_DISK):
                await trio.to_thread.run_sync(staging.sync_names, limiter=staging.syncing)

    async def _is_empty(self, prefix: str) -> bool:
        await self._writer.removals.flush_below(prefix)
        if self._directories.pending_changes.has_lasting(prefix):
            return False
        # Another client may have put an object there since the last listing.
        segment = await self._directories.look_again(self._directories.get(prefix))
        return not segment.entries and not segment.has_hidden

    async def _keep_directory(self, directory: Inode, name: str) -> None:
        """Put a directory's marker if `name`, about to be removed, is its only entry."""
        prefix = self._inodes.key(directory)
        if directory.parent is None or directory.marker_etag is not None:
            return
        if self._directories.has_other(prefix, name):
            return
        page = await self._store.list_page(prefix, max_keys=3)
        there = {info.key for info in page.objects} | set(page.prefixes)
        own = next((info for info in page.objects if info.key == prefix), None)
        directory.marker_etag = own.etag or None if own is not None and not own.size else None
        if not there - {prefix + name, prefix + name + "/"}:
            meta = directory.meta or self._owner.directory
            with suppress(ConflictError):
                directory.marker_etag = await self._writer.empties.put_marker(prefix, meta, None)

    def _gone(self, parent: Inode, name: str, left: Absent = ABSENT) -> None:
        inode = parent.child(name)
        if inode is not None and inode.info is not None:
            self._cache.obsolete(inode.info.version)
        self._inodes.numbers.removed(parent, name, is_directory=left is UNCOVERED)
        nodes = self._inodes.former(parent, name)
        self._inodes.detach(nodes | {inode} if inode is not None else nodes)
        self._inodes.entries_changed(parent)
        self._writer.deferred.drop(self._inodes.key(parent) + name)
        self._directories.changed(self._inodes.key(parent), name, left)

    def _check_deleting(self, name: str) -> None:
        if not self._rules.may_delete:
            raise OSError(errno.EPERM, f"{name}: the mount removes nothing (--no-delete)")

    async def _held(self, stack: AsyncExitStack, inode: Inode | None) -> StagedFile | None:
        """Lock and return a node's staged file, if any: no write or upload until `stack` ends."""
        while inode is not None and inode.staged is not None:
            staged = inode.staged
            held = self._writer.uploads.held(staged)
            await held.__aenter__()
            if inode.staged is staged:
                stack.push_async_exit(held.__aexit__)
                return staged
            await held.__aexit__(None, None, None)  # the file was released meanwhile
        return None

    def _let_go(self, staged: StagedFile | None) -> None:
        """Release an unlinked file's content, unless a program has the file open."""
        if staged is not None and staged.inode.staged is staged and not staged.inode.is_open:
            staged.inode.meta = staged.described()  # for nodes with older versions that are open
            self._writer.staging.release(staged)
            self._inodes.drop_unknown(staged.inode)


def _said(inode: Inode) -> Meta | None:
    """The attributes of a file, always with a modification time; None if they are unknown."""
    if inode.staged is not None:
        return inode.staged.described()
    meta = inode.meta
    if meta is None or inode.info is None or meta.mtime_ns is not None:
        return meta
    return meta.changed(mtime_ns=inode.info.mtime_ns)  # a copy has another Last-Modified


def undone(key: str) -> StoreError:
    """The error of a change of a key whose last change a late request may have undone."""
    return StoreError(f"{key} may have been undone by a late request, and is put back soon")
