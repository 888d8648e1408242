"""Streams of directory entries: READDIR and READDIRPLUS, from listings.

An offset tells the name behind which a stream continues, in the latest listing (nodes/offsets.py).
Entries are shown with their attributes if these are known. On a writable mount each entry may need
a HEAD, and HEADs of a few names show if the others need one (posix/directory/head_policy.py). If
they do, entries are shown without attributes, if the session can do so; so are all entries while
the kernel knows as many nodes as it may (nodes/name_pruner.py), because a directory of millions
would need a node for each entry.
"""

from __future__ import annotations

import errno
import math
import time
from itertools import islice

from fusefs.posix.directory.head_policy import Assumed
from fusefs.posix.directory.listings import Directory, Entry, Segment
from fusefs.posix.metadata.head_cache import MOST_AHEAD, HeadCache
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.nodes import names
from fusefs.posix.nodes.handles import DirectoryHandle
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.object_metadata import LONGEST_TARGET
from fusefs.posix.nodes.offsets import base_of, code_of, divided
from fusefs.posix.types import Answer, Caller, DirectoryBuffer, NameKind, answered

# The offsets of "." and ".." in a directory stream.
DOT, DOT_DOT = 2, 3
# The most names behind a mark that are searched for an offset's name. A LIST page has a thousand,
# but the segment of a directory that this mount created may have had more.
_SEARCHED = 100_000


class DirectoryStreams(MountPart):
    """The open directories of one mount. Belongs to the event loop."""

    def __init__(self, state: MountState, head_cache: HeadCache) -> None:
        super().__init__(state)
        self._head_cache = head_cache

    def open(self, inode: Inode, caller: Caller) -> tuple[DirectoryHandle, bool]:
        """Open a directory; return its handle, and True if the kernel's cached listing is valid."""
        if known := self._handles.opened_by(caller.unique):
            return self._handles.directories[known], False
        directory = self._directories.get(self._inodes.key(inode))
        is_cached = inode.streamed_generation == directory.generation and directory.is_complete(
            time.monotonic()
        )
        if not (is_cached or inode.served):
            self._inodes.forget_marks(inode)
        return self._handles.open_directory(inode, directory.generation, caller.unique), is_cached

    def read(self, fh: int, offset: int, buffer: DirectoryBuffer) -> Answer[None]:
        """Add the next entries behind `offset` to a buffer; add none at the directory's end."""
        handle = self._handles.directory(fh)
        if not self._seek(handle, offset):
            return self._seek_and_read(handle, offset, buffer)
        handle.recent = {}
        if not self._add_dots(handle, buffer):
            return None
        directory = self._directories.get(self._inodes.key(handle.inode))
        while True:
            segment = self._directories.segment_now(directory, handle.position, handle.opened)
            if segment is None or self._asks(handle, buffer):
                # Entries that were added already need not wait for the next request.
                if buffer.is_empty:
                    return self._read_later(handle, buffer)
                return None
            if not self._add_entries(handle, directory, segment, buffer):
                return None

    async def _seek_and_read(
        self, handle: DirectoryHandle, offset: int, buffer: DirectoryBuffer
    ) -> None:
        handle.position = await self._find(handle, offset)
        handle.offset = offset
        await answered(self.read(handle.fh, offset, buffer))

    async def _find(self, handle: DirectoryHandle, offset: int) -> str:
        """Return the `names.position` of the entry with an offset; EINVAL for an unknown offset.

        If the entry was removed, return the mark's position: some names may then come twice.
        """
        mark, code = divided(offset) or (0, -1)
        marks = handle.inode.marks or {}
        start = next((at for at, number in marks.items() if number == mark), None if mark else "")
        if start is None or code < 0:
            raise OSError(errno.EINVAL, f"unknown directory offset {offset}")
        directory = self._directories.get(self._inodes.key(handle.inode))
        for name in self._directories.pending_changes.removed(directory.prefix):
            if code_of(name.encode()) == code:
                return names.position(name)
        position, searched = start, 0
        while searched < _SEARCHED:
            segment = await self._directories.segment_behind(directory, position, handle.opened)
            for name in islice(segment.ordered, segment.after(position), None):
                if code_of(name.encode()) == code:
                    return names.position(name)
            searched += max(1, len(segment.ordered))
            if segment.stop is None:
                break
            position = max(position, segment.stop)
        return start

    async def _read_later(self, handle: DirectoryHandle, buffer: DirectoryBuffer) -> None:
        """Wait for the next segment, and add its entries. Repeat while none was added."""
        has_more = True
        while has_more and buffer.is_empty:
            directory = self._directories.get(self._inodes.key(handle.inode))
            segment = await self._directories.segment_behind(
                directory, handle.position, handle.opened
            )
            shown: list[Inode] = []
            if self._asks(handle, buffer) and self._is_of(directory, handle):
                await self._head_cache.sample(handle.inode, segment)
                if not buffer.takes_names and self._is_of(directory, handle):
                    shown = await self._show_next(handle, segment)
            # After a rename meanwhile the listed files have other keys.
            if self._is_of(directory, handle):
                has_more = self._add_entries(handle, directory, segment, buffer)
            for inode in shown:
                self._inodes.drop_unknown(inode)

    def _is_of(self, directory: Directory, handle: DirectoryHandle) -> bool:
        """True if `directory` still has the prefix of the handle: it was not renamed."""
        return self._inodes.key(handle.inode) == directory.prefix

    def _asks(self, handle: DirectoryHandle, buffer: DirectoryBuffer) -> bool:
        """True if entries may need HEADs before they are added."""
        if not buffer.is_plus:
            return False
        return not buffer.takes_names or self._head_cache.wants_sample(handle.inode)

    async def _show_next(self, handle: DirectoryHandle, segment: Segment) -> list[Inode]:
        """Request the attributes of the next entries, MOST_AHEAD at most; return their nodes.

        The caller gives the nodes to `drop_unknown` after the reply. StoreError if a HEAD failed.
        """
        at = segment.after(handle.position)
        inodes = [
            self._inodes.resolve(handle.inode, name, segment.entries[name])
            for name in segment.ordered[at : at + MOST_AHEAD]
        ]
        try:
            await self._head_cache.show_all(inodes)
        except BaseException:
            for inode in inodes:
                self._inodes.drop_unknown(inode)
            raise
        return inodes

    def _seek(self, handle: DirectoryHandle, offset: int) -> bool:
        """Move a stream to an offset; False if the offset has to be searched for (`_find`)."""
        if offset == handle.offset:
            return True
        if not offset:
            handle.opened = time.monotonic()  # rewinddir acts like a new open
        if offset in (0, DOT, DOT_DOT):
            position = ""
        else:
            name = handle.recent.get(offset)
            if name is None:
                return False
            position = names.position(name)
        handle.offset, handle.position = offset, position
        return True

    def _add_dots(self, handle: DirectoryHandle, buffer: DirectoryBuffer) -> bool:
        """Add "." and ".." if the stream is at its start; False if the buffer has no room."""
        inode = handle.inode
        parent = inode.parent if inode.parent is not None else inode
        for at, name, ino, own in ((0, b".", inode.ino, DOT), (DOT, b"..", parent.ino, DOT_DOT)):
            if handle.offset == at:
                if not buffer.add_name(name, ino, own, NameKind.DIRECTORY):
                    return False
                handle.offset = own
        return True

    def _add_entries(
        self,
        handle: DirectoryHandle,
        directory: Directory,
        segment: Segment,
        buffer: DirectoryBuffer,
    ) -> bool:
        """Add a segment's entries; True if more may fit: of the next segment, or after HEADs."""
        if not handle.position:
            handle.generation = directory.generation
        parent, inodes, heads = handle.inode, self._inodes, self._head_cache
        base = base_of(inodes.mark(parent, segment.start))
        valid_s = max(0.0, segment.sure_until - time.monotonic())
        assumed = heads.assumed(parent)
        # Entries up to this Last-Modified need no look at their inodes.
        plain_until = assumed.links if heads.asks_less else -math.inf
        for name in islice(segment.ordered, segment.after(handle.position), None):
            entry, encoded = segment.entries[name], name.encode()
            offset = base | code_of(encoded)
            inode, is_bare = None, True
            if not buffer.takes_names or (buffer.is_plus and not inodes.is_full):
                inode, is_bare = inodes.resolve(parent, name, entry), False
                if buffer.is_plus and (entry is None or entry.mtime_ns > plain_until):
                    is_bare = heads.needs_head(inode, assumed)
                if not inode.is_current:  # the inode was a link shown as a file
                    inode = inodes.resolve(parent, name, entry)
                    is_bare = heads.needs_head(inode, assumed)
            # The size of a staged file may change at any time, so its attributes are not cached.
            if inode is None or (buffer.takes_names and (is_bare or inode.staged is not None)):
                has_room = self._add_name(parent, name, entry, assumed, offset, buffer)
            else:
                has_room = not is_bare and buffer.add(encoded, inode, offset, valid_s)
                if has_room:
                    inodes.count(inode, segment.sure_until)
            if inode is not None and not inode.nlookup:
                inodes.drop_unknown(inode)
            if not has_room:
                # The entry needs a HEAD before, or the buffer has no room.
                return is_bare and not buffer.takes_names and buffer.is_empty
            handle.offset, handle.position = offset, name + "/"
            handle.recent[offset] = name
        if segment.stop is None:
            if handle.generation == directory.generation:
                handle.inode.streamed_generation = directory.generation
            return False
        handle.position = max(handle.position, segment.stop)
        return True

    def _add_name(
        self,
        parent: Inode,
        name: str,
        entry: Entry,
        assumed: Assumed,
        offset: int,
        buffer: DirectoryBuffer,
    ) -> bool:
        inode = parent.child(name)
        if inode is None:
            ino = self._inodes.numbers.of(parent, name, is_directory=entry is None)
        else:
            ino = inode.ino
        kind = NameKind.OBJECT
        if entry is None:
            kind = NameKind.DIRECTORY
        elif entry.size > LONGEST_TARGET or (
            entry.mtime_ns <= assumed.links if inode is None else inode.staged is not None
        ):
            kind = NameKind.FILE
        return buffer.add_name(name.encode(), ino, offset, kind)

    def close(self, fh: int) -> None:
        handle = self._handles.close_directory(fh)
        if handle is not None and not handle.inode.served:
            self._inodes.drop_unknown(handle.inode)
