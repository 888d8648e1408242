"""Open files and open directories, by the kernel's file handles.

A file handle reads one version of one object until it is closed. The daemon answers reads of a
*served* handle from the cache file; the kernel answers reads of a *passthrough* handle
by itself. A directory handle is a position in a listing.

Each open and close is written to the journal before the reply, like node
ids (see inode_table.py). The table belongs to the event loop.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field
from typing import ClassVar

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.readahead.window import Readahead
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.inode_table import Inode
from fusefs.store.interface import ObjectVersion

WRITING = os.O_WRONLY | os.O_RDWR
SERVED, PASSTHROUGH, DIRECTORY = range(3)  # the modes of an open handle, as in the journal


@dataclass(slots=True, eq=False)
class FileHandle:
    """An open file; `unique` is the id of the request that opened it.

    `fetched` is the number of bytes that were fetched for the open and not read through the
    handle yet.
    """

    fh: int
    inode: Inode
    version: ObjectVersion
    file: CacheFile
    backing_id: int
    flags: int
    unique: int
    readahead: Readahead | None = None
    fetched: int = 0

    @property
    def mode(self) -> int:
        return PASSTHROUGH if self.backing_id else SERVED


@dataclass(slots=True, eq=False)
class DirectoryHandle:
    """An open directory. The stream continues behind the entry at `offset` and `position`.

    Listings that were valid at `opened` (monotonic seconds) are valid for this handle. `recent`
    maps offsets to the names of the last reply, of which the kernel may have passed only the
    first ones to the program.
    """

    flags: ClassVar[int] = 0
    mode: ClassVar[int] = DIRECTORY
    backing_id: ClassVar[int] = 0
    fh: int
    inode: Inode
    generation: int
    unique: int
    offset: int = 0
    position: str = ""
    recent: dict[int, str] = field(default_factory=dict)
    opened: float = field(default_factory=time.monotonic)


class HandleTable:
    """All open handles by number. No number is used twice."""

    def __init__(self, log: Journal) -> None:
        self._log = log
        # No handle number from here on has been used.
        self.next_fh = 1
        # Handles of an earlier process by the request that opened them.
        self.restored: dict[int, int] = {}
        self.files: dict[int, FileHandle] = {}
        self.directories: dict[int, DirectoryHandle] = {}

    def adopt_file(self, handle: FileHandle) -> None:
        """Add a handle that an earlier process opened."""
        self.add_file(handle)
        self.restored[handle.unique] = handle.fh

    def adopt_directory(self, handle: DirectoryHandle) -> None:
        """Add a directory that an earlier process opened; the next READDIR tells the position."""
        handle.offset = -1
        self.directories[handle.fh] = handle
        handle.inode.served += 1
        self.restored[handle.unique] = handle.fh

    def opened_by(self, unique: int) -> int:
        """The number of the handle that an earlier process opened for this request, or 0."""
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
        """Add a new handle and log it; with a backing id of 0 the handle is served."""
        handle = FileHandle(self.next_fh, inode, version, file, backing_id, flags, unique)
        self.next_fh += 1
        self.add_file(handle)
        self.log(handle)
        return handle

    def add_file(self, handle: FileHandle) -> None:
        """Add a handle that is in the journal already."""
        self.files[handle.fh] = handle
        _count(handle, 1)

    def log(self, handle: FileHandle | DirectoryHandle) -> None:
        opened = handle.unique, handle.fh, handle.inode.nodeid
        self._log.opened(*opened, handle.flags, handle.mode, handle.backing_id)

    def close_file(self, fh: int, *, is_logged: bool = False) -> FileHandle | None:
        """Remove and return a handle; None if there is none, as a RELEASE may come twice."""
        handle = self.files.pop(fh, None)
        if handle is not None:
            _count(handle, -1)
            if not is_logged:
                self._log.closed(fh)
        return handle

    def open_directory(self, inode: Inode, generation: int, unique: int) -> DirectoryHandle:
        handle = DirectoryHandle(self.next_fh, inode, generation, unique)
        self.next_fh += 1
        self.directories[handle.fh] = handle
        inode.served += 1
        self.log(handle)
        return handle

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


def _count(handle: FileHandle, change: int) -> None:
    """Count a handle that is opened (1) or closed (-1) at its node and its cache file."""
    inode, file = handle.inode, handle.file
    file.handles += change
    if handle.flags & WRITING:
        inode.writing += change
    if handle.backing_id:
        inode.passthrough += change
        inode.kernel_file = file if inode.passthrough else None
    else:
        inode.served += change
        file.served += change
