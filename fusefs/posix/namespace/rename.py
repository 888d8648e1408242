"""Renames of files and directories.

A rename is a copy on the server and then a delete, so that at every moment an object exists under
its old or its new name; for a directory, all copies are made before the first delete
(rename_job.py). An open file that was never uploaded only changes its name. A closed file that only
the local disk has, such as a temporary file, is sent under its new name.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from functools import partial
from typing import NamedTuple

import trio

from fusefs.posix.directory.segment import ABSENT, Absent, Entry
from fusefs.posix.metadata.deferred_attributes import DeferredChange
from fusefs.posix.mount_state import MountState
from fusefs.posix.namespace.create_remove import CreateRemove, undone
from fusefs.posix.namespace.prefix_copy import AT_ONCE, PrefixCopy, copy_current
from fusefs.posix.namespace.rename_job import RenameJobs
from fusefs.posix.nodes.inode import FileState, StagedFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.names import split_key
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.nodes.prefix_lock import Name, PrefixLock
from fusefs.posix.tasks import for_each
from fusefs.posix.types import Caller
from fusefs.posix.write import staging_record
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.writer import Writer
from fusefs.store.contract import find
from fusefs.store.errors import ExistsError, NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import IF_ABSENT, Condition, Expect, ObjectInfo

logger = logging.getLogger("fusefs.attributes")

RENAME_NOREPLACE = 1
# The longest wait for an object after a change of it that has taken the retry time already.
LOOK_S = 5.0


class Made(NamedTuple):
    """A renamed file's object under the new key, and the source of its content.

    `sent` is the staged file's `meta_changes` at the PUT that made the object, None for a copy;
    `described` is `meta_changes` at a copy with new attributes, None if none were sent with it.
    """

    source: ObjectInfo
    new: ObjectInfo
    sent: int | None = None
    described: int | None = None


class NameChanges(CreateRemove):
    """The changes of one mount's names: `rename`, and the methods of `CreateRemove`.

    Belongs to the event loop. The methods raise StoreError if the bucket refuses a change, or
    if a late request may have undone an object that is to be copied.
    """

    def __init__(
        self, state: MountState, writing: Writing, writer: Writer, prefix_lock: PrefixLock
    ) -> None:
        super().__init__(state, writing, writer, prefix_lock)
        self.renames = RenameJobs(
            writing, state.inodes.prefix, prefix_lock, self._copies, self._switch, self._mover.ended
        )

    def _copies(self, old: str, new: str) -> PrefixCopy:
        return PrefixCopy(self._store, old, new, self._writer.empties.fd, self._mover.dating)

    async def run(self) -> None:
        """Finish renames that no request waits for, until cancelled."""
        self._note_inherited()
        await self.renames.run()

    def _key(self, name: Name) -> str:
        return self._inodes.key(name[0]) + name[1]

    async def rename(self, old: Name, new: Name, flags: int, caller: Caller) -> None:
        if flags & ~RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, "an exchange cannot be done in one step")
        if old == new:
            return
        if await self._find(*old) is None:
            await self._rename_directory(old, new, flags, caller)
        else:
            await self._rename_file(old, new, flags, caller)

    async def _rename_file(self, old: Name, new: Name, flags: int, caller: Caller) -> None:
        is_repeated = self._is_repeated(caller)
        async with self._changing(caller, old, new):
            entry, target = await self._find(*old), await self._find(*new)
            if isinstance(entry, Absent) and (isinstance(target, Absent) or not is_repeated):
                raise OSError(errno.ENOENT, old[1])
            if entry is None:
                raise OSError(errno.ESTALE, "another node has made it a directory")
            if not is_repeated:
                await self._check_target(entry, target, new, flags)
            self._begin(caller)
            await self._keep_directory(*old)
            if target is None:
                return  # an earlier process has renamed a directory for this very request
            is_new = bool(flags & RENAME_NOREPLACE)
            if is_new and is_repeated and not isinstance(target, Absent):
                inode = old[0].child(old[1])
                is_new = inode is None or await self._made_before(inode, self._key(new)) is None
            replaced = self._replaced(new, is_repeated=is_repeated)
            await self._move_file(old, new, entry, target, replaced, is_strict=is_new)
            old_key = self._key(old)
        renamed = new[0].child(new[1])
        if renamed is not None and renamed.staged is not None:
            await self._make_safe(renamed.staged, old_key)

    async def _rename_directory(
        self, name: Name, new_name: Name, flags: int, caller: Caller
    ) -> None:
        self._note_inherited()
        try:
            async with self.prefix_lock.closed(name, new_name) as closure:
                old, new = closure.targets()
                if new.startswith(old):
                    raise OSError(errno.EINVAL, "a directory cannot be moved below itself")
                entry, target = await self._find(*name), await self._find(*new_name)
                if isinstance(entry, Absent) and target is None and self._is_repeated(caller):
                    return
                if isinstance(entry, Absent):
                    raise OSError(errno.ENOENT, name[1])
                if entry is not None:
                    raise OSError(errno.ESTALE, "another node has made it a file")
                if not self._is_repeated(caller):
                    await self._check_target(entry, target, new_name, flags)
                self._begin(caller)
                await self._keep_directory(*name)
                await self._end_requests_below(old, new)
                renaming = await self.renames.begin(closure, has_replaced=target is None)
                if not await self.renames.finish(renaming):
                    raise OSError(errno.EIO, "the rename could not be done")
        finally:
            self._under_way.discard(caller.unique)
        files = [file for file in self._writer.staging if file.key.startswith(new)]
        at_once = self._rules.uploads
        await for_each(lambda one: self._make_safe(one, old + one.key[len(new) :]), files, at_once)

    async def _end_requests_below(self, old: str, new: str) -> None:
        """Send the deferred changes below two closed prefixes, and wait for those under way."""
        copies = self._copies(old, new)
        for staged in [file for file in self._writer.staging if file.key.startswith(old)]:
            copies.check_length([staged.key] if not staged.is_unlinked else [])
            async with self._writer.uploads.held(staged):
                pass  # the closed prefix keeps the next upload waiting
        self._writer.exclusive.removed(old)
        await self._writer.deferred.flush_below(old)
        await self._writer.removals.flush_below(old)
        await self._writer.removals.flush_below(new)

    async def _make_safe(self, staged: StagedFile, old_key: str) -> None:
        """Upload a renamed closed file, or sync it to the local disk, if its new name demands that.

        An error is raised, but the file stays renamed and is sent later. The caller holds no lock.
        """
        try:
            if staged.is_closed and staged.is_dirty and staged.inode.staged is staged:
                if self._waits_for_disk(staged, staged.key):
                    await self._writer.staging.make_safe(staged)
                elif self._waits_for_disk(staged, old_key):
                    await self._writer.uploads.wait(staged)
        except (OSError, StoreError):
            self._notifier.invalidate_names()  # the kernel believes that nothing was renamed
            raise

    def _waits_for_disk(self, staged: StagedFile, key: str) -> bool:
        """True if the close of a file with this key waits only for the local disk."""
        return self._writer.flusher.delay_s(staged, key) is not None

    async def _check_target(
        self, entry: Entry | Absent, target: Entry | Absent, new: Name, flags: int
    ) -> None:
        if isinstance(target, Absent):
            if entry is None and flags & RENAME_NOREPLACE:
                # The PUT of a file has a condition; a prefix can't have one.
                await self._look_again(*new)
            return
        if flags & RENAME_NOREPLACE:
            raise OSError(errno.EEXIST, new[1])
        if entry is None and target is not None:
            raise OSError(errno.ENOTDIR, new[1])
        if entry is not None and target is None:
            raise OSError(errno.EISDIR, new[1])
        if target is None and not await self._is_empty(self._key(new) + "/"):
            raise OSError(errno.ENOTEMPTY, new[1])
        if target is not None:
            self._check_deleting(new[1])

    def _replaced(self, new: Name, *, is_repeated: bool) -> Inode | None:
        """Find the node that a rename replaces, or None; with `is_repeated` prefer staged files."""
        if is_repeated:
            for staged in self._writer.staging:
                if staged.key == self._key(new) and not staged.is_unlinked:
                    return staged.inode
        return new[0].child(new[1])

    async def _move_file(
        self,
        old: Name,
        new: Name,
        entry: ObjectInfo | Absent,
        target: ObjectInfo | Absent,
        replaced: Inode | None,
        *,
        is_strict: bool,
    ) -> None:
        """Rename a file, replacing the file of the node `replaced` unless that is None.

        `entry` and `target` are the objects of the two names, `entry` ABSENT if an earlier attempt
        has deleted it. With `is_strict` no object is replaced: EEXIST if there is one by now.
        """
        old_key, new_key = self._key(old), self._key(new)
        inode = old[0].child(old[1])
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writer.not_staged(inode, replaced))
            described = await stack.enter_async_context(self._writer.deferred.taken(old_key))
            await stack.enter_async_context(self._writer.deferred.taken(new_key))
            staged = await self._held(stack, inode)
            rival = await self._held(stack, replaced)
            if rival is not None:
                await staging_record.until_later(rival)  # the next record has a later time
            if not isinstance(entry, Absent):
                entry = self._file_now(*old, entry)
            if not isinstance(target, Absent):
                target = self._file_now(*new, target)
            if isinstance(entry, Absent) and (inode is None or inode.info is None):
                await self._store.confirm(old_key, None)
                return
            there = None if isinstance(target, Absent) else target.etag or None
            known_etag = there if rival is None else rival.etag
            condition = IF_ABSENT if is_strict else Expect(known_etag)
            made = await self._make(inode, staged, entry, described, new, condition)
            moved = {made.source.version: made.new} if made is not None else {}
            is_copy = made is not None and made.sent is None
            copied = moved if is_copy else {}
            uncached = await self._mover.move_cached(copied)
            may_be_there = staged is None or self._may_be_there(staged)
            if may_be_there and not isinstance(entry, Absent):
                etag = made.source.etag if made is not None and is_copy else (staged or entry).etag
                is_new = known_etag is None
                await self._delete_renamed(old_key, etag or None, made, rival, is_new=is_new)
            if rival is not None and staged is None:
                self._writer.staging.unlink(rival)
            elif rival is not None:
                rival.state = FileState.UNLINKED
            if staged is not None:
                self._stand_for_new_name(staged, made, known_etag)
            self._mover.move_file(inode, old, new, moved)
            self._mover.follow(copied, uncached)
            self._record_renamed(staged, rival)
            self._writer.deferred.renamed(old_key, made.new if made is not None else None)
        self._let_go(rival)
        if staged is not None and made is not None and made.sent is not None:
            self._writer.flusher.landed(staged, made.new)
        if inode is not None:
            self._writer.flusher.released(inode)

    async def _make(
        self,
        inode: Inode | None,
        staged: StagedFile | None,
        entry: ObjectInfo | Absent,
        described: DeferredChange | None,
        new: Name,
        condition: Condition,
    ) -> Made | None:
        """Copy or put a file under its new key; None if the rename needs no object there yet.

        `described` has attributes of the file that wait to be sent.
        """
        if isinstance(entry, Absent):
            # Probably an earlier process died during this rename, after the delete.
            assert inode is not None
            source, key = inode.object, self._key(new)
            made = await self._store.head(key)
            if made.etag != source.etag and self._unanswered.may_have_undone(source.key):
                raise undone(source.key)
            await self._store.confirm(source.key, None)
            await self._store.confirm(key, made)
            return Made(source, made)
        if staged is None:
            meta = described.meta if described is not None else None
            if described is not None and not await self._writer.deferred.is_about(described, entry):
                logger.warning("%s was replaced: its attributes are given up", entry.key)
                meta = None
            return Made(*await self._copy(entry, new, condition, meta))
        return await self._make_staged(staged, new, condition)

    def _stand_for_new_name(
        self, staged: StagedFile, made: Made | None, replaced_etag: str | None
    ) -> None:
        """Note in a staged file the object of its new key: that of `made`, or the replaced one."""
        if made is None and not staged.is_anew:
            # A rename replaces whatever has the new name; recorded before the file gets the name.
            staged.is_anew, staged.only_appended = True, False
            self._writer.staging.try_record(staged)
        if made is None:
            staged.etag = replaced_etag
        elif made.source.etag == staged.etag:  # else the upload will find the conflict
            staged.etag = made.new.etag
        if made is not None and made.described == staged.meta_changes:
            staged.is_meta_dirty = False
        staged.exclusive, staged.described_at = None, trio.current_time()
        if made is not None and made.sent is not None:
            self._writer.uploads.note_uploaded(staged, made.new, made.sent)

    async def _make_staged(
        self, staged: StagedFile, new: Name, condition: Condition
    ) -> Made | None:
        """Copy or put a staged file under its new key; None: the rename needs no object there."""
        source, is_strict = staged.inode.object, condition == IF_ABSENT
        is_there = staged.etag == source.etag
        # The object of a reserved name is empty (exclusive.py), and a copy of it would be, too.
        is_reserved = is_there and staged.is_content_dirty and not source.size
        new_key = self._key(new)
        is_kept = staged.is_closed and self._waits_for_disk(staged, staged.key)
        is_put = (
            (is_kept or is_reserved)
            and staged.is_content_dirty
            and staged.base is None
            and not self._waits_for_disk(staged, new_key)
        )
        if is_put or (is_strict and not is_there):
            sent = staged.meta_changes
            put = partial(self._writer.uploads.put_new, staged, new_key)
            made = await (self._put_new(*new, put) if is_strict else put(condition))
            return Made(source, made, sent)
        if is_there and (is_strict or not is_reserved):
            return await self._copy_staged(staged, source, new, condition)
        return None

    def _record_renamed(self, staged: StagedFile | None, rival: StagedFile | None) -> None:
        """Record that `staged` has the name of `rival`, and then that `rival` has none."""
        if staged is not None:
            self._writer.staging.try_record(staged)
        if rival is not None:
            self._writer.staging.unlink(rival)

    async def _copy_staged(
        self, staged: StagedFile, source: ObjectInfo, new: Name, condition: Condition
    ) -> Made:
        """Copy a locked staged file's object; if only attributes changed, the copy gets them."""
        if staged.is_content_dirty or not staged.is_meta_dirty:
            return Made(*await self._copy(source, new, condition, None))
        described = staged.meta_changes
        copied, made = await self._copy(source, new, condition, staged.described())
        return Made(copied, made, described=described if copied is source else None)

    async def _copy(
        self, source: ObjectInfo, new: Name, condition: Condition, meta: Meta | None
    ) -> tuple[ObjectInfo, ObjectInfo]:
        """Copy an object to its new key; return (the copied version, the copy).

        The copy gets the attributes `meta`, or (None) the object's. If the object is another
        version than `source` by now, the present version is copied unchanged. If the object is
        gone, or the last attempt got no answer, the copy of an earlier attempt is returned; the
        error is raised if there is none, or if `condition` is IF_ABSENT.
        """
        key = self._key(new)
        try:
            if self._unanswered.may_have_undone(source.key):
                return await self._copy_expected(source, key, condition, meta)
            if meta is not None:
                with suppress(StaleVersionError):
                    return source, await self._copy_described(source, key, condition, meta)
            if condition == IF_ABSENT:
                with suppress(StaleVersionError):
                    return source, await self._copy_marked(source, key, condition)
            return await copy_current(self._store, source, key, self._mover.dating, condition)
        except ExistsError:
            self._correct(*new)
            raise
        except StoreError as error:
            is_gone = isinstance(error, NotFoundError)
            if condition == IF_ABSENT or not (is_gone or error.may_be_done):
                raise
            made = await (find(self._store, key) if is_gone else self._look(key))
            if not isinstance(made, ObjectInfo) or made.size != source.size:
                raise
            was_there = isinstance(condition, Expect) and made.etag == condition.etag
            is_equal = made.etag == source.etag
            if (was_there and not is_equal) or not (is_gone or (is_equal and not was_there)):
                raise
            await self._store.confirm(key, made)
            return source, made

    async def _delete_renamed(
        self,
        key: str,
        etag: str | None,
        made: Made | None,
        rival: StagedFile | None,
        *,
        is_new: bool,
    ) -> None:
        """Delete a renamed file's old object; if that fails, remove the new one (`_take_back`).

        An object that another client has put under the old key since the copy stays. First `rival`,
        the staged file replaced, is recorded as unlinked: else its close after a kill would replace
        the new object, by then the only one. `is_new`: the new key had no object before.
        """
        state = rival.state if rival is not None else None
        try:
            if rival is not None and made is not None:
                self._writer.staging.unlink(rival)
            await self._store.delete(key, etag)
        except (StoreError, OSError):
            there = None if made is None else await self._look(key)
            if isinstance(there, Absent) or (there and etag not in (None, there.etag)):
                await self._store.confirm(key, None)
                return
            if rival is not None and state is not None:
                rival.state = state
            if made is not None:
                # If a late delete may still succeed, the new object may soon be the only one.
                is_kept = there is not None and not self._unanswered.concerns(key)
                if is_kept and made.sent is None:
                    await self._cache.move(made.new.version, made.source.version)
                await self._take_back(made.new, rival, may_go=is_new and is_kept)
            raise

    async def _look(self, key: str) -> ObjectInfo | Absent | None:
        """Find the object of a failed change; None if S3 does not answer soon."""
        with trio.move_on_after(LOOK_S), suppress(StoreError, OSError):
            return await find(self._store, key) or ABSENT
        return None

    async def _take_back(self, made: ObjectInfo, rival: StagedFile | None, *, may_go: bool) -> None:
        """Delete the new object `made` of a failed rename if it `may_go`, else keep it.

        `rival`, the staged file of the new name, gets the ETag of an object that stays, which its
        upload then replaces; without a `rival`, the listing shows an object that stays.
        """
        is_gone = False
        try:
            if may_go:
                await self._store.delete(made.key, made.etag)
                is_gone = True
        finally:
            if rival is not None:
                rival.etag = None if is_gone else made.etag
                self._writer.staging.try_record(rival)
            elif not is_gone:
                self._directories.changed(*split_key(made.key), made)

    def finish_switches(self) -> None:
        """Complete the switches (rename_job.py) of renames during which a process was killed."""
        for renaming in self.renames.switches():
            self._mover.finish_move(renaming.old, renaming.new)
            self._unanswered.renamed_below(renaming.old)

    async def _switch(
        self, copies: PrefixCopy, switching: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Once all objects are copied, rename them in this mount's state, inside `switching()`."""
        await self._expect(copies)
        # If deletes are not allowed at all, this fails before the switch.
        await copies.delete_marker()
        uncached = await self._mover.move_cached(copies.by_version())
        async with AsyncExitStack() as stack:
            held: set[StagedFile] = set()
            while (
                files := {file for file in self._writer.staging if file.key.startswith(copies.old)}
                - held
            ):
                for staged in files:
                    await stack.enter_async_context(self._writer.uploads.held(staged))
                held |= files
            with switching():
                self._mover.move_directory(copies, uncached)
            self._unanswered.renamed_below(copies.old)

    async def _expect(self, copies: PrefixCopy) -> None:
        """Check the objects at uncertain keys in a directory's rename; confirm copies by HEADs.

        StoreError if a late request may have undone the change that made an object to rename.
        """
        for key, expected in self._unanswered.expected_below(copies.old).items():
            source = copies.sources.get(key)
            etag = source and source.etag
            if etag != (expected and expected.etag):
                found = await find(self._store, key)  # another client may have changed it
                if (found and found.etag) != etag or self._unanswered.has_undone(key, found):
                    raise undone(key)

        async def confirm(key: str) -> None:
            made = copies.made.get(copies.old + key.removeprefix(copies.new))
            if made is not None and made.key == key:
                found = await self._store.head(key)
                if found.etag == made.etag:
                    await self._store.confirm(key, found)

        await for_each(confirm, self._unanswered.unconfirmed_below(copies.new), AT_ONCE)
