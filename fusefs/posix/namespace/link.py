"""Hard links, and what links and renames have in common: an object under a new key.

A bucket has no second name for an object. A link is a copy of it that replaces
nothing, of a file that was not uploaded yet a PUT of its content. A request that
comes again, after the death of the process that did it, knows its own copy by the
token that is on record, or by the time that it says.
"""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack
from functools import partial

import trio

from fusefs.posix.namespace.create_remove import CreateRemove
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.object_metadata import Meta, read
from fusefs.posix.types import Caller, find
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import Condition, ObjectInfo, Write

# How long the copy of a file waits for what a late request has undone, and between two tries.
PUT_BACK_S = 10.0
PUT_BACK_PAUSE_S = 0.05


class LinkChanges(CreateRemove):
    """Makes hard links, and the copies that renames need. Belongs to the event loop."""

    async def link(self, inode: Inode, to: Inode, name: str, caller: Caller) -> Inode:
        """Give a file a second name: a copy of its object, if there is nothing of that name.

        Raises:
            OSError: EPERM for a directory, EEXIST if there is something.
        """
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
                self._unanswered.confirm(prefix + name, made)
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
        """The copy of a file that a repeated request made before its process died, if it did.

        An object that says the same time, to the nanosecond, is no other node's.
        """
        found = await find(self._store, key)
        if found is None:
            return None
        if self._unanswered.concerns(key):
            is_own = self._unanswered.may_have_made(found)
        else:
            is_own = await self._says_as(inode, found)
        return found if is_own else None

    async def _says_as(self, inode: Inode, found: ObjectInfo) -> bool:
        if inode.staged is None and inode.meta is None:
            source = await find(self._store, inode.object.key)
            if source is None:
                return True  # the rename has gone on to remove it
            inode.meta = read(source.metadata or {}, inode.default_meta(self._owner))
        meta = _said(inode)
        there = read(found.metadata or {}, inode.default_meta(self._owner))
        return meta is not None and meta.mtime_ns == there.mtime_ns

    async def _copy_as_is(
        self, inode: Inode, staged: StagedFile | None, key: str, condition: Condition
    ) -> ObjectInfo:
        """Have the bucket have under another key what a file is now."""
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
            # The kernel looks the name up again.
            self._state.mark_stale(inode)
            raise

    async def _copy_marked(self, source: ObjectInfo, key: str, condition: Condition) -> ObjectInfo:
        """Copy a version: of what this mount has just put, a copy with a token of its own.

        No other node's copy is taken for that where the answer is lost.
        """
        own = self._writer.uploads.own.get(source)
        if own is not None and read(own.metadata or {}, self._owner.file).mtime_ns is not None:
            write = Write(own.metadata, condition=condition, is_own=True)
            return await self._store.copy(own, key, write)
        write = Write(condition=condition, keeps_mtime=not self._mover.is_dated(source))
        return await self._store.copy(source, key, write)

    async def _copy_expected(
        self, source: ObjectInfo, key: str, condition: Condition, meta: Meta | None
    ) -> tuple[ObjectInfo, ObjectInfo]:
        """Copy the version that is expected of a key that a late request may have changed.

        What one has undone is put back before.

        Raises:
            StoreError: that takes too long.
        """
        until = trio.current_time() + PUT_BACK_S
        while True:
            try:
                if meta is not None:
                    return source, await self._copy_described(source, key, condition, meta)
                write = Write(condition=condition, keeps_mtime=not self._mover.is_dated(source))
                return source, await self._store.copy(source, key, write)
            except (NotFoundError, StaleVersionError) as error:
                expected = await self._put_back(source.key, until)
                if expected is None or expected.size != source.size:
                    raise _undone(source.key) from error
                source = expected

    async def _put_back(self, key: str, until: float) -> ObjectInfo | None:
        """Have what a late request has undone put back; None if it is not until then.

        `until` is in seconds of trio's clock.
        """
        with trio.move_on_at(until):
            await trio.sleep(PUT_BACK_PAUSE_S)
            return await self._unanswered.restored(key)
        return None

    def _refuse_undone(self, key: str) -> None:
        """See that no late request may be why an object is not what it should be.

        Raises:
            StoreError: one may; what is expected is put back soon.
        """
        if self._unanswered.may_have_undone(key):
            raise _undone(key)

    async def _copy_described(
        self, source: ObjectInfo, key: str, condition: Condition, meta: Meta
    ) -> ObjectInfo:
        own = self._writer.uploads.own.get(source)
        write = Write(meta.as_metadata(), condition=condition, is_own=own is not None)
        copy = await self._store.copy(own or source, key, write)
        if own is not None:
            self._writer.uploads.own.note(copy)
        return copy


def _said(inode: Inode) -> Meta | None:
    """Return the attributes of a file with its time; None if they are not known."""
    if inode.staged is not None:
        return inode.staged.described()
    meta = inode.meta
    if meta is None or inode.info is None or meta.mtime_ns is not None:
        return meta
    return meta.changed(mtime_ns=inode.info.mtime_ns)  # a copy has a time of its own


def _undone(key: str) -> StoreError:
    return StoreError(f"{key} may have been undone by a late request, and is put back soon")
