"""Changes of names: mkdir, unlink, rmdir, rename, symlinks.

A directory is a marker object (its prefix, empty) or what lies below a prefix.
What this mount empties stays a directory, by a marker of its own, until rmdir.

A rename is a copy on the server and then a delete, so that at every moment an
object is there under its old or its new name; of a directory, all copies come
before the first delete. A file that was never uploaded only changes its name.

A request may come twice, if the process that did it died before it answered.
Each is put on record before it is begun, and what a repeated one finds done
is success.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile

import trio

from fusefs.posix import names
from fusefs.posix.answers import Caller
from fusefs.posix.directories import Directories
from fusefs.posix.inodes import Inode, InodeTable
from fusefs.posix.journal import NodeLog
from fusefs.posix.meta import PERMISSIONS, Meta
from fusefs.posix.segments import ABSENT, Absent, Entry
from fusefs.posix.writing import Writer
from fusefs.store.base import ObjectInfo, Store
from fusefs.store.errors import NotFoundError

RENAME_NOREPLACE = 1
# Copies of a directory's rename that run side by side.
COPIES_AT_ONCE = 16


class Changes:
    """The changes of one mount's names. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        directories: Directories,
        inodes: InodeTable,
        writer: Writer,
        log: NodeLog,
    ) -> None:
        self._store = store
        self._directories = directories
        self._inodes = inodes
        self._writer = writer
        self._log = log
        # Requests that an earlier process had begun.
        self.begun: set[int] = set()

    def _begin(self, caller: Caller) -> bool:
        """Put a request on record; tell whether it may have been done before."""
        if caller.unique in self.begun:
            return True
        self._log.begun(caller.unique)
        return False

    async def _find(self, parent: Inode, name: str) -> Entry | Absent:
        directory = self._directories.get(self._inodes.key(parent))
        return (await self._directories.lookup(directory, name))[0]

    # Making

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        is_repeated = self._begin(caller)
        prefix = self._inodes.key(parent)
        if not is_repeated and not isinstance(await self._find(parent, name), Absent):
            raise OSError(errno.EEXIST, name)
        meta = Meta(stat.S_IFDIR | mode & PERMISSIONS, caller.uid, caller.gid)
        await self._writer.put_marker(prefix + name + "/", meta)
        self._directories.changed(prefix, name, None)
        inode = self._inodes.resolve(parent, name, None, prefix + name + "/")
        inode.meta = meta
        inode.packed = None
        return inode

    async def symlink(self, parent: Inode, name: str, target: bytes, caller: Caller) -> Inode:
        is_repeated = self._begin(caller)
        prefix = self._inodes.key(parent)
        if not is_repeated and not isinstance(await self._find(parent, name), Absent):
            raise OSError(errno.EEXIST, name)
        meta = Meta(stat.S_IFLNK | 0o777, caller.uid, caller.gid)
        with tempfile.TemporaryFile() as file:
            file.write(target)
            file.flush()
            info = await self._store.put_file(
                prefix + name, file.fileno(), len(target), metadata=meta.as_metadata(),
                content_type=None,
            )  # fmt: skip
        self._directories.changed(prefix, name, info)
        inode = self._inodes.create(parent, name, info, prefix + name)
        inode.meta = meta
        return inode

    async def change_directory(self, inode: Inode, meta: Meta) -> None:
        """Give a directory another mode, owner or time."""
        await self._writer.put_marker(self._inodes.key(inode), meta)
        inode.meta = meta

    # Removing

    async def unlink(self, parent: Inode, name: str, caller: Caller) -> None:
        is_repeated = self._begin(caller)
        prefix = self._inodes.key(parent)
        found = await self._find(parent, name)
        if isinstance(found, Absent):
            if is_repeated:
                return
            raise OSError(errno.ENOENT, name)
        if found is None:
            raise OSError(errno.EISDIR, name)
        inode = self._current(parent, name)
        staged = inode.staged if inode is not None else None
        if inode is not None:
            await self._writer.forget_unlinked(inode)
        if staged is None or staged.etag is not None:
            await self._store.delete(prefix + name)
        self._gone(parent, name)
        await self._keep_directory(parent)

    async def rmdir(self, parent: Inode, name: str, caller: Caller) -> None:
        is_repeated = self._begin(caller)
        prefix = self._inodes.key(parent) + name + "/"
        found = await self._find(parent, name)
        if isinstance(found, Absent):
            if is_repeated:
                return
            raise OSError(errno.ENOENT, name)
        if found is not None:
            raise OSError(errno.ENOTDIR, name)
        if not await self._is_empty(prefix):
            raise OSError(errno.ENOTEMPTY, name)
        await self._store.delete(prefix)
        self._gone(parent, name)
        await self._keep_directory(parent)

    async def _is_empty(self, prefix: str) -> bool:
        if self._directories.local.has_lasting(prefix):
            return False
        page = await self._store.list_page(prefix, delimiter="", max_keys=2)
        return all(info.key == prefix for info in page.objects)

    async def _keep_directory(self, directory: Inode) -> None:
        """Give a directory a marker if nothing else makes it one any more."""
        prefix = self._inodes.key(directory)
        if directory.parent is None or self._directories.local.has_lasting(prefix):
            return
        page = await self._store.list_page(prefix, delimiter="", max_keys=1)
        if not page.objects:
            meta = directory.meta or Meta(stat.S_IFDIR | 0o755, os.geteuid(), os.getegid())
            await self._writer.put_marker(prefix, meta)

    def _gone(self, parent: Inode, name: str) -> None:
        inode = self._current(parent, name)
        if inode is not None:
            self._inodes.supersede(inode)
        self._directories.changed(self._inodes.key(parent), name, ABSENT)

    def _current(self, parent: Inode, name: str) -> Inode | None:
        return (parent.children or {}).get(name)

    # Renaming

    async def rename(
        self, parent: Inode, name: str, to: Inode, new_name: str, flags: int, caller: Caller
    ) -> None:
        if flags & ~RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, "an exchange cannot be done in one step")
        if not names.is_expressible(new_name):
            raise OSError(errno.EINVAL, new_name)
        is_repeated = self._begin(caller)
        found, target = await self._find(parent, name), await self._find(to, new_name)
        if isinstance(found, Absent):
            if is_repeated and not isinstance(target, Absent):
                return
            raise OSError(errno.ENOENT, name)
        if not isinstance(target, Absent) and not is_repeated:
            if flags & RENAME_NOREPLACE:
                raise OSError(errno.EEXIST, new_name)
            await self._check_target(found, target, self._inodes.key(to) + new_name + "/")
        if (parent, name) == (to, new_name):
            return
        if found is None:
            await self._rename_directory(parent, name, to, new_name)
        else:
            await self._rename_file(parent, name, to, new_name, found)
        await self._keep_directory(parent)

    async def _check_target(self, found: Entry, target: Entry, prefix: str) -> None:
        if found is None and target is not None:
            raise OSError(errno.ENOTDIR, prefix)
        if found is not None and target is None:
            raise OSError(errno.EISDIR, prefix)
        if target is None and not await self._is_empty(prefix):
            raise OSError(errno.ENOTEMPTY, prefix)

    async def _rename_file(
        self, parent: Inode, name: str, to: Inode, new_name: str, info: ObjectInfo
    ) -> None:
        old_prefix, new_prefix = self._inodes.key(parent), self._inodes.key(to)
        inode = self._current(parent, name)
        replaced = self._current(to, new_name)
        if replaced is not None and replaced is not inode:
            await self._writer.forget_unlinked(replaced)
        staged = inode.staged if inode is not None else None
        if inode is None or staged is None:
            new = await self._store.copy(info.version, new_prefix + new_name, metadata=None)
            await self._store.delete(old_prefix + name)
            self._directories.changed(old_prefix, name, ABSENT)
            if inode is not None:
                self._inodes.move(inode, to, new_name)
                self._inodes.replace_version(inode, new)
            self._directories.changed(new_prefix, new_name, new)
            return
        async with staged.lock:
            had = staged.etag
            copied: ObjectInfo | None = None
            if had is not None and not staged.is_dirty:
                assert inode.info is not None
                copied = await self._store.copy(inode.info.version, new_prefix + new_name)
            staged.etag = copied.etag if copied is not None else None
            self._inodes.move(inode, to, new_name)
            if copied is not None:
                self._inodes.replace_version(inode, copied)
            self._writer.staging.record(staged)
            self._directories.changed(old_prefix, name, ABSENT)
            assert inode.info is not None
            self._directories.changed(new_prefix, new_name, inode.info, lasting=True)
        if had is not None:
            # The old object goes when the new one is there.
            await self._writer.upload(staged)
            await self._store.delete(old_prefix + name)
        await self._writer.finish(inode)

    async def _rename_directory(self, parent: Inode, name: str, to: Inode, new_name: str) -> None:
        old = self._inodes.key(parent) + name + "/"
        new = self._inodes.key(to) + new_name + "/"
        if new.startswith(old):
            raise OSError(errno.EINVAL, "a directory cannot be moved below itself")
        await self._writer.upload_all(old)
        objects = await self._list_all(old)
        limiter = trio.CapacityLimiter(COPIES_AT_ONCE)

        async def copy(info: ObjectInfo) -> None:
            async with limiter:
                try:
                    await self._copy(info, new + info.key[len(old) :])
                except NotFoundError:
                    return  # removed by somebody else meanwhile

        async with trio.open_nursery() as nursery:
            for info in objects:
                nursery.start_soon(copy, info)
        # What is inside goes before its directory's marker.
        failed = await self._store.delete_many([info.key for info in reversed(objects)])
        if failed:
            raise OSError(errno.EIO, f"{len(failed)} objects could not be removed")
        inode = self._current(parent, name)
        if inode is not None:
            self._inodes.move(inode, to, new_name)
        self._directories.moved(old, new)
        self._directories.changed(self._inodes.key(parent), name, ABSENT)
        self._directories.changed(self._inodes.key(to), new_name, None)

    async def _copy(self, info: ObjectInfo, key: str) -> None:
        if info.size or not info.key.endswith("/"):
            await self._store.copy(info.version, key)
            return
        # Not every server copies a directory's marker.
        told = await self._store.head(info.key)
        await self._store.put_file(
            key, self._writer.empty, 0, metadata=told.metadata or {},
            content_type=told.content_type,
        )  # fmt: skip

    async def _list_all(self, prefix: str) -> list[ObjectInfo]:
        objects: list[ObjectInfo] = []
        after = ""
        while True:
            page = await self._store.list_page(prefix, delimiter="", start_after=after)
            objects += page.objects
            if page.next_token is None:
                return objects
            after = page.last
