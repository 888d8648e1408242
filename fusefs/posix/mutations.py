"""The requests that change something, on a writable mount."""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import TYPE_CHECKING

from fusefs.posix import meta, names
from fusefs.posix.answers import Caller, NewAttributes, Opened, waiting
from fusefs.posix.changes import Changes
from fusefs.posix.inodes import Inode
from fusefs.posix.writing import Writer

if TYPE_CHECKING:
    from fusefs.posix.operations import Operations


class Mutations:
    """One method per request, as in `Operations`. Belongs to the event loop."""

    def __init__(self, operations: Operations, writer: Writer, changes: Changes) -> None:
        self._operations = operations
        self._inodes = operations.inodes
        self.writer = writer
        self.changes = changes

    async def setattr(self, nodeid: int, new: NewAttributes) -> Inode:
        """Change what stat shows, and with it the content where that is the size."""
        return await waiting(self._setattr(self._inodes.get(nodeid), new))

    async def _setattr(self, inode: Inode, new: NewAttributes) -> Inode:
        if new.size is not None:
            if inode.info is None:
                raise OSError(errno.EISDIR, "a directory")
            await self.writer.truncate(inode, new.size)
        await self._operations.learn_meta(inode)
        old = inode.staged.meta if inode.staged is not None else inode.meta
        assert old is not None
        changed = old.changed(
            mode=old.mode
            if new.mode is None
            else old.mode & ~meta.PERMISSIONS | new.mode & meta.PERMISSIONS,
            uid=old.uid if new.uid is None else new.uid,
            gid=old.gid if new.gid is None else new.gid,
            mtime_ns=old.mtime_ns if new.mtime_ns is None else new.mtime_ns,
        )
        if changed != old:
            if inode.info is None:
                await self.changes.change_directory(inode, changed)
            else:
                await self.writer.change_meta(inode, changed)
            inode.packed = None
        return inode

    async def create(
        self, parent_id: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a new file and open it."""
        if known := self._operations.handles.opened_by(caller.unique):
            handle = self._operations.handles.files[known]
            return handle.inode, Opened(known, keep_cache=False, may_write=True)
        parent = self._operations.directory(parent_id)
        return await waiting(self.writer.create(parent, self._new_name(name), mode, flags, caller))

    async def mknod(self, parent_id: int, name: bytes, mode: int, caller: Caller) -> Inode:
        if not stat.S_ISREG(mode):
            raise OSError(errno.EPERM, "only regular files can be made in a bucket")
        inode, opened = await self.create(parent_id, name, mode, os.O_WRONLY, caller)
        answer = self._operations.release(opened.fh)
        if answer is not None:
            await answer
        return inode

    async def mkdir(self, parent_id: int, name: bytes, mode: int, caller: Caller) -> Inode:
        parent = self._operations.directory(parent_id)
        inode = await waiting(self.changes.mkdir(parent, self._new_name(name), mode, caller))
        self._inodes.count(inode, time.monotonic())
        return inode

    async def symlink(self, parent_id: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        parent = self._operations.directory(parent_id)
        inode = await waiting(self.changes.symlink(parent, self._new_name(name), target, caller))
        self._inodes.count(inode, time.monotonic())
        return inode

    async def readlink(self, nodeid: int) -> bytes:
        inode = self._inodes.get(nodeid)
        if inode.info is None or inode.meta is None or not inode.meta.is_symlink:
            raise OSError(errno.EINVAL, "not a symbolic link")
        info = inode.info
        return bytes(
            await waiting(self._operations.fetcher.read_unkept(info.version, 0, info.size))
        )

    async def unlink(self, parent_id: int, name: bytes, caller: Caller) -> None:
        parent = self._operations.directory(parent_id)
        await waiting(self.changes.unlink(parent, self._known_name(name), caller))

    async def rmdir(self, parent_id: int, name: bytes, caller: Caller) -> None:
        parent = self._operations.directory(parent_id)
        await waiting(self.changes.rmdir(parent, self._known_name(name), caller))

    async def rename(
        self, parent_id: int, name: bytes, to_id: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        parent, to = self._operations.directory(parent_id), self._operations.directory(to_id)
        await waiting(
            self.changes.rename(
                parent, self._known_name(name), to, self._new_name(new_name), flags, caller
            )
        )

    def _new_name(self, name: bytes) -> str:
        """A name that an object may have; what no listing could show again is refused."""
        if len(name) > names.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "a name has 255 bytes at most")
        text = names.decode(name)
        if text is None or not names.is_expressible(text):
            raise OSError(errno.EINVAL, "a key cannot have this name")
        return text

    def _known_name(self, name: bytes) -> str:
        text = names.decode(name)
        if text is None:
            raise OSError(errno.ENOENT, "no such name")
        return text
