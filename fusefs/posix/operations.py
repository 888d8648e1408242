"""The file system: one method per request, in the order in which programs make them.

A method returns its answer, or a coroutine if it has to wait; the session (fuse/session.py,
fuse/pyfuse3_session.py) tells the two apart and packs the answers. A request that memory or the
page cache can answer is answered at once, so most requests cost no task and no switch. An error is
an OSError or a StoreError, whose errno is the answer. posix/read/open.py decides opens,
posix/read/read.py answers reads, and posix/read/readdir.py reads directories.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from contextlib import nullcontext, suppress
from dataclasses import replace

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.directory.listings import Absent, Directory, Entry
from fusefs.posix.directory.segment import ABSENT, UNCOVERED
from fusefs.posix.journal.journal import Journal
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.metadata.xattrs import Xattrs
from fusefs.posix.mount_state import MountState
from fusefs.posix.namespace.mutations import Mutations
from fusefs.posix.namespace.rename import NameChanges
from fusefs.posix.nodes import names, object_metadata
from fusefs.posix.nodes.handles import DirectoryHandle
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.nodes.object_metadata import LONGEST_TARGET
from fusefs.posix.nodes.prefix_lock import PrefixLock
from fusefs.posix.read.open import Opener
from fusefs.posix.read.read import Reader
from fusefs.posix.read.readdir import DirectoryStreams
from fusefs.posix.types import (
    Answer,
    Caller,
    DirectoryBuffer,
    InFile,
    LookupResult,
    OpenResult,
    answered,
)
from fusefs.posix.write.removals import Removals, StoreAfterRemovals
from fusefs.posix.write.rules import Writing
from fusefs.posix.write.writer import Writer
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectInfo

# With a smaller metadata TTL, rewinddir lists the directory again.
CACHED_DIRECTORY_TTL_S = 10.0


class Operations:
    """The file system of one mount, for the event loop; `writing` is None if it is read-only."""

    def __init__(self, state: MountState, writing: Writing | None = None) -> None:
        self._state = state
        self._directories = state.directories
        self.cache = state.cache
        self.downloader = state.downloader
        self.owner = state.owner
        self.mounted_ns = state.mounted_ns
        self.inodes = state.inodes
        self.handles = state.handles
        self.backing = state.backing
        self.counters = state.counters
        self.notifier = state.notifier
        self.attributes = state.attributes
        # True while names and bytes are refused, as S3 refuses them (daemon/access_guard.py).
        self.is_shut = False
        after_removals, writer = state, None
        if writing is not None:
            removals = Removals(
                state.store, state.directories, writing.staging.directory, writing.nursery
            )
            after_removals = replace(state, store=StoreAfterRemovals(state.store, removals))
            prefix_lock = PrefixLock(state.inodes.key)
            writer = Writer(after_removals, writing, removals, prefix_lock)
        self.writer = writer
        self.head_cache = HeadCache(
            state.store,
            state.directories,
            state.inodes,
            state.owner,
            state.directories.nursery,
            deferred=writer.deferred.get if writer is not None else None,
            notifier=state.notifier,
        )
        self._streams = DirectoryStreams(state, self.head_cache)
        self._xattrs = Xattrs(state.store, state.inodes, self.head_cache, state.endpoint)
        self.opener = Opener(state, writer)
        self._reader = Reader(state, writer.editor if writer is not None else None)
        self.read_again = self._reader.read_again
        # None on a read-only mount.
        self.mutations: Mutations | None = None
        if writing is not None and writer is not None:
            changes = NameChanges(after_removals, writing, writer, prefix_lock)
            self.mutations = Mutations(
                after_removals, writing.nursery, writer, changes, self.head_cache, self.release
            )

    def show_repaired(self, key: str, made: ObjectInfo | None) -> None:
        """Show that a repair (late/repair.py) put `made` at a key, or (None) removed the key."""
        prefix, name = names.split_entry(key)
        if not key.startswith(self.inodes.prefix) or not name:
            return
        if self._directories.pending_changes.get(prefix, name) is not None:
            return  # this mount has a newer change of the name
        entry: Entry | Absent = made or ABSENT
        if key.endswith("/"):
            entry = UNCOVERED if made is None else None
        self._directories.changed(prefix, name, entry)
        inode = self.inodes.at(key)
        if inode is not None and inode.staged is None and made is not None:
            deferred = self.writer.deferred.get(made) if self.writer is not None else None
            inode.meta = deferred or object_metadata.read(
                made.metadata or {}, inode.default_meta(self.owner)
            )
            inode.packed = None

    # Names

    def lookup(self, parent_id: int, name: bytes, caller: Caller) -> Answer[LookupResult]:
        """Look up a name; the result's inode is None if the name does not exist."""
        self._refuse_if_shut()
        parent = self.inodes.directory(parent_id)
        text = names.decode(name)
        if len(name) > names.NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "a name has 255 bytes at most")
        prefix = self.inodes.key(parent)
        if text is None or not names.is_expressible(text) or names.is_private(prefix, text):
            return LookupResult(None, 0.0)
        was_sent = self.opener.redirects.looked_up(parent_id, text, caller.program)
        directory = self._directories.get(prefix)
        known = self._directories.lookup_now(directory, text)
        if known is None:
            return self._lookup_later(parent, text, was_sent=was_sent)
        entry, expires = known
        if isinstance(entry, Absent):
            return _missing(directory, expires)
        inode = self.inodes.resolve(parent, text, entry)
        has_attributes = not self.head_cache.needs_head(inode)
        is_known = has_attributes or self._is_leaving(parent, entry)
        if not is_known or not inode.is_current:
            return self._lookup_later(parent, text, was_sent=was_sent)
        # An open that got ESTALE, after which the kernel looks the name up, has asked the bucket.
        now = time.monotonic()
        self.inodes.count(inode, expires, was_asked=was_sent or expires > now)
        return LookupResult(inode, max(0.0, expires - now), has_attributes)

    def _is_leaving(self, parent: Inode, entry: Entry) -> bool:
        """True if a file is probably looked up to be removed, which needs no attributes.

        This holds if a program is removing many files of the directory, the file is too large
        for a symbolic link, and the directory has no sticky bit, so the owner does not matter.
        """
        if self.writer is None or entry is None or entry.size <= LONGEST_TARGET:
            return False
        is_removing = self.writer.removals.is_removing_from(self.inodes.key(parent))
        return is_removing and not self.attributes(parent).mode & stat.S_ISVTX

    async def _lookup_later(self, parent: Inode, name: str, *, was_sent: bool) -> LookupResult:
        began = time.monotonic()
        while True:
            directory = self._directories.get(self.inodes.key(parent))
            entry, expires = await self._directories.lookup(directory, name)
            if self.inodes.key(parent) != directory.prefix:
                continue  # the directory was renamed meanwhile: the listed files have other keys
            if isinstance(entry, Absent):
                return _missing(directory, expires)
            inode = self.inodes.resolve(parent, name, entry)
            try:
                await self.head_cache.show(inode)
            except BaseException:
                self.inodes.drop_unknown(inode)
                raise
            # Else the inode was a link shown as a file, another version, or renamed.
            if parent.child(name) is inode and self.inodes.key(parent) == directory.prefix:
                break
        self.inodes.count(inode, expires, was_asked=was_sent or expires >= began)
        return LookupResult(inode, max(0.0, expires - time.monotonic()))

    def getattr(self, nodeid: int) -> Answer[Inode]:
        """Return the inode of a node, whose attributes are known then."""
        inode = self.inodes.get(nodeid)
        is_doubted = self.head_cache.is_doubted(inode)
        if is_doubted or self.head_cache.needs_head(inode):
            return self._getattr_later(inode, is_doubted=is_doubted)
        return inode

    async def _getattr_later(self, inode: Inode, *, is_doubted: bool) -> Inode:
        # An open file that another client has removed still has attributes for fstat.
        with suppress(NotFoundError) if inode.is_open else nullcontext():
            await (self.head_cache.learn if is_doubted else self.head_cache.show)(inode)
        return self.inodes.get(inode.nodeid)

    # Files

    def open(self, nodeid: int, flags: int, caller: Caller) -> Answer[OpenResult]:
        """Open a file; EROFS for an open for writing on a read-only mount."""
        self._refuse_if_shut()
        inode = self.inodes.get(nodeid)
        may_write = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC))
        if known := self.handles.opened_by(caller.unique):
            # An earlier process had logged this open, but not answered it.
            inode.looked_up, backing_id = False, self.handles.files[known].backing_id
            is_direct = may_write and bool(backing_id)
            return OpenResult(known, False, backing_id, may_write, is_direct=is_direct)
        if self.writer is not None and (may_write or inode.staged is not None):
            if not inode.is_current:
                self.opener.redirect(inode, caller)
            if self.head_cache.lacks(inode):
                return self._open_learned(self.writer, inode, flags, caller)
            if not self.writer.sharing.is_ready(inode):
                return self._open_registered(self.writer, inode, flags, caller)
            return self.writer.open(inode, flags, caller)
        return self.opener.open(inode, flags, caller)

    async def _open_learned(
        self, writer: Writer, inode: Inode, flags: int, caller: Caller
    ) -> OpenResult:
        """Open a file for writing once its attributes are known: each upload sends them too."""
        was_current = inode.is_current
        await self.head_cache.learn(inode)
        if was_current and not inode.is_current:
            self.opener.redirect(inode, caller)
        return await answered(writer.open(inode, flags, caller))

    async def _open_registered(
        self, writer: Writer, inode: Inode, flags: int, caller: Caller
    ) -> OpenResult:
        """Open a staged file for passthrough, once the kernel has its backing file registered."""
        staged = inode.staged
        if not await writer.sharing.register(inode) and inode.staged is staged:
            return await answered(writer.open(inode, flags, caller))
        return await answered(self.open(inode.nodeid, flags, caller))

    def read(
        self, fh: int, offset: int, size: int, *, in_file: bool = False
    ) -> Answer[memoryview | bytes | bytearray | InFile]:
        """Read the bytes [offset, offset + size) of a served handle, fewer at the file's end.

        The answer's memory is reused by the next read. With `in_file` a large answer may be an
        `InFile`; if the page cache lacks its bytes, the session calls `read_again`.
        """
        self._refuse_if_shut()
        return self._reader.read(fh, offset, size, in_file=in_file)

    def release(self, fh: int, *, is_logged: bool = False) -> None:
        """Close a handle; an unknown handle is ignored. `is_logged`: the journal has the close."""
        handle = self.handles.close_file(fh, is_logged=is_logged)
        if handle is None:
            return
        if handle.readahead is not None:
            handle.readahead.close()
        self.downloader.unkept.drop(handle)
        self.cache.unpin(handle.file)
        if self.writer is not None:
            self.writer.flusher.released(handle.inode)

    def discarded(self, file: CacheFile) -> None:
        """Give new nodes to the names whose cache file was dropped; open handles keep old nodes.

        The kernel may have cached wrong bytes for the node, and reads only one file per node.
        """
        for handle in self.handles.files.values():
            inode = handle.inode
            if handle.file is file and inode.is_current and inode.staged is None:
                self.inodes.mark_replaced(inode)

    # Directories

    def may_cache(self, directory: Inode) -> bool:
        """True if the kernel may cache a directory's listing, and show that after rewinddir."""
        return self._directories.get(self.inodes.key(directory)).most_s >= CACHED_DIRECTORY_TTL_S

    def opendir(self, nodeid: int, caller: Caller) -> tuple[DirectoryHandle, bool]:
        """Open a directory; return its handle, and True if the kernel's cached listing is valid."""
        self._refuse_if_shut()
        return self._streams.open(self.inodes.directory(nodeid), caller)

    def readdir(self, fh: int, offset: int, buffer: DirectoryBuffer) -> Answer[None]:
        """Add the entries behind `offset` to the buffer, as many as fit; none at the end."""
        self._refuse_if_shut()
        return self._streams.read(fh, offset, buffer)

    def releasedir(self, fh: int) -> None:
        self._streams.close(fh)

    # Symbolic links and extended attributes

    async def readlink(self, nodeid: int) -> bytes:
        """Read the target of a symbolic link; EINVAL if the inode is no symbolic link."""
        inode = self.inodes.get(nodeid)
        await self.head_cache.learn(inode)
        if inode.info is None or not self.head_cache.meta(inode).is_symlink:
            raise OSError(errno.EINVAL, "not a symbolic link")
        info = inode.info
        if info.size > LONGEST_TARGET:
            raise OSError(errno.ENAMETOOLONG, f"the target of a link of {info.size} bytes")
        try:
            return bytes(await self.downloader.read_unkept(info.version, 0, info.size))
        except (NotFoundError, StaleVersionError):
            # The kernel looks the name up again, and follows the link that is there now.
            self._state.mark_stale(inode)
            raise OSError(errno.ESTALE, "the link has been replaced") from None

    def getxattr(self, nodeid: int, name: str) -> Answer[bytes]:
        self._refuse_if_shut()
        return self._xattrs.get(self.inodes.get(nodeid), name)

    def listxattr(self, nodeid: int) -> Answer[tuple[str, ...]]:
        return self._xattrs.names(self.inodes.get(nodeid))

    # Helpers

    async def write_all(self, log: Journal) -> None:
        """Write all inodes and handles to a new journal, a few at a time, as compaction needs."""
        self.log_table(log)
        for index, inode in enumerate(self.inodes.all()):
            is_known = self.inodes.find(inode.nodeid) is inode
            if is_known and (inode.parent is not None or inode.entries_changed_ns):
                inode.log_to(log)
                if inode.is_removed:
                    log.removed(inode.nodeid)
                elif not inode.is_current:
                    log.replaced(inode.nodeid)
            for position, number in (inode.marks or {}).items() if is_known else ():
                log.mark(inode.nodeid, number, position)
            if index % 200 == 0:
                await trio.lowlevel.checkpoint()
                if not log.is_compacting:
                    return
        for index, (place, number) in enumerate(self.inodes.numbers.records()):
            log.number(place, number)
            if index % 1000 == 0:
                await trio.lowlevel.checkpoint()
        for handle in self.handles.files.values():
            self.handles.log(handle)
        for directory in self.handles.directories.values():
            self.handles.log(directory)
        self.opener.redirects.write_all(log)
        if self.mutations is not None:
            self.mutations.changes.write_all(log)

    def log_table(self, log: Journal) -> None:
        """Log the next unused node id and handle number, and the time of the mount."""
        log.table(self.inodes.next_id, self.handles.next_fh, self.mounted_ns)

    def _refuse_if_shut(self) -> None:
        if self.is_shut:
            raise OSError(errno.EACCES, "S3 refuses everything")


def _missing(directory: Directory, expires: float) -> LookupResult:
    """The answer for a missing name; the kernel may cache the answer only if it never expires."""
    is_lasting = math.isinf(directory.most_s) and math.isinf(expires)
    return LookupResult(None, math.inf if is_lasting else 0.0)
