"""The requests that change something, on a writable mount.

Each change waits until no rename of a directory is in its way (nodes/prefix_lock.py). From then
on the change continues even if its request is cancelled (tasks.py), so that no change is left
half done. A change that must not be applied twice is recorded before it is begun: if the kernel
sends the request again, a change that is already done counts as success.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import trio

from fusefs.posix.metadata import xattrs
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.namespace.rename import NameChanges
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.object_metadata import MOST_NS, PERMISSIONS, Meta
from fusefs.posix.nodes.prefix_lock import Name
from fusefs.posix.tasks import run_uncancelled
from fusefs.posix.types import Answer, Caller, NewAttributes, OpenResult, answered
from fusefs.posix.write.writer import Writer

Result = TypeVar("Result")


class Mutations(MountPart):
    """The requests that change something, one method each. Belongs to the event loop."""

    def __init__(
        self,
        state: MountState,
        nursery: trio.Nursery,
        writer: Writer,
        changes: NameChanges,
        head_cache: HeadCache,
        release: Callable[[int], None],
    ) -> None:
        super().__init__(state)
        self._head_cache = head_cache
        self._release = release
        self._nursery = nursery
        self.writer = writer
        self.changes = changes

    async def _change(
        self,
        work: Callable[[], Coroutine[Any, Any, Result]],
        *names: Name,
        unwanted: Callable[[Result], None] = lambda _result: None,
    ) -> Result:
        """Run `work`, a change of `names`, once no directory's rename is in its way.

        A cancel before that prevents the change. After a later cancel the change goes on to its
        end, and `unwanted` is called with its result.
        """
        await self.changes.prefix_lock.until_open(*names)
        return await self._go_on(work(), unwanted)

    async def _go_on(
        self, work: Coroutine[Any, Any, Result], unwanted: Callable[[Result], None]
    ) -> Result:
        unseen = self._state.notifier.invalidate_names
        return await run_uncancelled(self._nursery, work, unseen, unwanted)

    # Attributes and extended attributes

    def setattr_now(self, nodeid: int, new: NewAttributes) -> Inode | None:
        """Do the work of `setattr` if that needs no wait; else change nothing and return None."""
        inode = self._inodes.get(nodeid)
        is_plain = inode.info is not None and inode.lead is None and new.size is None
        is_named = inode.is_current or inode.staged is not None
        if not (is_plain and is_named) or self._head_cache.lacks(inode):
            return None
        if self.writer.deferred.is_full or not self.changes.prefix_lock.is_open(*_names_of(inode)):
            return None
        mtime_ns = _limited(new.mtime_ns)
        if inode.staged is not None and mtime_ns == self._state.attributes(inode).mtime_ns:
            mtime_ns = None
        old = self._head_cache.meta(inode)
        changed = _changed(old, new, mtime_ns)
        if changed != old:
            _check_size(changed)
            self.writer.flusher.change_meta(inode, changed)
            inode.packed = None
        return inode

    async def setattr(self, nodeid: int, new: NewAttributes) -> Inode:
        """Change a node's attributes or size; return the inode."""
        if new.size is None:
            await self.writer.deferred.wait_for_room()
        inode = self._inodes.get(nodeid)
        await self._change(lambda: self._setattr(inode, new), *_names_of(inode))
        return self._inodes.get(nodeid)

    async def _setattr(self, requested: Inode, new: NewAttributes) -> None:
        mtime_ns = _limited(new.mtime_ns)
        # Attributes are requested first, as a staged file is uploaded with those that are known.
        inode = await self._file_now(requested)
        if new.size is not None:
            if _is_left_behind(requested):
                raise OSError(errno.ESTALE, "the name is another node's now")
            if inode.info is None:
                raise OSError(errno.EISDIR, "a directory")
            if new.size != self._state.attributes(inode).size:
                mtime_ns = None  # truncate(2) asks for the current time, which the file has anyway
            # With a handle the program may have read the content before it truncates the file.
            await self.writer.truncate(inode, new.size, is_anew=not new.size and not new.has_handle)
            if _changed(old := self._head_cache.meta(inode), new, mtime_ns) != old:
                inode = await self._file_now(inode)
        old = self._head_cache.meta(inode)
        if inode.staged is not None and mtime_ns == self._state.attributes(inode).mtime_ns:
            mtime_ns = None
        changed = _changed(old, new, mtime_ns)
        if changed != old:
            await self._keep(inode, changed)
        if mtime_ns is not None and inode.info is None:
            self._inodes.set_entries_changed(inode, 0)
        shown = _changed(self._head_cache.meta(requested), new, mtime_ns)
        self._note_changed(requested, inode, shown)

    async def _file_now(self, requested: Inode) -> Inode:
        """Return the present node of the requested node's file, with its attributes fetched."""
        while True:
            inode = await self.changes.file_now(requested)
            if not _is_left_behind(inode):
                await self._head_cache.learn(inode)
            names = _names_of(inode)
            if inode.staged is not None or self.changes.prefix_lock.is_open(*names):
                return inode
            # The rename of a directory that has begun meanwhile would leave the change behind.
            await self.changes.prefix_lock.until_open(*names)

    def _note_changed(self, requested: Inode, inode: Inode, meta: Meta) -> None:
        """Show `meta` for the requested node too, if another node, `inode`, is the one changed."""
        if inode is not requested:
            requested.meta, requested.packed = meta, None
            self._state.notifier.invalidate_attributes(inode.nodeid)
            self._inodes.drop_unknown(inode)

    async def setxattr(
        self, nodeid: int, name: bytes, value: bytes | None, flags: int, caller: Caller
    ) -> None:
        """Set an extended attribute (`value` None: remove it); flags and errors of setxattr(2)."""
        await self.writer.deferred.wait_for_room()
        requested = self._inodes.get(nodeid)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise OSError(errno.EINVAL, "an attribute's name is UTF-8") from None
        is_repeated = caller.unique in self._state.begun

        async def act() -> None:
            inode = await self._file_now(requested)
            old = self._head_cache.meta(inode)
            pairs = xattrs.changed(old.xattrs, text, value, flags, is_repeated=is_repeated)
            if pairs != old.xattrs:
                self._state.journal.begun(caller.unique)
                await self._keep(inode, old.changed(xattrs=pairs))
            shown = self._head_cache.meta(requested).changed(xattrs=pairs)
            self._note_changed(requested, inode, shown)

        await self._change(act, *_names_of(requested))

    async def _keep(self, inode: Inode, meta: Meta) -> None:
        """Set an inode's attributes; the bucket gets those of a file later, of a directory now."""
        _check_size(meta)
        if _is_left_behind(inode):
            inode.meta = meta  # for programs that have the file open
        elif inode.info is not None:
            self.writer.flusher.change_meta(inode, meta)
        elif self._inodes.key(inode):
            await self.changes.change_directory(inode, meta)
        else:
            inode.meta = meta  # a whole bucket's root, which has no key
        inode.packed = None

    # Names

    def create(
        self,
        parent_id: int,
        name: bytes,
        mode: int,
        flags: int,
        caller: Caller,
        *,
        is_reserved: bool = False,
    ) -> Answer[tuple[Inode, OpenResult]]:
        """Create and open a file; with O_EXCL, EEXIST if the file exists.

        With O_EXCL the bucket decides this: at once if `is_reserved`, else perhaps at the upload.
        """
        if known := self._state.handles.opened_by(caller.unique):
            handle = self._state.handles.files[known]
            return handle.inode, OpenResult(known, keep_cache=False, may_write=True)
        made = self._new_name(parent_id, name)
        create = partial(self.writer.create, *made, mode, flags, caller, is_reserved=is_reserved)
        if not self.changes.prefix_lock.is_open(made):
            return self._create_later(made, create)
        answer = create()
        return answer if isinstance(answer, tuple) else self._created(answer, made)

    async def _create_later(
        self, name: Name, create: Callable[[], Answer[tuple[Inode, OpenResult]]]
    ) -> tuple[Inode, OpenResult]:
        """Create a file once no rename of a directory is in its way."""
        await self.changes.prefix_lock.until_open(name)
        answer = create()
        return answer if isinstance(answer, tuple) else await self._created(answer, name)

    async def _created(
        self, answer: Coroutine[Any, Any, tuple[Inode, OpenResult]], name: Name
    ) -> tuple[Inode, OpenResult]:
        work = self.changes.below(name, answer)
        return await self._go_on(work, lambda made: self._forget(*made))

    def _forget(self, inode: Inode, opened: OpenResult) -> None:
        """Release a new node and its handle, as their request was cancelled before the reply."""
        self._release(opened.fh)
        self._inodes.forget(inode.nodeid, 1)

    async def mknod(self, parent_id: int, name: bytes, mode: int, caller: Caller) -> Inode:
        """Create an empty file; EPERM for devices, pipes and sockets, which a bucket can't hold."""
        if not stat.S_ISREG(mode):
            raise OSError(errno.EPERM, "a bucket has no devices, pipes and sockets")
        flags = os.O_WRONLY | os.O_EXCL
        made = self.create(parent_id, name, mode, flags, caller, is_reserved=True)
        inode, opened = await answered(made)
        self._release(opened.fh)
        return inode

    async def mkdir(self, parent_id: int, name: bytes, mode: int, caller: Caller) -> Inode:
        """Create a directory by putting its marker; EEXIST if the name exists."""
        made = self._new_name(parent_id, name, "/")
        return await self._make(partial(self.changes.mkdir, *made, mode, caller), made)

    async def symlink(self, parent_id: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        """Create a symbolic link, an object with the target as its content."""
        made = self._new_name(parent_id, name)
        return await self._make(partial(self.changes.symlink, *made, target, caller), made)

    async def link(self, nodeid: int, parent_id: int, name: bytes, caller: Caller) -> Inode:
        """Create a hard link, which is a copy of the file's object; EPERM for a directory."""
        requested, made = self._inodes.get(nodeid), self._new_name(parent_id, name)

        async def act() -> Inode:
            return await self.changes.link(await self._file_now(requested), *made, caller)

        return await self._make(act, *_names_of(requested), made)

    async def _make(self, make: Callable[[], Coroutine[Any, Any, Inode]], *names: Name) -> Inode:
        inode = await self._change(make, *names, unwanted=self._inodes.drop_unknown)
        self._inodes.count(inode, time.monotonic())
        return inode

    def unlink(self, parent_id: int, name: bytes, caller: Caller) -> Answer[None]:
        """Remove a file; its open handles can still read the content."""
        gone = self._known_name(parent_id, name)
        if self.changes.unlink_now(*gone, caller):
            return None
        return self._change(partial(self.changes.unlink, *gone, caller), gone)

    async def rmdir(self, parent_id: int, name: bytes, caller: Caller) -> None:
        """Remove a directory; ENOTEMPTY if it is not empty."""
        gone = self._known_name(parent_id, name)
        await self._change(partial(self.changes.rmdir, *gone, caller), gone)

    def fsync_directory(self, nodeid: int) -> Answer[None]:
        """Wait until all removals below a directory are done in the bucket."""
        directory = self._inodes.directory(nodeid)
        if not self.changes.needs_fsync(directory):
            return None
        return self.changes.fsync(directory)

    async def rename(
        self, parent_id: int, name: bytes, to_id: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        """Rename a file or directory; EINVAL for flags other than RENAME_NOREPLACE."""
        old, new = self._known_name(parent_id, name), self._new_name(to_id, new_name)
        await self._change(partial(self.changes.rename, old, new, flags, caller), old, new)

    def _new_name(self, parent_id: int, name: bytes, ending: str = "") -> Name:
        """Decode a name for a new object, whose key gets `ending`; OSError if it is not allowed."""
        parent = self._inodes.directory(parent_id)
        if len(name) > names.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "a name has 255 bytes at most")
        text = names.decode(name)
        if text is None or not names.is_expressible(text):
            raise OSError(errno.EINVAL, "a key cannot have this name")
        is_control = text == names.PRIVATE and parent.parent is None
        if is_control or names.is_private(self._inodes.key(parent), text):
            raise OSError(errno.EINVAL, "the name is kept for fusefs itself")
        if len(self._inodes.key(parent).encode()) + len(name) + len(ending) > names.LONGEST_KEY:
            raise OSError(errno.ENAMETOOLONG, "a key has 1,024 bytes at most")
        return parent, text

    def _known_name(self, parent_id: int, name: bytes) -> Name:
        parent, text = self._inodes.directory(parent_id), names.decode(name)
        if text is None:
            raise OSError(errno.ENOENT, "no such name")
        return parent, text


def _is_left_behind(inode: Inode) -> bool:
    """True if a node has lost its name and has no staged file."""
    return not inode.is_current and inode.staged is None


def _names_of(inode: Inode) -> tuple[Name, ...]:
    """The (parent, name) to lock for a change of a node's attributes; empty for a removed node."""
    return () if inode.parent is None or inode.is_removed else ((inode.parent, inode.name),)


def _check_size(meta: Meta) -> None:
    if not meta.fits:
        raise OSError(errno.ENOSPC, "S3 keeps 2 KiB of metadata with an object")


def _limited(mtime_ns: int | None) -> int | None:
    """Clamp a modification time to what object metadata can hold."""
    return None if mtime_ns is None else max(-MOST_NS, min(mtime_ns, MOST_NS))


def _changed(old: Meta, new: NewAttributes, mtime_ns: int | None) -> Meta:
    # The file type stays, and set-id bits are dropped.
    mode = None if new.mode is None else stat.S_IFMT(old.mode) | new.mode & PERMISSIONS
    given = {"mode": mode, "uid": new.uid, "gid": new.gid, "mtime_ns": mtime_ns}
    return old.changed(**{name: value for name, value in given.items() if value is not None})
