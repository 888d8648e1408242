"""Open files and open directories: what the kernel's file handles stand for.

A file handle reads one version of one object until it is closed. It is either
*served*, with reads answered here from the cache file, or *passthrough*, with
reads that never come here. A directory handle is a position in a listing.

Opening and closing is written to the journal before the reply, as with node
ids (see inode_table.py). The table belongs to the event loop.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.readahead.window import Readahead
from fusefs.posix.nodes.inode_table import Inode, NodeLog
from fusefs.store.interface import ObjectVersion

SERVED, PASSTHROUGH, DIRECTORY = range(3)  # the modes of an open handle, as they are on record


@dataclass(slots=True, eq=False)
class FileHandle:
    """An open file; `unique` is the request that opened it.

    `unkept` is what was last read past the cache: (offset, bytes). `fetched` is how many of
    its bytes were fetched for its open, and not read through it yet.
    """

    fh: int
    inode: Inode
    version: ObjectVersion
    file: CacheFile
    backing_id: int
    flags: int
    unique: int
    readahead: Readahead | None = None
    unkept: tuple[int, bytearray] = field(default_factory=lambda: (0, bytearray()))
    fetched: int = 0


@dataclass(slots=True, eq=False)
class DirectoryHandle:
    """An open directory: `position` is that of the entry with the offset `offset`.

    `opened` is in seconds of the monotonic clock: listings that were valid
    then are valid for this handle. `recent` are the names of the last reply by their
    offsets, of which the kernel may have passed on only the first.
    """

    fh: int
    inode: Inode
    generation: int
    unique: int
    offset: int = 0
    position: str = ""
    recent: dict[int, str] = field(default_factory=dict)
    opened: float = field(default_factory=time.monotonic)


class HandleTable:
    """All open handles by number; numbers are never used twice."""

    def __init__(self, log: NodeLog) -> None:
        self._log = log
        # No handle number from here on has been used.
        self.next_fh = 1
        # Handles of an earlier process by the request that opened them.
        self.restored: dict[int, int] = {}
        self.files: dict[int, FileHandle] = {}
        self.directories: dict[int, DirectoryHandle] = {}

    def adopt_file(self, handle: FileHandle) -> None:
        """Take up a handle that an earlier process opened."""
        self.add_file(handle)
        self.restored[handle.unique] = handle.fh

    def adopt_directory(self, handle: DirectoryHandle) -> None:
        """Take up an open directory; the next read says by its offset where the stream stands."""
        handle.offset = -1
        self.directories[handle.fh] = handle
        handle.inode.served += 1
        self.restored[handle.unique] = handle.fh

    def opened_by(self, unique: int) -> int:
        """The handle by which an earlier process answered this request, unheard; else 0."""
        return self.restored.pop(unique, 0) if self.restored else 0

    def open_file(
        self,
        inode: Inode,
        version: ObjectVersion,
        file: CacheFile,
        backing_id: int,
        flags: int,
        unique: int,
    ) -> FileHandle:
        """Add a handle; a backing id of 0 means that it is served."""
        handle = FileHandle(self.next_fh, inode, version, file, backing_id, flags, unique)
        self.next_fh += 1
        self.add_file(handle)
        self.log_file(handle)
        return handle

    def add_file(self, handle: FileHandle) -> None:
        """Add a handle that is on record already."""
        self.files[handle.fh] = handle
        if handle.backing_id:
            handle.inode.passthrough += 1
        else:
            handle.inode.served += 1

    def log_file(self, handle: FileHandle) -> None:
        mode = PASSTHROUGH if handle.backing_id else SERVED
        self._log.opened(
            handle.unique, handle.fh, handle.inode.nodeid, handle.flags, mode, handle.backing_id
        )

    def close_file(self, fh: int, *, is_logged: bool = False) -> FileHandle | None:
        """Remove a handle; None if it is not known (a RELEASE may come twice)."""
        handle = self.files.pop(fh, None)
        if handle is not None:
            if handle.backing_id:
                handle.inode.passthrough -= 1
            else:
                handle.inode.served -= 1
            if not is_logged:
                self._log.closed(fh)
        return handle

    def of_file(self, file: CacheFile) -> Iterator[FileHandle]:
        return (handle for handle in self.files.values() if handle.file is file)

    def former(self, parent: Inode, name: str) -> set[Inode]:
        """The nodes that are open, and that a name stood for before it had another one."""
        return {
            handle.inode
            for handle in self.files.values()
            if not handle.inode.is_current
            and (handle.inode.parent, handle.inode.name) == (parent, name)
        }

    def open_directory(self, inode: Inode, generation: int, unique: int) -> DirectoryHandle:
        handle = DirectoryHandle(self.next_fh, inode, generation, unique)
        self.next_fh += 1
        self.directories[handle.fh] = handle
        inode.served += 1
        self.log_directory(handle)
        return handle

    def log_directory(self, handle: DirectoryHandle) -> None:
        self._log.opened(handle.unique, handle.fh, handle.inode.nodeid, 0, DIRECTORY, 0)

    def close_directory(self, fh: int) -> DirectoryHandle | None:
        handle = self.directories.pop(fh, None)
        if handle is not None:
            handle.inode.served -= 1
            self._log.closed(fh)
        return handle

    def directory(self, fh: int) -> DirectoryHandle:
        """Return an open directory; EBADF if there is no such handle."""
        try:
            return self.directories[fh]
        except KeyError:
            raise OSError(errno.EBADF, f"unknown directory handle {fh}") from None
