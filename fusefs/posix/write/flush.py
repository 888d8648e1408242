"""FLUSH, FSYNC and RELEASE of staged files, and the return of their contents to the cache.

FLUSH (close) and FSYNC of a changed file return when the bucket has the file. If its path has local
durability, they return when content and record are safe on the local disk; so does the close of a
temporary file, which is sent after its rename, under the last name (temporary_names.py). A close
by a process that has merely inherited a descriptor, and has not written to the file, does not wait.
If no process has written to the file, a close waits, which `touch` needs, unless the process or
its child has another descriptor of the file, whose close will wait: a shell that redirects
(`cmd > file`) opens, duplicates and closes the file before any program writes.
uploader.py sends the file. If the upload fails, the close fails with its error, and the upload is
tried again until it succeeds. Once no program has the file open, its content becomes the cached
copy of the uploaded version.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from contextlib import suppress

import trio

from fusefs.posix.directory.segment import ABSENT
from fusefs.posix.metadata.deferred_attributes import DEFER_S, DeferredAttributes
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.nodes.handles import WRITING
from fusefs.posix.nodes.inode import UNKNOWN_OWNER, FileState, StagedFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.names import split_key
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.nodes.prefix_lock import PrefixLock
from fusefs.posix.nodes.temporary_names import is_temporary
from fusefs.posix.types import Answer
from fusefs.posix.write import staged_sums
from fusefs.posix.write.exclusive import ExclusiveCreates
from fusefs.posix.write.removals import Removals
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.sharing import Sharing
from fusefs.posix.write.sparse_edit import SparseEditor
from fusefs.posix.write.staging_record import may_tell_uploaded
from fusefs.posix.write.uploader import AHEAD, Uploader
from fusefs.settings.types import Durability
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.stalls import unattended

logger = logging.getLogger("fusefs.writing")

# With local durability a file is uploaded when it has not changed for this
# long: the rename of a temporary file then costs no copy in the bucket.
LATER_S = 1.0
# The same for a temporary file with other durability. Most are renamed within milliseconds, but
# a directory that a program fills is renamed only when all is unpacked.
TEMPORARY_S = 5.0
# The pause between looks at a file that a program may have mapped and closed.
MAPPED_S = 2.0
# The pause between attempts to undo a rewrite while a directory's rename is in the way.
UNDO_S = 2.0
# A changing file is uploaded about once a minute: after EVERY_S and RETRY_S of backlog.py.
EVERY_S = 55.0
# A large file that changes all the time is sent at this rate, in bytes a second.
RATE = 1 << 20
# The number of first closes of a run (`AppendRuns`) that wait for the bucket.
WAITING = 4
# An upload of a run is delayed by GROWTH times the run's age, but by SHORTEST_S at least.
GROWTH = 3
SHORTEST_S = 1.0
MOST_RUNS = 1000


def pause_s(size: int) -> float:
    """Seconds from a change to the upload of a file of `size` bytes that programs keep changing."""
    return max(EVERY_S, size / RATE)


class AppendRuns:
    """The files that programs open, append to and close again and again. For the event loop.

    The closes of one such file are a run. Its first closes wait for the bucket, its later closes
    for the local disk alone. An upload sends the whole file; as the pauses between uploads grow
    with the run's age, all uploads of a run send about twice the bytes of the last upload.
    """

    def __init__(self) -> None:
        # By node id: the number of closes, the times of the first and last one in trio's seconds.
        self._runs: OrderedDict[int, tuple[int, float, float]] = OrderedDict()

    def closed(self, staged: StagedFile) -> float | None:
        """Note a file's close; return the upload's delay in s, None if the close waits for S3."""
        nodeid, now, size = staged.inode.nodeid, trio.current_time(), staged.size()
        count, begun, last = self._runs.pop(nodeid, (0, now, now))
        start = staged.appended_from if staged.etag is not None else None
        if start is None or size <= start:
            return None
        if now - last > pause_s(size):
            count, begun = 0, now
        self._runs[nodeid] = count + 1, begun, now
        if len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        if count < WAITING:
            return None
        return min(max(GROWTH * (now - begun), SHORTEST_S), pause_s(size))

    def forget(self, staged: StagedFile) -> None:
        """End the run of a file to which another node appends: its next closes wait for S3."""
        self._runs.pop(staged.inode.nodeid, None)


class Flusher(MountPart):
    """The closes and fsyncs of one mount's staged files. Belongs to the event loop."""

    def __init__(
        self,
        state: MountState,
        writing: Writing,
        removals: Removals,
        editor: SparseEditor,
        sharing: Sharing,
        prefix_lock: PrefixLock,
    ) -> None:
        super().__init__(state)
        self._staging = writing.staging
        self._nursery = writing.nursery
        self._rules = writing.rules
        self._sharing = sharing
        self.prefix_lock = prefix_lock
        # The files for which an `_until_let_go` task runs.
        self._mapped: set[StagedFile] = set()
        told = self.landed, self._kept_apart, self._set_aside
        self.uploads = Uploader(state.store, writing, editor, prefix_lock, *told)
        self.exclusive = ExclusiveCreates(writing.nursery, self.uploads.reserve)
        self.deferred = DeferredAttributes(
            writing.nursery,
            writing.staging.directory,
            state.store,
            self.uploads.own,
            self._attributes_landed,
            self._attributes_lost,
        )
        self._appends = AppendRuns()
        self.removals = removals

    def flush(self, fh: int, pid: int = 0, owner: int = UNKNOWN_OWNER) -> Answer[None]:
        """Answer a descriptor's close by the thread `pid` (0: unknown), once the file is safe.

        `owner`, FUSE's lock owner, tells processes apart: a forked child closes its parent's files.
        """
        handle = self._handles.files.get(fh)
        if handle is None or handle.inode.staged is None or not handle.flags & WRITING:
            return None
        staged = handle.inode.staged
        staged.note_stores()
        if staged.creator is not None:
            self.exclusive.wrote(staged.creator, staged.size())
        if not staged.is_dirty or staged.is_others(owner):
            return None
        return self._flush(staged, pid)

    async def _flush(self, staged: StagedFile, pid: int) -> None:
        # The process is examined only after a rewrite: a file that has grown replaces nothing.
        if staged.is_rewrite and staged.kept_size is None and pid and self._can_be_undone(staged):
            # A killed program's request is soon cancelled, but the answer is needed all the same.
            with trio.CancelScope(shield=True):
                was_killed = await self._notifier.was_killed(pid)
            state = FileState.ABANDONED if was_killed else FileState.OPEN
            if staged.state in (FileState.OPEN, FileState.ABANDONED) and staged.state is not state:
                staged.state = state
                if staged.inode.staged is staged:
                    # If this daemon dies, the next one gets only RELEASE, and reads the record.
                    self._staging.try_record(staged)
            if was_killed:
                logger.info("the process %d was killed while it rewrote %s", pid, staged.key)
            if was_killed or not staged.is_dirty or staged.inode.staged is not staged:
                return
        if not staged.is_content_dirty:
            self.uploads.start(staged, DEFER_S)  # another handle may stay open
            return
        if not staged.writers:
            # The process made or truncated the file, and no process has written to it.
            will_close = await self._notifier.will_close(pid, staged.inode.ino)
            # If another close may follow (None), the last close starts the upload. But the close
            # of an O_EXCL file has to wait, to report that another node was faster.
            if will_close or (will_close is None and staged.exclusive is None):
                return
        elif self._rules.durability_of(staged.key) is not Durability.BUCKET:
            delay_s = self._appends.closed(staged)
            if delay_s is not None and staged.error is None:
                await self._staging.make_safe(staged)
                if staged.is_dirty and staged.inode.staged is staged:
                    if not self.uploads.is_under_way(staged):
                        staged.pause_s = delay_s
                    self.uploads.start(staged, delay_s)
                return
        await self._keep(staged, self.delay_s(staged, staged.key))

    def fsync(self, fh: int) -> Answer[None]:
        handle = self._handles.files.get(fh)
        if handle is None:
            return None
        staged, info = handle.inode.staged, handle.inode.info
        if staged is not None:
            staged.note_stores()
            if not staged.is_dirty:
                return None
            is_local = self._rules.is_local(staged.key)
            return self._keep(staged, LATER_S if is_local else None)
        if info is not None and self.deferred.has(info.key):
            return self.deferred.flush(info.key)
        return None

    def _can_be_undone(self, staged: StagedFile) -> bool:
        """True if a file's content has changed, and no close, fsync or upload followed so far."""
        is_known = staged.is_closed or self.uploads.is_under_way(staged)
        return staged.is_content_dirty and not is_known

    def is_given_up(self, staged: StagedFile) -> bool:
        """True if a file's changes are to be undone, as the program that made them was killed."""
        return staged.state is FileState.ABANDONED and not staged.inode.writing

    async def _undo(self, staged: StagedFile) -> None:
        """Drop the content that a killed program wrote: the object in the bucket stays."""
        inode = staged.inode
        while not self.prefix_lock.is_open_at(staged.key):
            with suppress(StoreError, OSError):  # the rename is tried again
                await self.prefix_lock.until_open_at(lambda: staged.key)
            await trio.sleep(UNDO_S)
        async with self.uploads.held(staged):
            is_wanted = staged.state is not FileState.ABANDONED or inode.writing
            if is_wanted or inode.staged is not staged or not staged.is_dirty:
                return
            if not self.prefix_lock.is_open_at(staged.key):  # a rename has begun meanwhile
                self._nursery.start_soon(self._undo, staged)
                return
            logger.warning(
                "%s stays as it was: what was to rewrite it was killed before it closed the file",
                staged.key,
            )
            if staged.is_meta_dirty:
                # Changed attributes are kept: the undo is about the content alone.
                mtime_ns = staged.object_time(inode.object)
                try:
                    self.deferred.put(inode.object, staged.meta.changed(mtime_ns=mtime_ns))
                except OSError as error:
                    logger.error("the attributes of %s are lost: %s", staged.key, error.strerror)
            # As after a removal, programs that have the file open still read the new content.
            staged.state = FileState.UNLINKED
            self._staging.try_record(staged)
            if inode.is_current:
                self._give_name_to(inode.object, inode)
        if inode.staged is staged and not inode.is_open:
            self._release(staged)

    def delay_s(self, staged: StagedFile, key: str) -> float | None:
        """Seconds from a file's close to its upload as `key`; None if the close waits for S3."""
        durability = self._rules.durability_of(key)
        if durability is Durability.LOCAL:
            return LATER_S
        # Larger files are sent while they are written.
        if durability is not Durability.AUTO or staged.size() >= AHEAD:
            return None
        path, is_exclusive = key[len(self._rules.prefix) :], staged.creator is not None
        return TEMPORARY_S if is_temporary(path, is_exclusive=is_exclusive) else None

    async def _keep(self, staged: StagedFile, delay_s: float | None) -> None:
        """Make a file's content safe while a program waits.

        With a number as `delay_s`, wait for the local disk; the upload starts that many seconds
        later. With None, wait for the upload, and raise its error; if the upload fails or the
        wait is cancelled, the file is recorded as closed, and uploaded later in any case.
        """
        if delay_s is not None:
            await staged_sums.note(staged)
            if not staged.is_dirty:
                return  # uploaded or removed meanwhile
            staged.check_kept()
            await self._staging.make_safe(staged)
            self.uploads.note_closed()
            self.uploads.start(staged, delay_s)
            return
        try:
            await self.uploads.wait(staged)
        except BaseException:
            # A file that was set aside has no record any more.
            if staged.is_dirty and staged.inode.staged is staged:
                self._staging.close(staged)
            raise

    async def finish(self, inode: Inode) -> None:
        """Do what a close does, after truncate(2) by path; nothing if the file is open to write."""
        staged = inode.staged
        if staged is None or inode.writing:
            return
        if staged.is_dirty:
            await self._keep(staged, self.delay_s(staged, staged.key))
        else:
            self._return_to_cache(staged)

    def change_meta(self, inode: Inode, meta: Meta) -> None:
        """Change a file's attributes (mode, owner, time, xattrs), and plan to send them."""
        inode.part_names()
        if (staged := inode.staged) is not None:
            if meta.mtime_ns is not None:
                if staged.is_content_dirty and may_tell_uploaded(staged.recorded):
                    # With the new time the content could look like the content uploaded before.
                    self._staging.record(staged)
                staged.note_stores()
                os.utime(staged.fd, ns=(meta.mtime_ns, meta.mtime_ns))
                if staged.may_be_mapped:
                    staged.clean = staged.stamp()
            staged.meta = meta.changed(mtime_ns=None)
            staged.touch_meta()
            self._staging.record(staged)
            self.described(inode)
            return
        now = inode.parent.child(inode.name) if inode.parent is not None else None
        if now is not None and now is not inode and now.info is not None:
            # A write has given the file's name another node.
            inode.meta = meta
            self.change_meta(now, meta)
            return
        if meta.mtime_ns is None:
            # The copy in the bucket gets a new Last-Modified, so the old time is sent as well.
            meta = meta.changed(mtime_ns=inode.object.mtime_ns)
        self.deferred.put(inode.object, meta)
        inode.meta = meta

    def described(self, inode: Inode) -> None:
        """Start to send changed attributes of a staged file, unless a close will do so."""
        staged = inode.staged
        if staged is None or inode.writing or self._defer(staged):
            return
        if staged.state is FileState.ABANDONED and self._can_be_undone(staged):
            return  # `_undo` will run, and keeps the attributes
        if not staged.is_closed:
            self._staging.close(staged)
        self.uploads.start(staged, LATER_S)

    def _defer(self, staged: StagedFile) -> bool:
        """Let `deferred` send a file's changed attributes, and unstage it; False if impossible."""
        inode, info = staged.inode, staged.inode.info
        if (
            staged.is_content_dirty
            or not staged.is_dirty
            or staged.lock.locked()
            or inode.is_open
            or info is None
            or staged.etag is None
            or staged.etag != info.etag
            or staged.state is FileState.LEFTOVER
            or not self.prefix_lock.is_open_at(staged.key)
        ):
            return False
        try:
            self.deferred.put(info, staged.described())
        except OSError:
            return False  # the staged file's own record has them
        staged.is_meta_dirty = False
        self._return_to_cache(staged)
        return True

    async def _attributes_landed(self, old: ObjectInfo, new: ObjectInfo) -> None:
        """Replace the version `old` by `new`, with other attributes, in cache, node and listing."""
        await self._cache.move(old.version, new.version)
        if (inode := self._node_of(old)) is not None:
            if inode.staged is not None and inode.staged.etag == old.etag:
                inode.staged.etag = new.etag
                self._staging.try_record(inode.staged)
            self._has(inode, new)
            return
        prefix, name = split_key(old.key)
        known = self._directories.lookup_now(self._directories.get(prefix), name)
        if known is not None and isinstance(known[0], ObjectInfo) and known[0].etag == old.etag:
            self._directories.changed(prefix, name, new)

    def _attributes_lost(self, info: ObjectInfo) -> None:
        if (inode := self._node_of(info)) is not None:
            self._state.mark_stale(inode)

    def _node_of(self, info: ObjectInfo) -> Inode | None:
        """The node that the key of a version stands for; None if no node there has the version."""
        inode = self._inodes.at(info.key)
        known = inode.info if inode is not None else None
        return inode if known is not None and known.version == info.version else None

    def landed(self, staged: StagedFile, info: ObjectInfo) -> None:
        self._has(staged.inode, info)
        if staged.rebases:
            self._appends.forget(staged)
        self._return_to_cache(staged)
        if staged.inode.staged is staged:
            self._staging.try_record(staged)

    def _kept_apart(self, staged: StagedFile, info: ObjectInfo, theirs: ObjectInfo | None) -> None:
        """Rename a node to its upload `info`; its old name shows `theirs` (None: no object)."""
        inode = staged.inode
        self.exclusive.lost(staged.creator or 0)
        # Until the kernel opens the node, it still takes the old name for this node.
        parent = self._give_name_to(theirs, inode)
        name, inode.name = inode.name, split_key(info.key)[1]
        self._inodes.numbers.moved(parent, name, parent, inode.name, inode.ino, is_directory=False)
        self.landed(staged, info)

    def _set_aside(self, staged: StagedFile, theirs: ObjectInfo | None) -> None:
        """Let a file's name show `theirs` (None: no object); keep new content on the local disk."""
        inode = staged.inode
        self._give_name_to(theirs, inode)
        if not staged.is_content_dirty:
            self._return_to_cache(staged)
            return
        kept = self._staging.set_aside(staged)
        logger.error("%s is what the bucket has: what was written to it is in %s", staged.key, kept)
        self._inodes.drop_unknown(inode)

    def _give_name_to(self, theirs: ObjectInfo | None, inode: Inode) -> Inode:
        """Let a node's name stand for `theirs` (None: no object) instead; return its directory."""
        assert inode.parent is not None
        self._inodes.mark_replaced(inode)
        shown = ABSENT if theirs is None else theirs
        self._directories.changed(self._inodes.key(inode.parent), inode.name, shown)
        return inode.parent

    def _has(self, inode: Inode, info: ObjectInfo) -> None:
        """Make a node stand for a version that this mount has put into the bucket."""
        if inode.object.etag and inode.object.version != info.version:
            self._cache.obsolete(inode.object.version)
        self._inodes.replace_version(inode, info)
        self._directories.changed(*split_key(info.key), info, lasting=inode.staged is not None)

    def _return_to_cache(self, staged: StagedFile) -> None:
        """Unstage an uploaded file and cache its content, unless an open handle needs the file."""
        inode = staged.inode
        if staged.is_dirty or inode.staged is not staged:
            return
        if staged.backing is None or staged.is_unlinked:
            if inode.is_open:
                return
        elif inode.served or staged.may_be_mapped or inode.writing:
            return  # programs that have the file open need it staged
        is_taken = False
        if not staged.is_unlinked and inode.info is not None and inode.info.size:
            own = None if staged.base is None else staged.base.own(inode.info.size)
            if staged.backing is not None:
                self._staging.drop_base(staged)  # the file itself has all bytes
            is_taken = self._cache.adopt_uploaded(
                inode.info.version, staged.path, staged.fd, own, inode.info.crc32, staged.backing
            )
        if inode.passthrough and not is_taken:
            return  # all handles of the node need the same file
        inode.meta = staged.described()
        self._release(staged, is_taken=is_taken)
        if not staged.is_unlinked and inode.info is not None:
            key, changes = inode.info.key, self._directories.pending_changes
            now, listed = self._inodes.at(key), changes.get(*split_key(key))
            # A newer change of the name stays listed until the bucket has it.
            if (now is None or now.staged is None) and isinstance(listed, ObjectInfo):
                changes.landed(*split_key(key))

    async def _until_let_go(self, staged: StagedFile) -> None:
        """Upload what programs store through mappings of a closed file, until it is not mapped."""
        inode = staged.inode
        with unattended():
            while inode.staged is staged and not inode.writing:
                staged.note_stores()
                if staged.is_dirty and not staged.is_unlinked:
                    if not staged.is_closed:
                        self._staging.close(staged)
                    self.uploads.start(staged)
                elif await self._sharing.is_let_go(staged):
                    staged.note_stores()
                    staged.may_be_mapped = False
                    self.released(inode)
                    break
                await ACTIVITY.pause(MAPPED_S)
        self._mapped.discard(staged)

    def _release(self, staged: StagedFile, *, is_taken: bool = False) -> None:
        self._staging.release(staged, is_taken=is_taken)
        # A node that the kernel has forgotten was needed for the staged file only.
        self._inodes.drop_unknown(staged.inode)

    def released(self, inode: Inode) -> None:
        """Upload, undo or cache a staged file, unless a program still has it open for writing."""
        staged = inode.staged
        if staged is None or inode.writing:
            return
        staged.note_stores()
        if staged.may_be_mapped and staged not in self._mapped:
            self._mapped.add(staged)
            self._nursery.start_soon(self._until_let_go, staged)
        if not staged.is_dirty:
            if staged.lock.locked():
                self._nursery.start_soon(self._released_later, staged)
            else:
                self._return_to_cache(staged)
            return
        if staged.state is FileState.ABANDONED and self._can_be_undone(staged):
            self._nursery.start_soon(self._undo, staged)
            return
        if self._defer(staged) or (staged.is_closed and self.uploads.is_under_way(staged)):
            return
        if not staged.is_closed:
            self._staging.close(staged)
        delay_s = self.delay_s(staged, staged.key)
        attempt = self.uploads.start(staged, delay_s or 0.0)
        if delay_s is None:
            attempt.hurry.set()  # the upload may be waiting for attribute changes to stop

    async def _released_later(self, staged: StagedFile) -> None:
        """Call `released` once the removal or rename that holds the file's lock has ended."""
        with unattended():
            async with self.uploads.locked(staged):
                pass
        if staged.inode.staged is staged:
            self.released(staged.inode)

    def list_staged(self, inode: Inode) -> None:
        self._directories.changed(*split_key(inode.object.key), inode.object, lasting=True)
