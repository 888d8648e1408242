"""The changes of this mount's own state when objects get other keys.

The bucket has copies under the new keys already. The cached files of the old objects become
those of the copies, nodes and open handles get the copies' versions, staged files will be
uploaded under the new keys, and listings show the new names.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice

import trio

from fusefs.posix.directory.freshness import FIRST_S
from fusefs.posix.directory.segment import ABSENT, UNCOVERED
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.namespace.prefix_copy import PrefixCopy
from fusefs.posix.nodes.inode_table import Copies, Inode
from fusefs.posix.nodes.names import parent_of, split_entry
from fusefs.posix.nodes.object_metadata import dated
from fusefs.posix.nodes.prefix_lock import Name
from fusefs.posix.write.staging import Staging
from fusefs.store.interface import ObjectInfo, ObjectVersion, Revision

# Cached files that are renamed before other tasks of the event loop get a turn.
CACHED_AT_ONCE = 64


class Relocator(MountPart):
    """Renames a mount's nodes, cached copies and staged files. For the event loop.

    The argument `uncached` is the result of `move_cached`: the copies without a cached file.
    """

    def __init__(self, state: MountState, staging: Staging) -> None:
        super().__init__(state)
        self._staging = staging
        self._dated = partial(dated, form=state.owner.form)

    def dating(self, info: ObjectInfo) -> Revision | None:
        """Return the `Write.revise` that keeps a copied file's time; None if S3 keeps it anyway."""
        inode = self._inodes.at(info.key)
        if inode is None or inode.info is None or inode.info.version != info.version:
            return self._dated
        # A large object that was sent while it was written has no time in its metadata.
        is_dated = inode.meta is not None and inode.meta.mtime_ns not in (None, inode.info.mtime_ns)
        return None if is_dated else self._dated

    async def move_cached(self, moved: Copies) -> set[ObjectVersion]:
        """Assign each source's cached file to its copy; return the copies for which that failed."""
        uncached, left = set(), iter(moved.items())
        while some := dict(islice(left, CACHED_AT_ONCE)):
            for version, file in zip(some, await self._cache.look_up(some), strict=True):
                # Programs may have opened the old version since it was looked up.
                is_cached = file is not None or self._cache.find(version) is not None
                if is_cached and not await self._cache.move(version, some[version].version):
                    uncached.add(some[version].version)
            await trio.lowlevel.checkpoint()
        return uncached

    def move_file(self, inode: Inode | None, old_name: Name, new_name: Name, moved: Copies) -> None:
        """Rename a file in this mount's state; `moved` has its new object, if there is one."""
        (parent, name), (to, new) = old_name, new_name
        entry = next(iter(moved.values()), None)
        replaced = self._inodes.former(to, new)
        current = to.child(new)
        if current is not None and current is not inode:
            replaced.add(current)
            if current.info is not None:
                self._cache.obsolete(current.info.version)
        self._inodes.detach(replaced)
        self._inodes.entries_changed(parent)
        self._inodes.entries_changed(to)
        for old_node in self._inodes.former(parent, name):
            # A node with an old content of the file gets the file's new name.
            if old_node.info is not None and not old_node.is_removed:
                old_node.parent, old_node.name = to, new
                self._inodes.replace_version(old_node, old_node.info)
        is_staged = inode is not None and inode.staged is not None
        if inode is not None:
            self._inodes.move(inode, to, new, moved)
            if entry is None or is_staged:
                entry = inode.info
            elif inode.info != entry and inode.is_open:
                self._inodes.mark_replaced(inode)  # the copied version is not the open one
            elif inode.info != entry:
                self._inodes.replace_version(inode, entry)
            if moved:
                # The kernel may open the new name without a lookup.
                inode.looked_up = False
                most_s = self._directories.get(self._inodes.key(to)).most_s
                inode.valid_until = time.monotonic() + min(FIRST_S, most_s)
        else:
            numbers = self._inodes.numbers
            number = numbers.of(parent, name, is_directory=False)
            numbers.moved(parent, name, to, new, number, is_directory=False)
        self._directories.changed(self._inodes.key(parent), name, ABSENT)
        assert entry is not None
        self._directories.changed(self._inodes.key(to), new, entry, lasting=is_staged)

    def move_directory(self, copies: PrefixCopy, uncached: set[ObjectVersion]) -> None:
        """Rename a directory, with everything below it, in this mount's state."""
        for file in self._staging:
            source = copies.sources.get(file.key)
            # If another client has put an object there meanwhile, the upload finds the conflict.
            if source is not None and source.etag == file.etag:
                file.etag = copies.made[file.key].etag
        moved = copies.by_version()
        self._move_nodes(copies.old, copies.new, moved)
        self.follow(moved, uncached)

    def finish_move(self, old: str, new: str) -> None:
        """Complete a `move_directory` that a kill has interrupted, before handles are restored."""
        inode, there = self._inodes.at(old), self._inodes.at(new)
        if inode is not None and there is not None and there.children:
            # The directory has its new name already, but some files that no kernel node stands
            # for are still below the old name.
            for child in list((inode.children or {}).values()):
                if child.name not in there.children:
                    self._inodes.move(child, there, child.name)
            self._inodes.mark_replaced(inode)
        self._move_nodes(old, new, {})
        for file in self._staging:
            if file.key.startswith(new):
                self._staging.try_record(file)

    def _move_nodes(self, old: str, new: str, moved: Copies) -> None:
        staged = [file for file in self._staging if file.key.startswith(old)]
        inode, to = self._inodes.at(old), self._inodes.at(parent_of(new))
        if inode is not None and to is not None:
            if inode.meta == self._state.owner.directory:
                inode.meta = None  # a HEAD may have missed the marker, which is deleted already
            self._inodes.move(inode, to, split_entry(new)[1], moved)
        elif inode is not None:
            self._inodes.mark_replaced(inode)
        for file in staged:
            self._staging.try_record(file)
        for parent in (self._inodes.at(parent_of(old)), to):
            if parent is not None:
                self._inodes.entries_changed(parent)
        self._directories.moved(old, new)
        # The bucket lists the old directory until all objects below it are deleted.
        self._directories.changed(*split_entry(old), UNCOVERED, lasting=True)
        self._directories.changed(*split_entry(new), None)

    def ended(self, old: str, new: str, *, is_ours: bool) -> None:
        """Update the listings when a rename has ended; expire them unless the rename `is_ours`."""
        self._directories.pending_changes.landed(*split_entry(old))
        if is_ours:
            return
        self._directories.moved(old, new)
        for prefix in (old, new):
            above, name = split_entry(prefix)
            self._directories.correct(self._directories.get(above), name, None)

    def follow(self, moved: Copies, uncached: set[ObjectVersion]) -> None:
        """Give open nodes that have lost their names the keys and versions of their copies.

        A node that is open for passthrough is separated from its name if its cached file could
        not be renamed: the kernel must not get another file for the same node.
        """
        for inode in self._inodes.unlisted:
            copy = moved.get(inode.info.version) if inode.info is not None else None
            if copy is not None and inode.is_open:
                self._inodes.follow(inode, copy, copy.key)
        for version in uncached:
            current = self._inodes.at(version.key)
            if current is not None and current.passthrough and current.object.version == version:
                self._inodes.mark_replaced(current)
