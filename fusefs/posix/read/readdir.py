"""Streams of directory entries: READDIR and READDIRPLUS, from listings.

An offset tells behind which name a stream goes on (nodes/offsets.py), in whatever
listing is there by then. Entries come
with their attributes where these are known. On a writable mount that may take a
question to the bucket for each: then names come alone, if the session can do that,
behind a first few that show whether the others are worth asking
(see posix/directory/head_policy.py). So they do where the kernel knows as many nodes
as it may: a directory of millions would take a node for each (nodes/name_pruner.py).
"""

from __future__ import annotations

import errno
import time
from itertools import islice

from fusefs.posix.directory.listings import Directory, Segment
from fusefs.posix.metadata.head_cache import MOST_AHEAD, HeadCache
from fusefs.posix.mount_state import MountState
from fusefs.posix.nodes import names
from fusefs.posix.nodes.handles import DirectoryHandle
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.offsets import base_of, code_of, divided
from fusefs.posix.read.entries import Entries
from fusefs.posix.types import Answer, Caller, DirectoryBuffer, waiting

# The offsets of "." and ".." in a directory stream.
DOT, DOT_DOT = 2, 3
# Among how many names behind its mark an offset's name is looked for. A page has a thousand, but
# what was made here may have been one segment that held more.
_SEARCHED = 100_000


class DirectoryStreams:
    """The open directories of one mount. Belongs to the event loop."""

    def __init__(self, state: MountState, head_cache: HeadCache) -> None:
        self._directories = state.directories
        self._inodes = state.inodes
        self._handles = state.handles
        self._head_cache = head_cache

    def open(self, inode: Inode, caller: Caller) -> tuple[DirectoryHandle, bool]:
        """Open a directory; also tell whether what the kernel has cached of it still holds."""
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
        """Add the entries behind `offset` to the buffer, as many as it holds; none at the end."""
        handle = self._handles.directory(fh)
        if not self._seek(handle, offset):
            return waiting(self._seek_and_read(handle, offset, buffer))
        handle.recent = {}
        if not self._add_dots(handle, buffer):
            return None
        directory = self._directories.get(self._inodes.key(handle.inode))
        while True:
            segment = self._directories.segment_now(
                directory, handle.position, handle.opened, self._head_cache.sample_ahead
            )
            if segment is None or self._asks(handle, buffer):
                # What is there is not held back by a request to the bucket.
                if buffer.is_empty:
                    return waiting(self._read_later(handle, directory, buffer))
                return None
            if not self._add_entries(handle, directory, segment, buffer):
                return None

    async def _seek_and_read(
        self, handle: DirectoryHandle, offset: int, buffer: DirectoryBuffer
    ) -> None:
        handle.position = await self._find(handle, offset)
        handle.offset = offset
        answer = self.read(handle.fh, offset, buffer)
        if answer is not None:
            await answer

    async def _find(self, handle: DirectoryHandle, offset: int) -> str:
        """The position of the entry with an offset.

        Where it has gone the stream goes on from the mark: rather twice than never.
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
            segment = await self._segment_behind(handle, directory, position)
            for name in islice(segment.ordered, segment.after(position), None):
                if code_of(name.encode()) == code:
                    return names.position(name)
            searched += max(1, len(segment.ordered))
            if segment.stop is None:
                break
            position = max(position, segment.stop)
        return start

    async def _read_later(
        self, handle: DirectoryHandle, directory: Directory, buffer: DirectoryBuffer
    ) -> None:
        """Wait for the next entries, and add those that come with them."""
        has_more = True
        while has_more and buffer.is_empty:
            segment = await self._segment_behind(handle, directory, handle.position)
            shown: list[Inode] = []
            if self._asks(handle, buffer) and self._is_of(directory, handle):
                await self._head_cache.sample(handle.inode, segment)
                if not buffer.takes_names and self._is_of(directory, handle):
                    shown = await self._show_next(handle, segment)
            if self._is_of(directory, handle):
                has_more = self._add_entries(handle, directory, segment, buffer)
            else:
                # It was renamed meanwhile, and what was listed has other keys now.
                directory = self._directories.get(self._inodes.key(handle.inode))
            for inode in shown:
                self._inodes.drop_unknown(inode)

    async def _segment_behind(
        self, handle: DirectoryHandle, directory: Directory, position: str
    ) -> Segment:
        return await self._directories.segment_behind(
            directory, position, handle.opened, self._head_cache.sample_ahead
        )

    def _is_of(self, directory: Directory, handle: DirectoryHandle) -> bool:
        """True if these are the listings of a directory as it is called now."""
        return self._inodes.key(handle.inode) == directory.prefix

    def _asks(self, handle: DirectoryHandle, buffer: DirectoryBuffer) -> bool:
        """True if attributes may take a HEAD before entries are added."""
        if not buffer.is_plus:
            return False
        return not buffer.takes_names or self._head_cache.wants_sample(handle.inode)

    async def _show_next(self, handle: DirectoryHandle, segment: Segment) -> list[Inode]:
        """Learn the attributes of the next entries; their inodes have them until they are dropped.

        Raises:
            StoreError: the bucket could not tell.
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
        """Go to an offset, unless the listing has to be looked through for that."""
        if offset == handle.offset:
            return True
        if not offset:
            handle.opened = time.monotonic()  # rewound: as if opened now
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
        """Add "." and ".." where the stream is at its start; False if there is no room."""
        inode = handle.inode
        parent = inode.parent if inode.parent is not None else inode
        for at, name, ino, own in ((0, b".", inode.ino, DOT), (DOT, b"..", parent.ino, DOT_DOT)):
            if handle.offset == at:
                if not buffer.add_dot(name, ino, own):
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
        """Add a segment's entries and move on to the next; False if nothing more is to be added."""
        if not handle.position:
            handle.generation = directory.generation
        base = base_of(self._inodes.mark(handle.inode, segment.start))
        entries = Entries(self._inodes, self._head_cache, handle.inode, segment, buffer)
        for name in islice(segment.ordered, segment.after(handle.position), None):
            encoded = name.encode()
            offset = base | code_of(encoded)
            has_room = entries.add(name, encoded, offset)
            if not has_room:
                return buffer.is_empty if has_room is None else False
            handle.offset, handle.position = offset, name + "/"
            handle.recent[offset] = name
        if segment.stop is None:
            if handle.generation == directory.generation:
                handle.inode.streamed_generation = directory.generation
            return False
        handle.position = max(handle.position, segment.stop)
        return True

    def close(self, fh: int) -> None:
        handle = self._handles.close_directory(fh)
        if handle is not None and not handle.inode.served:
            self._inodes.drop_unknown(handle.inode)
