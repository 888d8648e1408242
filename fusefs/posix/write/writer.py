"""Writes to files: a content is staged on the local disk, and uploaded whole.

While a file is staged, every handle of its node reads the staged content, so readers on this mount
see writes at once. If the kernel reads a cache file for a program, the cache file itself is staged
(sharing.py), else a copy of its content. flush.py handles closes.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from weakref import WeakValueDictionary

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.linux.descriptors import check_unreserved
from fusefs.linux.libc import ALLOCATION_MODES, KEEP_SIZE, PUNCH_HOLE, allocate
from fusefs.posix.directory.segment import Absent
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.nodes.edit_base import IN_PARTS, PAGE, EditBase, page_edges
from fusefs.posix.nodes.handles import WRITING
from fusefs.posix.nodes.inode import UNKNOWN_OWNER, StagedFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.names import split_key
from fusefs.posix.nodes.object_metadata import PERMISSIONS, Meta
from fusefs.posix.nodes.prefix_lock import PrefixLock
from fusefs.posix.types import Answer, Caller, OpenResult
from fusefs.posix.write import staged_sums
from fusefs.posix.write.backlog import Backlog
from fusefs.posix.write.exclusive import EmptyObjects, is_undecided
from fusefs.posix.write.flush import Flusher
from fusefs.posix.write.removals import Removals
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.sharing import Sharing
from fusefs.posix.write.sparse_edit import SparseEditor, write_fully
from fusefs.store.contract import find
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectInfo
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.writing")

# A copy that its program does not open within this time is dropped.
UNOPENED_S = 10.0
# The most bytes that are zeroed by one write.
ZEROS = 1 << 20


class Writer(MountPart):
    """The opens for writing, the writes and the truncations of one mount. For the event loop."""

    def __init__(
        self, state: MountState, writing: Writing, removals: Removals, prefix_lock: PrefixLock
    ) -> None:
        super().__init__(state)
        self.rules = writing.rules
        self.inodes = state.inodes
        self.directories = state.directories
        self.staging = writing.staging
        self.editor = SparseEditor(state.store, state.cache, state.downloader)
        self.sharing = Sharing(state)
        self.removals = removals
        self.flusher = Flusher(state, writing, removals, self.editor, self.sharing, prefix_lock)
        self.uploads = self.flusher.uploads
        self.exclusive = self.flusher.exclusive
        self.deferred = self.flusher.deferred
        self.backlog = Backlog(writing, self.flusher)
        self._nursery = writing.nursery
        self._make_room = writing.make_room
        self._disk_latency = state.downloader.disk_latency
        self._disk = trio.CapacityLimiter(16)
        # By node id: a lock that is held while the node's content is being staged.
        self._preparing: WeakValueDictionary[int, trio.Lock] = WeakValueDictionary()
        self.empties = EmptyObjects(state.store, writing.staging.directory.name)

    # Opening

    def create(
        self,
        parent: Inode,
        name: str,
        mode: int,
        flags: int,
        caller: Caller,
        *,
        is_reserved: bool = False,
    ) -> Answer[tuple[Inode, OpenResult]]:
        """Create a file and open it; with O_EXCL, raise EEXIST if the file exists by now.

        With O_EXCL the bucket decides whether the file is new: now, if `is_reserved` is set or
        exclusive.py says so; else when the content is uploaded.
        """
        meta = self._state.owner.of_new(stat.S_IFREG | mode & PERMISSIONS, caller.uid, caller.gid)
        made, prefix = parent.child(name), self.inodes.key(parent)
        if flags & os.O_EXCL and not is_reserved:
            known = self.directories.lookup_now(self.directories.get(prefix), name)
            is_missing = known is not None and isinstance(known[0], Absent)
            is_reserved = not is_missing or self.exclusive.is_reserved(prefix, name, caller.pid)
        if (flags & os.O_EXCL and is_reserved) or (made is not None and made.staged is not None):
            return self._create_later(parent, name, meta, flags, caller)
        info = ObjectInfo(prefix + name, 0, "", time.time_ns())
        return self._created(parent, name, info, meta, flags, caller)

    async def _create_later(
        self, parent: Inode, name: str, meta: Meta, flags: int, caller: Caller
    ) -> tuple[Inode, OpenResult]:
        now = time.time_ns()
        info = ObjectInfo(self.inodes.key(parent) + name, 0, "", now)
        made = parent.child(name)
        is_made = made is not None and made.staged is not None and is_undecided(made.staged)
        if flags & os.O_EXCL and not is_made:
            # The bucket decides between two nodes that create one lock file.
            info = await self.empties.put(info.key, meta.changed(mtime_ns=now), caller)
        made = parent.child(name)
        if made is not None and made.staged is not None and not made.staged.is_unlinked:
            # This request, resent after a process died, or a cancelled request made the file.
            if flags & os.O_TRUNC:
                await self.stage(made, keep=0, is_anew=True)
            self.inodes.count(made, time.monotonic())
            return made, self.open_staged(made, flags, caller)
        try:
            return self._created(parent, name, info, meta, flags, caller)
        except OSError:
            if info.etag:
                # Else a lock file would stay in the bucket that no program holds.
                await self._store.delete(info.key, info.etag)
            raise

    def _created(
        self, parent: Inode, name: str, info: ObjectInfo, meta: Meta, flags: int, caller: Caller
    ) -> tuple[Inode, OpenResult]:
        self.deferred.drop(info.key)
        inode = self.inodes.create(parent, name, info)
        is_exclusive = bool(flags & os.O_EXCL) and not info.etag
        # Without either flag the program may mean a file that another node has just created.
        is_anew = bool(flags & (os.O_EXCL | os.O_TRUNC))
        try:
            fd = self.staging.prepare(inode)
            os.utime(fd, ns=(info.mtime_ns, info.mtime_ns))
            staged = self.staging.begin(
                inode, fd, meta, info.etag or None, is_exclusive=is_exclusive, is_anew=is_anew
            )
        except OSError:
            self.inodes.drop_unknown(inode)
            raise
        if flags & os.O_EXCL:
            staged.creator = caller.pid
        if is_exclusive:
            self.exclusive.watch(staged)
        if staged.etag is not None:
            staged.uploaded = staged.changes
        self.flusher.list_staged(inode)
        self.inodes.entries_changed(parent)
        self.inodes.count(inode, time.monotonic())
        return inode, self.open_staged(inode, flags, caller)

    def open(self, inode: Inode, flags: int, caller: Caller) -> Answer[OpenResult]:
        """Open a file for writing, or a staged file in any mode; EISDIR for a directory."""
        if inode.info is None:
            raise OSError(errno.EISDIR, "a directory")
        if flags & (WRITING | os.O_TRUNC):
            self._check_overwriting(inode)
        looks = bool(flags & WRITING) and not _only_appends(flags)
        is_staged = inode.staged is not None and not flags & os.O_TRUNC
        if is_staged and (not looks or self._is_current(inode)):
            return self.open_staged(inode, flags, caller)
        return self._open_later(inode, flags, caller)

    def _check_overwriting(self, inode: Inode) -> None:
        """Raise EPERM if --no-delete forbids to overwrite the object of a file."""
        is_new = inode.staged is not None and inode.staged.etag is None
        if not self.rules.may_delete and not is_new:
            raise OSError(errno.EPERM, "the mount removes and overwrites nothing (--no-delete)")

    async def _open_later(self, inode: Inode, flags: int, caller: Caller) -> OpenResult:
        if flags & os.O_TRUNC:
            staged = await self.stage(inode, keep=0, is_anew=True)
        else:
            staged = await self.stage(inode, keep=None, looks=not _only_appends(flags))
        # A check for mappings may have unregistered the staged file from the kernel.
        while not self.sharing.is_ready(inode):
            is_done = await self.sharing.register(inode)
            if inode.staged is not staged:
                staged = await self.stage(inode, keep=None, looks=False)
            elif not is_done:
                break
        return self.open_staged(inode, flags, caller)

    def _is_current(self, inode: Inode) -> bool:
        """True if a program may change a node's content without a HEAD for the bucket's version.

        True if programs here are changing the file or have removed it, if a GET will follow and
        show the version, or if listings never expire. An upload over another version is refused.
        """
        info, staged = inode.info, inode.staged
        assert info is not None
        if math.isinf(self.directories.get(split_key(info.key)[0]).most_s):
            return True
        if staged is not None:
            return staged.is_dirty or bool(inode.writing)
        if not inode.is_current or inode.is_removed:
            return True
        file = self._cache.find(info.version)
        needed = 1 if info.size > IN_PARTS else info.size
        is_here = file is not None and file.present.covers(0, needed)
        return bool(info.size) and not is_here and self._downloader.proves_versions

    async def _look(self, inode: Inode) -> None:
        """Send a HEAD; raise ESTALE if the bucket has another version than the node."""
        await self.deferred.until_unsent(inode.object.key)
        known, staged = inode.object, inode.staged
        found = await find(self._store, known.key)
        if self._store.unanswered.has_undone(known.key, found):
            found = await self._store.unanswered.restored(known.key)
        if inode.info is not known or inode.staged is not staged or not inode.is_current:
            return  # this mount has changed the file meanwhile
        if found is None or found.etag != known.etag:
            # A reader that has the file open keeps it staged: listings showed it until now.
            self.directories.pending_changes.landed(*split_key(known.key))
            if inode.parent is not None:
                directory = self.directories.get(self.inodes.key(inode.parent))
                self.directories.correct(directory, inode.name, found)
            self.inodes.mark_replaced(inode)
            raise OSError(errno.ESTALE, "the object has been replaced")

    def open_staged(self, inode: Inode, flags: int, caller: Caller) -> OpenResult:
        version, staged = inode.object.version, inode.staged
        may_write = bool(flags & WRITING)
        if staged is not None and (backing_id := self.sharing.backing_id(staged)):
            assert staged.backing is not None
            self._cache.pin_again(staged.backing)
            if flags & os.O_ACCMODE == os.O_RDWR:
                staged.may_be_mapped = True
                self.staging.drop_base(staged)  # its parts may lack what is stored unseen
                staged_sums.forget(staged)
                self.staging.note_edited(staged)
            handle = self._handles.open_file(
                inode, version, staged.backing, backing_id, flags, caller.unique
            )
            return OpenResult(handle.fh, True, backing_id, may_write, is_direct=may_write)
        file = self._cache.pin(version) if version.etag else CacheFile.unkept()
        handle = self._handles.open_file(inode, version, file, 0, flags, caller.unique)
        # A handle that only writes needs no second copy in the kernel's pages.
        is_direct = flags & os.O_ACCMODE == os.O_WRONLY
        return OpenResult(handle.fh, inode.keeps_pages(), may_write=may_write, is_direct=is_direct)

    async def stage(
        self, inode: Inode, *, keep: int | None, looks: bool = True, is_anew: bool = False
    ) -> StagedFile:
        """Stage a file with the first `keep` bytes of its content (None: all); return the file.

        With `looks`, a HEAD checks before that the node has the bucket's version. Without it, the
        upload puts appended bytes behind the version that the bucket has then (upload_steps.py).
        `is_anew`: the program writes the file from scratch, so the upload replaces any version.

        Raises:
            OSError: ESTALE; the object was replaced, or a new node has the copy, to be opened.
        """
        if not inode.writing:
            self._check_overwriting(inode)
        if looks and not is_anew and not self._is_current(inode):
            await self._look(inode)
        while True:
            if inode.staged is None:
                await self._begin(inode, keep)
            staged = inode.staged
            assert staged is not None
            if keep is None:
                return staged
            async with self.uploads.locked(staged):
                if inode.staged is not staged:
                    continue  # the file is not staged any more
                self.staging.charge(staged, keep)
                if is_anew and not staged.is_anew:
                    staged.is_anew, staged.only_appended = True, False
                    self.staging.record(staged)
                elif staged.only_appended:
                    self.staging.note_edited(staged)
                staged_sums.forget(staged)
                before = staged.size()
                os.ftruncate(staged.fd, keep)
                self.uploads.truncated(staged, before, keep)
                return staged

    async def _begin(self, inode: Inode, keep: int | None) -> None:
        was_current = inode.is_current
        # The table's weak reference drops the lock when no task refers to it any more.
        lock = self._preparing.setdefault(inode.nodeid, trio.Lock())
        async with lock:
            if inode.staged is not None:
                return
            async with self.deferred.taken(inode.object.key) as described:
                staged = await self._staged_content(inode, keep, was_current=was_current)
                staged.before = described.meta if described is not None else inode.meta
                if described is not None:
                    staged.meta = described.meta.changed(mtime_ns=None)
                    staged.touch_meta()
                    self.staging.record(staged)
            if staged.inode is not inode:
                self._nursery.start_soon(self._drop_unopened, staged)
                raise OSError(
                    errno.ESTALE, "the name stands for a copy now, which may be written to"
                )

    def is_preparing(self, inode: Inode) -> bool:
        """True if a task is staging a node's content."""
        lock = self._preparing.get(inode.nodeid)
        return lock is not None and lock.locked()

    @asynccontextmanager
    async def not_staged(self, *inodes: Inode | None) -> AsyncIterator[None]:
        """Let no task stage the files of `inodes` within the context; staged files stay staged.

        Opens for writing wait until the context ends. The locks are taken in the order of the node
        ids, so that two changes of the same names can't deadlock.
        """
        known = {inode.nodeid for inode in inodes if inode is not None}
        async with AsyncExitStack() as stack:
            for nodeid in sorted(known):
                lock = self._preparing.setdefault(nodeid, trio.Lock())
                await stack.enter_async_context(lock)
            yield

    def _check_node(self, inode: Inode, *, was_current: bool) -> None:
        """Raise ESTALE if a node that `was_current` when its staging began is replaced by now."""
        if was_current and not inode.is_current and not inode.is_removed:
            raise OSError(errno.ESTALE, "the name stands for something else now")

    async def _staged_content(
        self, inode: Inode, keep: int | None, *, was_current: bool
    ) -> StagedFile:
        """Stage a node's content, or a copy of it under a new node that gets the name.

        Passthrough readers can't be given another file, so they share the cached copy with the
        writer. If that copy has other users, the readers stay with the old node and content.
        `was_current`: the node was not replaced when the staging began; ESTALE if it is by now.
        """
        info = inode.object
        file = self._cache.pin(info.version)
        staged: StagedFile | None = None
        try:
            if inode.passthrough or await self.sharing.is_mapped(file):
                staged = await self._shared(inode, file, was_current=was_current)
            while staged is None:
                staged = await self._copied(inode, info, keep, was_current=was_current)
                if staged is None:
                    staged = await self._shared(inode, file, was_current=was_current)
        except (StaleVersionError, NotFoundError):
            self._state.mark_stale(inode)
            raise OSError(errno.ESTALE, "the object has been replaced") from None
        finally:
            self._cache.unpin(file)
        staged.is_rewrite = bool(staged.etag)
        if not staged.is_unlinked:
            self.flusher.list_staged(staged.inode)
        return staged

    async def _copied(
        self, inode: Inode, info: ObjectInfo, keep: int | None, *, was_current: bool
    ) -> StagedFile | None:
        """Stage a copy of `keep` bytes (None: all); None if passthrough reads began meanwhile."""
        was_read = bool(inode.passthrough)
        if was_read:
            keep = None  # the program truncates the file when it opens the new node
        wanted = info.size if keep is None else min(keep, info.size)
        with ExitStack() as undo:
            fd = self.staging.prepare(inode)
            undo.callback(self.staging.discard, inode, fd)
            base = await self.editor.copy(info.version, fd, wanted)
            if base is not None:
                undo.callback(self.editor.drop, base)
            self._check_node(inode, was_current=was_current)
            if inode.passthrough and not was_read:
                return None
            if keep is None:
                self._set_time(inode, fd)
            target = inode
            if inode.passthrough:
                # A new node gets the name, and the file that was prepared for the old one.
                if not inode.is_current or inode.parent is None:
                    raise OSError(errno.ESTALE, "what is read under it is not to be changed")
                self.inodes.mark_replaced(inode)
                target = self.inodes.resolve(inode.parent, inode.name, inode.object)
                target.meta = inode.meta
                self.staging.move_prepared(inode, target)
            undo.pop_all()
        try:
            staged = self._begin_with(target, fd, base)
        except OSError:
            if base is not None:
                self.editor.drop(base)
            raise
        if keep is None:
            staged.note_unchanged(info.size)
        return staged

    def _set_time(self, inode: Inode, fd: int) -> None:
        known = inode.meta.mtime_ns if inode.meta is not None else None
        mtime_ns = inode.object.mtime_ns if known is None else known
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _begin_with(
        self, inode: Inode, fd: int, base: EditBase | None, taken: CacheFile | None = None
    ) -> StagedFile:
        meta = (inode.meta or inode.default_meta(self._state.owner)).changed(mtime_ns=None)
        etag, is_unlinked = inode.object.etag, inode.is_removed  # removed meanwhile
        return self.staging.begin(inode, fd, meta, etag, base, taken, is_unlinked=is_unlinked)

    async def _drop_unopened(self, staged: StagedFile) -> None:
        """Release a file that was staged for a program, unless it is open after UNOPENED_S."""
        await trio.sleep(UNOPENED_S)
        if staged.inode.staged is staged and not staged.inode.is_open:
            self.flusher.released(staged.inode)

    async def _shared(
        self, inode: Inode, file: CacheFile, *, was_current: bool
    ) -> StagedFile | None:
        """Stage `file` itself, shared with its readers; None if other users or errors forbid it."""
        if self.staging.edits(file) or not await self.sharing.begin(file):
            return None
        info = inode.info
        assert info is not None
        base: EditBase | None = None
        if info.size > IN_PARTS:
            # Until a program may map the file, unchanged parts are copied on the server.
            self._cache.pin_again(file)
            base = EditBase(file, info.size)
            base.filled.add(0, -(-info.size // PAGE) * PAGE)
        try:
            self._check_node(inode, was_current=was_current)
            if self._cache.find(info.version) is not file:
                raise OSError(errno.ESTALE, "its cached copy was dropped")
            check_unreserved()
            fd = os.dup(file.fd)
            self._set_time(inode, fd)
            staged = self._begin_with(inode, fd, base, file)
        except OSError as error:
            if base is not None:
                self._cache.unpin(file)
            self._cache.handover.cancel(file)
            if error.errno == errno.ESTALE:
                raise
            logger.info("%s is copied to be written: %s", info.key, error.strerror)
            return None
        staged.note_unchanged(info.size)
        return staged

    # Changing

    def write(
        self,
        fh: int,
        offset: int,
        data: memoryview,
        owner: int = UNKNOWN_OWNER,
        *,
        is_appended: bool = False,
    ) -> Answer[int]:
        """Write to an open file for the lock owner `owner`; return the number of bytes written.

        `is_appended`: this is a write with O_APPEND, and no store through a mapping.
        """
        staged = self._staged_of(fh)
        if not is_appended and staged.only_appended:
            self.staging.note_edited(staged)
        if is_appended and staged.rebases:
            offset = staged.size()  # `offset` is from an old size
        stop = offset + len(data)
        base = staged.base
        # False if a page would be partly in the file and partly only in the object.
        is_whole = base is None or not any(base.lacks(*page) for page in page_edges(offset, stop))
        is_free = not staged.lock.locked() or (
            staged.sending is not None and offset >= staged.sending
        )
        if is_whole and is_free:
            self._about_to_write(staged, stop)
            count = self._write_now(staged.fd, data, offset)
            if count:
                self._note_writer(staged, owner)
                self.uploads.wrote(staged, offset, stop, has_failed=count < len(data))
            if count == len(data):
                return count
        # The session reuses the memory of `data` for the next request.
        rebases = staged.rebases if is_appended else None
        return self._write_later(staged, offset, bytes(data), owner, rebases)

    def _about_to_write(self, staged: StagedFile, stop: int) -> None:
        if stop > staged.charged:
            self.staging.charge(staged, stop)
        if staged.sum is not None:
            staged_sums.forget(staged)

    def _write_now(self, fd: int, data: memoryview, offset: int) -> int:
        """Write now if the disk is quick; return the byte count, or 0 if a thread has to write."""
        # Past writes tell if the disk is quick, as ext4 refuses RWF_NOWAIT.
        if not self._disk_latency.is_quick:
            return 0
        try:
            return self._disk_latency.timed(lambda: os.pwrite(fd, data, offset), is_in_loop=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return 0

    async def _write_later(
        self, staged: StagedFile, offset: int, data: bytes, owner: int, rebases: int | None
    ) -> int:
        """Write once a file's lock is free; return the byte count.

        For an append, `rebases` says how often the file's content had been put behind a newer
        object at the request (else None). If it has been since, the bytes go to the new end.
        """
        async with self.uploads.locked(staged):
            staged.check_kept()
            if rebases is not None and rebases != staged.rebases:
                offset = staged.size()
            stop = offset + len(data)
            self._about_to_write(staged, stop)
            if staged.base is not None:
                await self.editor.fill_edges(staged.base, staged.fd, offset, stop)
            self._note_writer(staged, owner)
            try:
                return await self._write_to_disk(staged, offset, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                await self._make_room()
                return await self._write_to_disk(staged, offset, data)

    def _note_writer(self, staged: StagedFile, owner: int) -> None:
        if not staged.writers:
            staged.since = trio.current_time()  # the file may have been open for long
        staged.writers.add(owner)

    async def _write_to_disk(self, staged: StagedFile, offset: int, data: bytes) -> int:
        """Write in a thread, and note the write, also a failed one: a part may be on the disk."""
        has_failed = True
        try:
            # If this is cancelled, the thread finishes a write that it has begun.
            with stage(WaitCause.CACHE_DISK):
                count = await trio.to_thread.run_sync(
                    write_fully, staged.fd, data, offset, limiter=self._disk
                )
            has_failed = False
            return count
        finally:
            self.uploads.wrote(staged, offset, offset + len(data), has_failed=has_failed)

    async def allocate(self, fh: int, offset: int, length: int, mode: int) -> None:
        """Do fallocate(2); EOPNOTSUPP for modes other than ALLOCATION_MODES."""
        staged = self._staged_of(fh)
        if mode & ~ALLOCATION_MODES:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        async with self.uploads.locked(staged):
            staged.check_kept()
            staged.writers.add(UNKNOWN_OWNER)
            if staged.only_appended:
                self.staging.note_edited(staged)
            takes_none = mode & PUNCH_HOLE or (mode & KEEP_SIZE and staged.base is not None)
            if offset + length > staged.charged and not takes_none:
                self.staging.charge(staged, offset + length)
            staged_sums.forget(staged)
            staged.touch()  # also if the call fails: a part of it may be done
            if staged.base is not None:
                await self._allocate_edited(staged, staged.base, offset, length, mode)
            else:
                await trio.to_thread.run_sync(
                    allocate, staged.fd, mode, offset, length, limiter=self._disk
                )
            # A hole may reach far behind the file's end, where nothing changes.
            stop = min(offset + length, staged.size())
            if mode & ~KEEP_SIZE and offset < stop:
                self.uploads.wrote(staged, offset, stop)  # zeros

    async def _allocate_edited(
        self, staged: StagedFile, base: EditBase, offset: int, length: int, mode: int
    ) -> None:
        """Do `allocate` for an edited object: write zeros, as a hole shows the object's bytes."""
        size, stop = staged.size(), offset + length
        if mode & ~KEEP_SIZE:
            end = min(stop, size)
            if offset < end:
                await self.editor.fill_edges(base, staged.fd, offset, end)
            for start in range(offset, end, ZEROS):
                await self._write_to_disk(staged, start, bytes(min(ZEROS, end - start)))
        if not mode & KEEP_SIZE and stop > size:
            os.ftruncate(staged.fd, stop)

    async def truncate(self, inode: Inode, size: int, *, is_anew: bool) -> None:
        """Set a file's size; upload it unless open to write. `is_anew` and errors: see `stage`."""
        await self.stage(inode, keep=size, is_anew=is_anew)
        await self.flusher.finish(inode)

    def _staged_of(self, fh: int) -> StagedFile:
        handle = self._handles.files.get(fh)
        if handle is None or handle.inode.staged is None:
            raise OSError(errno.EBADF, f"the file handle {fh} is not open for writing")
        return handle.inode.staged


def _only_appends(flags: int) -> bool:
    """True if these open flags allow nothing but appending."""
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)
