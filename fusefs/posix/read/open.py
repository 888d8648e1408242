"""Opens of files: the node and version that a handle gets, and its mode: passthrough or served.

1. Does the name still stand for this node? If the last answer of the bucket has
   expired (directory/freshness.py), the bucket is asked again before cached bytes are
   used. If the name has another version, the open fails with ESTALE, upon which
   the kernel looks the name up again by itself and opens the new node. A
   program that reopens without a name (/proc/self/fd/N, a bind-mounted single
   file) can't be redirected. Such a program repeats the open without a lookup,
   which shows that it has no name (`Redirects`), and gets the old node.
2. Is the version whole in the cache? If the file is small, it is fetched first.
3. A whole file is opened for passthrough if no handle of the node is served. If an
   older handle is served, the name gets a new node (ESTALE as in 1), so that one handle
   from before the fetch does not prevent passthrough for all later handles. A file that
   is not whole is served.
"""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import NotKeptError
from fusefs.cache.readahead.next_files import NextFiles
from fusefs.cache.readahead.siblings import SMALL, Siblings
from fusefs.cache.readahead.window import Readahead
from fusefs.posix.directory.segment import Absent, Entry
from fusefs.posix.journal.journal import Journal
from fusefs.posix.mount_state import MountPart, MountState
from fusefs.posix.nodes.handles import WRITING, FileHandle
from fusefs.posix.nodes.inode_table import Inode
from fusefs.posix.types import Answer, Caller, OpenResult
from fusefs.posix.write.writer import Writer
from fusefs.store.contract import find
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectInfo, ObjectVersion

# The most opens that are remembered after an ESTALE: about as many as are under way at a time.
MOST_STALE = 4096


class Opener(MountPart):
    """The opens of one mount; `writer` is None if it is read-only. Belongs to the event loop."""

    def __init__(self, state: MountState, writer: Writer | None) -> None:
        super().__init__(state)
        self._writer = writer
        self.redirects = Redirects(state.journal)
        self._siblings = Siblings(state.downloader, state.cache, state.directories)
        self._next_files = NextFiles(state.downloader, state.cache, state.directories)

    def open(self, inode: Inode, flags: int, caller: Caller) -> Answer[OpenResult]:
        """Open a file for reading, as the module describes; EROFS for an open for writing."""
        if flags & (WRITING | os.O_TRUNC):
            raise OSError(errno.EROFS, "the mount is read-only")
        if inode.info is None:
            raise OSError(errno.EISDIR, "a directory")
        is_valid = self._is_valid(inode)
        if inode.is_current and is_valid and (not inode.served or not self._backing.is_on):
            file = self._cache.find(inode.info.version)
            if file is not None and file.is_complete:
                opened, is_first = None, file.last_use is None
                backing_id = self._backing.find(file)
                if backing_id and not file.needs_check:
                    opened = self._opened_passthrough(inode, file, backing_id, flags, caller)
                elif self._needs_no_descriptor(inode, file):
                    opened = self._opened_served(inode, file, flags, caller, keep_cache=True)
                if opened is not None:
                    if is_first:  # it may have been fetched ahead
                        self._note_opening(inode, inode.info, file)
                    return opened
        return self._open_later(inode, flags, caller, is_valid)

    def _needs_no_descriptor(self, inode: Inode, file: CacheFile) -> bool:
        """True if a whole cache file may stay closed in the daemon until the node's first READ.

        If the kernel has the file's pages, no READ may come at all. False if the node may be
        opened for passthrough, or if another mount could evict the file while it is not open.
        """
        if self._backing.is_on or inode.passthrough or self._cache.has_neighbours:
            return False
        if file.is_opening or file.needs_check or inode.has_other_pages:
            return False
        return file.is_kept and file.name not in self._cache.discarded

    def _is_valid(self, inode: Inode) -> bool:
        """True if the bucket need not be asked for the name's version before the node is opened."""
        if inode.looked_up:
            inode.looked_up = False
            return True
        if inode.valid_until <= time.monotonic() and inode.parent is not None:
            directory = self._directories.get(self._inodes.key(inode.parent))
            known = self._directories.lookup_now(directory, inode.name, is_opened=True)
            if known is None or not _is_version(known[0], inode.object.version):
                return False
            inode.valid_until = known[1]
        return inode.valid_until > time.monotonic()

    async def _open_later(
        self, inode: Inode, flags: int, caller: Caller, is_valid: bool
    ) -> OpenResult:
        if not inode.is_current:
            return await self._open_elsewhere(inode, flags, caller)
        version = inode.object.version
        file = self._cache.pin(version)
        try:
            # For a file without cached bytes S3 is not asked: the GET itself requires this version.
            if not is_valid and not (
                version.size and self._downloader.proves_versions and self._cache.is_new(file)
            ):
                await self._look_again(inode)
                if not inode.is_current or inode.object.version != version:
                    return await self._open_later(inode, flags, caller, is_valid)
            is_whole = await self._prepare(inode, inode.object, file)
            # In the kernel, a registered file stays locked after this process's death, so that no
            # mount evicts it. So incomplete files are registered as well.
            is_usable = file.fd >= 0 and file.is_kept
            backing_id = await self._backing.register(file) if is_usable else 0
            if inode.staged is not None:
                # A program has begun to write to the file meanwhile.
                assert self._writer is not None
                return self._writer.open_staged(inode, flags, caller)
            if not inode.is_current:
                return await self._open_elsewhere(inode, flags, caller)
            if self._cache.find(inode.object.version) is not file:
                # The file was written and uploaded meanwhile, or its cache file was dropped.
                return await self._open_later(inode, flags, caller, is_valid)
            if is_whole and backing_id:
                if not inode.served:
                    return self._opened_passthrough(inode, file, backing_id, flags, caller)
                is_written = self._writer is not None and self._writer.is_preparing(inode)
                if not is_written and not self.redirects.is_redirected(inode, caller.program):
                    self._inodes.mark_replaced(inode)
                    return await self._open_elsewhere(inode, flags, caller)
            keep_cache = inode.keeps_pages() and file.name not in self._cache.discarded
            return self._opened_served(inode, file, flags, caller, keep_cache=keep_cache)
        finally:
            self._cache.unpin(file)

    async def _ask_again(self, inode: Inode) -> None:
        """Send a HEAD; mark a node as replaced if the bucket no longer has its version."""
        asked = inode.object.version
        info = await find(self._store, asked.key)
        if inode.object.version != asked:
            return  # this mount has changed the file meanwhile: the answer is older
        if info is None or info.version != asked:
            self._state.mark_stale(inode, info)

    async def _look_again(self, inode: Inode) -> None:
        """Send a LIST; mark a node as replaced if the bucket no longer has its version.

        The LIST page also has the versions of the file's neighbours.
        """
        asked, parent = inode.object.version, inode.parent
        if parent is None or inode.is_removed:
            return
        directory = self._directories.get(self._inodes.key(parent))
        found, until = await self._directories.lookup(directory, inode.name, is_opened=True)
        if inode.object.version != asked or inode.parent is not parent or not inode.is_current:
            return  # this mount has changed the file meanwhile: the answer is older
        if _is_version(found, asked):
            inode.valid_until = until
        elif inode.staged is None:
            self._inodes.mark_replaced(inode)

    async def _open_elsewhere(self, inode: Inode, flags: int, caller: Caller) -> OpenResult:
        """Redirect a program to its name's new node; a program redirected before gets the old node.

        The latter has no name to look up. Its handle reads the node's old version if the cache has
        all of it. Else, if no other handle has the node open, it reads the version that the bucket
        has now.

        Raises:
            OSError: ESTALE, upon which the kernel looks the name up again.
        """
        self.redirect(inode, caller)
        file = self._cache.pin(inode.object.version)
        try:
            if file.is_complete and await self._cache.ensure_open(file) and file.is_complete:
                return await self._opened_either_way(inode, file, flags, caller, keep_cache=True)
        finally:
            self._cache.unpin(file)
        info = await find(self._store, inode.object.key)
        if inode.is_open or info is None:
            raise OSError(errno.ESTALE, "the object has been replaced while it was open")
        is_new = info.version != inode.object.version
        if is_new:
            self._inodes.replace_version(inode, info)
            self._state.notifier.invalidate_attributes(inode.nodeid)
        file = self._cache.pin(info.version)
        try:
            await self._prepare(inode, info, file)
            return await self._opened_either_way(inode, file, flags, caller, keep_cache=not is_new)
        finally:
            self._cache.unpin(file)

    def redirect(self, inode: Inode, caller: Caller) -> None:
        """Redirect a program to its name's new node; return if the program was redirected before.

        Raises:
            OSError: ESTALE, upon which the kernel looks the name up again.
        """
        if not self.redirects.is_redirected(inode, caller.program):
            self.redirects.add(inode, caller.program)
            raise OSError(errno.ESTALE, "the name stands for something else now")

    async def _prepare(self, inode: Inode, info: ObjectInfo, file: CacheFile) -> bool:
        """Fetch a version's first bytes into its file, or all bytes if the file is small.

        Returns True if the file is whole. If the bucket has another version by now, the node is
        marked as replaced.
        """
        if not info.size:
            return False
        if not self._cache.is_new(file) and not await self._cache.ensure_open(file):
            await self._ask_again(inode)
            return False
        self._note_opening(inode, info, file)
        if file.is_complete:
            return True
        # The first bytes of a large file also show that the version is the current one.
        needed = info.size if info.size <= SMALL else 1
        is_proof = self._downloader.proves_versions and not file.present.covers(0, needed)
        if needed == 1 and not is_proof:
            await self._ask_again(inode)
            return False
        try:
            await self._downloader.wait_for(file, 0, needed)
        except NotKeptError:
            await self._ask_again(inode)
        except (StaleVersionError, NotFoundError):
            if inode.info is not None and inode.info.version == info.version:
                self._state.mark_stale(inode)  # the object was replaced since it was listed
        return file.is_complete

    async def _opened_either_way(
        self, inode: Inode, file: CacheFile, flags: int, caller: Caller, *, keep_cache: bool
    ) -> OpenResult:
        """Open a node in the mode of its open handles; without any, for passthrough if possible."""
        if file.is_complete and file.size and not inode.served:
            backing_id = await self._backing.register(file)
            if inode.kernel_file not in (None, file):
                # The kernel refuses to read two files for one node.
                raise OSError(errno.ESTALE, "the cached copy that is open was dropped")
            if backing_id and not inode.served:
                return self._opened_passthrough(inode, file, backing_id, flags, caller)
        return self._opened_served(inode, file, flags, caller, keep_cache=keep_cache)

    def _opened_passthrough(
        self, inode: Inode, file: CacheFile, backing_id: int, flags: int, caller: Caller
    ) -> OpenResult:
        self._note_passthrough(file)
        version = file.version or inode.object.version  # a rename may have changed its key
        handle = self._handles.open_file(inode, version, file, backing_id, flags, caller.unique)
        return OpenResult(handle.fh, True, backing_id)

    def _note_passthrough(self, file: CacheFile) -> None:
        self._cache.pin_again(file)
        self._cache.opened(file)
        self._counters.passthrough(file.size, file.first_read(0, file.size))

    def was_opened(
        self,
        inode: Inode,
        file: CacheFile,
        fh: int,
        backing_id: int,
        flags: int,
        unique: int,
        *,
        is_closed: bool,
    ) -> None:
        """Note a passthrough open that fuse/fast_path.py answered; add its handle unless closed."""
        self._backing.find(file)  # marks the backing file as used
        is_first = file.last_use is None
        self._note_passthrough(file)
        if is_first:
            self._note_opening(inode, inode.object, file)
        if is_closed:
            self._cache.unpin(file)
        else:
            version = file.version or inode.object.version
            self._handles.add_file(FileHandle(fh, inode, version, file, backing_id, flags, unique))

    def _opened_served(
        self, inode: Inode, file: CacheFile, flags: int, caller: Caller, *, keep_cache: bool
    ) -> OpenResult:
        if inode.passthrough:
            # The node has passthrough handles: the kernel would answer another mode with EIO.
            backing_id = self._backing.find(file)
            if not backing_id:
                raise OSError(errno.ESTALE, "the node is open for passthrough")
            return self._opened_passthrough(inode, file, backing_id, flags, caller)
        self._cache.pin_again(file)
        self._cache.opened(file)
        self._counters.served_opens += 1
        handle = self._handles.open_file(inode, inode.object.version, file, 0, flags, caller.unique)
        if file.is_complete:
            # The kernel may have the file's pages, so the open counts as a read of the whole file.
            handle.fetched = file.first_read(0, file.size)
            self._counters.read(file.size, handle.fetched)
        else:

            def go_on(size: int) -> None:
                if inode.parent is not None and inode.info is not None:
                    self._next_files.go_on(self._inodes.key(inode.parent), inode.info, size)

            handle.readahead = Readahead(self._downloader, file, go_on)
        return OpenResult(handle.fh, keep_cache=keep_cache)

    def _note_opening(self, inode: Inode, info: ObjectInfo, file: CacheFile) -> None:
        """Note a file's open, upon which its neighbours may be fetched; ignore files of a plan.

        The file is pinned, so that the files fetched next can't evict it.
        """
        if inode.parent is None or self._cache.order.is_planned(file):
            return
        prefix = self._inodes.key(inode.parent)
        if info.size <= SMALL:
            self._siblings.opened(prefix, info, was_there=file.is_complete)
        else:
            self._next_files.opened(prefix, info.key, was_there=file.present.total > 0)


def _is_version(entry: Entry | Absent, version: ObjectVersion) -> bool:
    return isinstance(entry, ObjectInfo) and entry.version == version


class Redirects:
    """The opens that got ESTALE, until the process looks the name up again."""

    def __init__(self, log: Journal) -> None:
        self._log = log
        # The id of the node that the open was for, by (directory's id, name, process).
        self._pending: OrderedDict[tuple[int, str, int], int] = OrderedDict()

    def is_redirected(self, inode: Inode, program: int) -> bool:
        return _opener(inode, program) in self._pending

    def add(self, inode: Inode, program: int) -> None:
        """Record that a process got ESTALE, so that it should look the inode's name up again."""
        self.recall(inode, program)
        self._log.stale(inode.nodeid, program, is_pending=True)
        while len(self._pending) > MOST_STALE:
            self._pending.popitem(last=False)

    def recall(self, inode: Inode, program: int) -> None:
        """Restore the entry of an open that this mount's earlier process answered by ESTALE."""
        self._pending[_opener(inode, program)] = inode.nodeid

    def write_all(self, log: Journal) -> None:
        """Write all entries to a new journal."""
        for (_, _, program), nodeid in self._pending.items():
            log.stale(nodeid, program, is_pending=True)

    def looked_up(self, parent_id: int, name: str, program: int) -> bool:
        """Note a process's lookup of a name; return True if the process had got ESTALE for it."""
        nodeid = self._pending.pop((parent_id, name, program), None) if self._pending else None
        if nodeid is not None:
            self._log.stale(nodeid, program, is_pending=False)
        return nodeid is not None


def _opener(inode: Inode, program: int) -> tuple[int, str, int]:
    return (inode.parent.nodeid if inode.parent is not None else 0, inode.name, program)
