"""The moves on this mount that go along when an object gets another key.

The bucket has copies under the new keys by then. The cached copies become
theirs, nodes and open handles go on with them, files that are being written
will be uploaded there, and listings show the new names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import trio

from fusefs.posix.directory.freshness import FIRST_S
from fusefs.posix.directory.segment import ABSENT, UNCOVERED
from fusefs.posix.mount_state import MountState
from fusefs.posix.namespace.prefix_copy import PrefixCopy
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.names import parent_of, split_entry
from fusefs.posix.write.staging import Staging
from fusefs.store.interface import ObjectInfo, ObjectVersion

# Copies by the versions that they are of.
Moved = Mapping[ObjectVersion, ObjectInfo]
# Cached files that are renamed between two looks at what else there is to do.
CACHED_AT_ONCE = 64


class Relocator:
    """Has a mount's nodes, cached copies and staged files follow renames. For the event loop."""

    def __init__(self, state: MountState, staging: Staging) -> None:
        self._directories = state.directories
        self._cache = state.cache
        self._staging = staging
        self._inodes = state.inodes
        self._handles = state.handles

    def is_dated(self, info: ObjectInfo) -> bool:
        """True if an object is known to say in its metadata when it was modified."""
        inode = self._inodes.at(info.key)
        if inode is None or inode.info is None or inode.info.version != info.version:
            return False
        # One of a large object that was sent while it was written is not in its metadata.
        return inode.meta is not None and inode.meta.mtime_ns not in (None, inode.info.mtime_ns)

    async def move_cached(self, moved: Moved) -> set[ObjectVersion]:
        """Keep what is cached of the versions for their copies; return those it can't be for."""
        uncached = set()
        for index, (version, copy) in enumerate(moved.items()):
            if (await self._cache.look_up([version]))[0] is not None:
                if not await self._cache.move(version, copy.version):
                    uncached.add(copy.version)
                if index % CACHED_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
        return uncached

    def move_file(
        self,
        inode: Inode | None,
        parent: Inode,
        name: str,
        to: Inode,
        new_name: str,
        moved: Moved,
        uncached: set[ObjectVersion],
    ) -> None:
        """Let a name be another one; its copy, if there is one, is what `moved` tells."""
        old, new = self._inodes.key(parent), self._inodes.key(to)
        entry = next(iter(moved.values()), None)
        replaced = self._handles.former(to, new_name)
        current = to.child(new_name)
        if current is not None and current is not inode:
            replaced.add(current)
            if current.info is not None:
                self._cache.obsolete(current.info.version)
        self._inodes.detach(replaced)
        self._inodes.entries_changed(parent)
        self._inodes.entries_changed(to)
        for old_node in self._handles.former(parent, name):
            # It has an old content of the file, and knows the name that the file has now.
            if old_node.info is not None and not old_node.is_removed:
                old_node.parent, old_node.name = to, new_name
                self._inodes.replace_version(old_node, old_node.info)
        is_staged = inode is not None and inode.staged is not None
        if inode is not None:
            self._inodes.move(inode, to, new_name, moved)
            if entry is None or is_staged:
                entry = inode.info
            elif inode.info != entry and inode.is_open:
                self._inodes.mark_replaced(inode)  # the copy is not of the version that it reads
            elif inode.info != entry:
                self._inodes.replace_version(inode, entry)
            if moved:
                # The kernel opens the new name without a lookup.
                inode.looked_up = False
                most_s = self._directories.get(new).most_s
                inode.valid_until = time.monotonic() + min(FIRST_S, most_s)
        else:
            numbers = self._inodes.numbers
            number = numbers.of(parent, name, is_directory=False)
            numbers.moved(parent, name, to, new_name, number, is_directory=False)
        self._directories.changed(old, name, ABSENT)
        assert entry is not None
        self._directories.changed(new, new_name, entry, lasting=is_staged)
        self._follow(moved, uncached)

    def move_directory(self, copies: PrefixCopy, uncached: set[ObjectVersion]) -> None:
        """Let everything below a prefix be below another one."""
        for file in self._staging:
            source = copies.sources.get(file.key)
            # What somebody else has put there meanwhile is for the upload to find.
            if source is not None and source.etag == file.etag:
                file.etag = copies.made[file.key].etag
        moved = copies.by_version()
        self._move_nodes(copies.old, copies.new, moved)
        self._follow(moved, uncached)

    def finish_move(self, old: str, new: str) -> None:
        """Do what a killed process has left out of `move_directory`, before there are handles."""
        inode, there = self._inodes.at(old), self._inodes.at(new)
        if inode is not None and there is not None and there.children:
            # The directory has its new name; it is files that the kernel does not know.
            for child in list((inode.children or {}).values()):
                if child.name not in there.children:
                    self._inodes.move(child, there, child.name)
            self._inodes.mark_replaced(inode)
        self._move_nodes(old, new, {})
        for file in self._staging:
            if file.key.startswith(new):
                self._staging.try_record(file)

    def _move_nodes(self, old: str, new: str, moved: Moved) -> None:
        staged = [file for file in self._staging if file.key.startswith(old)]
        inode, to = self._inodes.at(old), self._inodes.at(parent_of(new))
        if inode is not None and to is not None:
            self._inodes.move(inode, to, split_entry(new)[1], moved)
        elif inode is not None:
            self._inodes.mark_replaced(inode)
        for file in staged:
            self._staging.try_record(file)
        for parent in (self._inodes.at(parent_of(old)), to):
            if parent is not None:
                self._inodes.entries_changed(parent)
        self._directories.moved(old, new)
        # The bucket has it until all below it is deleted.
        self._directories.changed(*split_entry(old), UNCOVERED, lasting=True)
        self._directories.changed(*split_entry(new), None)

    def ended(self, old: str, new: str, *, is_ours: bool) -> None:
        """A rename is over: listings may have shown one of another process half done."""
        self._directories.pending_changes.landed(*split_entry(old))
        if is_ours:
            return
        self._directories.moved(old, new)
        for prefix in (old, new):
            above, name = split_entry(prefix)
            self._directories.correct(self._directories.get(above), name, None)

    def _follow(self, moved: Moved, uncached: set[ObjectVersion]) -> None:
        """Have handles of nodes that their names no longer stand for go on with the copies.

        Where the cached file could not go along, the kernel must not get
        another for the same node.
        """
        for handle in self._handles.files.values():
            inode = handle.inode
            if inode.info is None:
                continue
            copy = moved.get(inode.info.version)
            if copy is not None and not inode.is_current:
                self._inodes.follow(inode, copy, copy.key)
            elif inode.is_current and handle.backing_id and inode.info.version in uncached:
                self._inodes.mark_replaced(inode)
