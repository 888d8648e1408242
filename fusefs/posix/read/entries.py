"""The entries of one segment in a READDIR reply: with their inodes, or as names alone."""

from __future__ import annotations

import math
import time

from fusefs.posix.directory.listings import Entry, Segment
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.posix.nodes.object_metadata import LONGEST_TARGET
from fusefs.posix.types import DirectoryBuffer, NameKind


class Entries:
    """Adds the entries of one segment to one reply."""

    def __init__(
        self,
        inodes: InodeTable,
        head_cache: HeadCache,
        parent: Inode,
        segment: Segment,
        buffer: DirectoryBuffer,
    ) -> None:
        self._inodes = inodes
        self._head_cache = head_cache
        self._parent = parent
        self._entries = segment.entries
        self._buffer = buffer
        self._expires = segment.sure_until
        self._valid_s = max(0.0, segment.sure_until - time.monotonic())
        self._assumed = head_cache.assumed(parent)
        # Entries up to this Last-Modified need no look at their inodes.
        self._plain_until = self._assumed.links if head_cache.asks_less else -math.inf

    def add(self, name: str, encoded: bytes, offset: int) -> bool | None:
        """Add one entry; return False if there is no room, None if a HEAD has to come first."""
        entry = self._entries[name]
        buffer, inodes = self._buffer, self._inodes
        if buffer.takes_names and (inodes.is_full or not buffer.is_plus):
            return self._add_name(name, encoded, offset, entry)
        inode = inodes.resolve(self._parent, name, entry)
        is_bare = False
        if buffer.is_plus and (entry is None or entry.mtime_ns > self._plain_until):
            is_bare = self._head_cache.needs_head_of(inode, self._assumed)
        if not inode.is_current:  # the inode was a link shown as a file
            inode = inodes.resolve(self._parent, name, entry)
            is_bare = self._head_cache.needs_head_of(inode, self._assumed)
        # The size of a staged file may change at any time, so its attributes are not cached.
        if (is_bare or inode.staged is not None) and buffer.takes_names:
            has_room = self._add_name(name, encoded, offset, entry)
        elif is_bare:
            inodes.drop_unknown(inode)
            return None
        else:
            has_room = buffer.add(encoded, inode, offset, self._valid_s)
            if has_room:
                inodes.count(inode, self._expires)
                return True
        inodes.drop_unknown(inode)
        return has_room

    def _add_name(self, name: str, encoded: bytes, offset: int, entry: Entry) -> bool:
        assert self._parent.children is not None
        inode = self._parent.children.get(name)
        if inode is None:
            ino = self._inodes.numbers.of(self._parent, name, is_directory=entry is None)
        else:
            ino = inode.ino
        kind = NameKind.OBJECT
        if entry is None:
            kind = NameKind.DIRECTORY
        elif entry.size > LONGEST_TARGET or (
            entry.mtime_ns <= self._assumed.links if inode is None else inode.staged is not None
        ):
            kind = NameKind.FILE
        return self._buffer.add_name(encoded, ino, offset, kind)
