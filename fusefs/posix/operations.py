"""The file system: one method per request, in the order in which programs make them.

A method answers at once, or returns a coroutine when it has to wait; the
session (kernel/session.py, kernel/pyfuse.py) tells the two apart and packs the
answers. What is in memory or in the page cache is answered at once, so most
requests cost no task and no switch. Errors are OSErrors whose errno is the
answer.

How an open is decided (`open`):

1. Is the node id still what its name stands for? If not: ESTALE, upon which
   the kernel looks the name up again by itself and opens the new node. A
   program that reopens without a name (/proc/self/fd/N, a bind-mounted single
   file) can't be sent anywhere else; it is recognised by its asking twice,
   and gets what the old node can still give (`_open_anyway`).
2. Is the version whole in the cache? A small one is fetched first.
3. Whole, and no handle of the node is served: passthrough. Whole, but an
   older handle of the node is served: the name gets a new node (ESTALE as in
   1), so that a handle from before the fetch keeps nobody else from
   passthrough. Not whole: served.

The object belongs to the event loop.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import trio

from fusefs.cache.fetch import BLOCK, Fetcher, NotKeptError
from fusefs.cache.files import CacheFile, FileCache
from fusefs.cache.prefetch import SMALL, Siblings, Window
from fusefs.posix import names
from fusefs.posix.directories import Absent, Directories, Directory, Entry, Segment
from fusefs.posix.handles import DirectoryHandle, FileHandle, HandleTable
from fusefs.posix.inodes import Attributes, Inode, InodeTable, Ownership
from fusefs.posix.journal import NodeLog
from fusefs.store.base import ObjectInfo, Store
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError

logger = logging.getLogger("fusefs.operations")

Result = TypeVar("Result")
# An answer, or the coroutine that waits for it.
Answer: TypeAlias = Result | Coroutine[Any, Any, Result]

# The offsets of "." and ".." in a directory stream; all others are node ids.
DOT, DOT_DOT = 2, 3
# Read past the cache by this much at a time: what a reader without a cache may
# keep in memory for the next read.
UNKEPT = 2 << 20
# One request is answered from a buffer of this size (max_pages of 4 KiB).
MAX_READ = 1 << 20
# Who asks for listings younger than this also wants rewinddir to ask again.
CACHED_DIRECTORY_TTL_S = 10.0
# Openers who were told ESTALE; more are not needed than opens are under way.
MOST_STALE = 4096

XATTRS = ("user.s3.key", "user.s3.etag", "user.s3.storage_class", "user.s3.content_type")
XATTR_VERSION = "user.s3.version_id"

_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(slots=True)
class Caller:
    """Who asks: the request's id, and the process as the mount's namespace sees it."""

    unique: int
    uid: int
    gid: int
    pid: int


@dataclass(slots=True)
class Found:
    """A name's inode (None: there is none) and for how many seconds to believe it."""

    inode: Inode | None
    valid_s: float


@dataclass(slots=True)
class Opened:
    """An open handle. `backing_id` is not 0 for passthrough."""

    fh: int
    keep_cache: bool
    backing_id: int = 0


class BackingFiles(Protocol):
    """What the kernel reads by itself; see kernel/passthrough.py."""

    @property
    def is_on(self) -> bool: ...

    def find(self, file: CacheFile) -> int:
        """The id under which a file is registered, or 0."""

    async def register(self, file: CacheFile) -> int:
        """Register a pinned file whose descriptor is open; 0 if the kernel refuses."""


class DirectoryBuffer(Protocol):
    """Where a session collects the entries of one reply."""

    @property
    def is_plus(self) -> bool:
        """Whether an entry also hands out a reference to its inode."""

    @property
    def is_empty(self) -> bool: ...

    def add_dot(self, name: bytes, ino: int, offset: int) -> bool:
        """Add "." or ".."; False if there is no room."""

    def add(self, name: bytes, inode: Inode, valid_s: float) -> bool:
        """Add an entry whose offset is its node id; False if there is no room."""


class Operations:
    """The read side of a mounted prefix; see the module's text."""

    def __init__(
        self,
        store: Store,
        directories: Directories,
        cache: FileCache,
        fetcher: Fetcher,
        backing: BackingFiles,
        log: NodeLog,
        owner: Ownership,
        prefix: str,
        *,
        ids_are_inos: bool = False,
    ) -> None:
        self._store = store
        self._directories = directories
        self._log = log
        self.cache = cache
        self._fetcher = fetcher
        self._backing = backing
        self.owner = owner
        self.mounted_ns = time.time_ns()
        self.inodes = InodeTable(prefix, log, ids_are_inos=ids_are_inos)
        self.handles = HandleTable(log)
        self.counters = ReadCounters()
        # (directory, name, process) of opens that were told ESTALE and no lookup since: the node.
        self._told_stale: OrderedDict[tuple[int, str, int], int] = OrderedDict()
        self._siblings: OrderedDict[str, Siblings] = OrderedDict()
        self._read_buffer = memoryview(bytearray(MAX_READ))
        self._nowait = os.RWF_NOWAIT
        self._disk = trio.CapacityLimiter(16)
        # Asks the kernel to forget a node's attributes; set by the session.
        self.invalidate_attributes: Callable[[int], None] = lambda _nodeid: None

    # Names

    def lookup(self, parent_id: int, name: bytes, caller: Caller) -> Answer[Found]:
        """What a name stands for."""
        parent = self._directory(parent_id)
        text = names.decode(name)
        if text is None or not names.is_expressible(text):
            return Found(None, 0.0) if len(name) <= names.NAME_MAX else _too_long()
        if self._told_stale:
            told = self._told_stale.pop((parent_id, text, caller.pid), None)
            if told is not None:
                self._log.stale(told, caller.pid, is_told=False)
        directory = self._directories.get(self.inodes.key(parent))
        known = self._directories.lookup_now(directory, text)
        if known is None:
            return self._waiting(self._lookup_later(parent, directory, text))
        return self._found(parent, directory, text, *known)

    async def _lookup_later(self, parent: Inode, directory: Directory, name: str) -> Found:
        entry, expires = await self._directories.lookup(directory, name)
        return self._found(parent, directory, name, entry, expires)

    def _found(
        self, parent: Inode, directory: Directory, name: str, entry: Entry | Absent, expires: float
    ) -> Found:
        valid_s = max(0.0, expires - time.monotonic())
        if isinstance(entry, Absent):
            return Found(None, valid_s)
        inode = self._resolve(parent, directory, name, entry)
        self.inodes.count(inode, expires)
        return Found(inode, valid_s)

    def _resolve(self, parent: Inode, directory: Directory, name: str, entry: Entry) -> Inode:
        key = entry.key if entry is not None else directory.prefix + name + "/"
        return self.inodes.resolve(parent, name, entry, key)

    def forget(self, nodeid: int, nlookup: int) -> None:
        self.inodes.forget(nodeid, nlookup)

    def getattr(self, nodeid: int) -> tuple[Inode, float]:
        """The inode whose attributes to show, and for how many seconds they hold.

        They are those of the version that the node stands for, for ever; what
        a name stands for is the business of lookups.
        """
        inode = self.inodes.get(nodeid)
        if inode.info is None:
            # A directory always looks the same, and every path leads through the root.
            return inode, math.inf
        return inode, max(0.0, inode.believed_until - time.monotonic())

    def attributes(self, inode: Inode) -> Attributes:
        return inode.attributes(self.owner, self.mounted_ns)

    # Files

    def open(self, nodeid: int, flags: int, caller: Caller) -> Answer[Opened]:
        """Open a file for reading; see the module's text for how it is decided."""
        inode = self.inodes.get(nodeid)
        if flags & _WRITING or flags & os.O_TRUNC:
            raise OSError(errno.EROFS, "the mount is read-only")
        if inode.info is None:
            raise OSError(errno.EISDIR, "a directory")
        is_believed = self._is_believed(inode)
        if known := self.handles.opened_by(caller.unique):
            return self._opened_before(known)
        if inode.is_current and is_believed:
            file = self.cache.find(inode.info.version)
            if file is not None and file.is_complete and not inode.served:
                backing_id = self._backing.find(file)
                if backing_id:
                    self.counters.hit(file.size)
                    return self._opened_passthrough(inode, file, backing_id, flags, caller)
        return self._waiting(self._open_later(inode, flags, caller, is_believed))

    def _opened_before(self, fh: int) -> Opened:
        """An open that the last process had logged, but not answered."""
        backing_id = self.handles.files[fh].backing_id
        return Opened(fh, keep_cache=bool(backing_id), backing_id=backing_id)

    def _is_believed(self, inode: Inode) -> bool:
        """Whether the node may be opened without asking the bucket what its name stands for."""
        if inode.looked_up:
            inode.looked_up = False
            return True
        return inode.believed_until > time.monotonic()

    async def _open_later(
        self, inode: Inode, flags: int, caller: Caller, is_believed: bool
    ) -> Opened:
        if inode.is_current and not is_believed:
            await self._ask_again(inode)
        if not inode.is_current:
            return await self._open_elsewhere(inode, flags, caller)
        assert inode.info is not None
        file = self.cache.pin(inode.info.version)
        try:
            is_whole = await self._prepare(inode, inode.info, file)
            # A file that is not whole is registered for its lock, which the
            # kernel keeps when this process dies: nobody evicts it then.
            backing_id = await self._backing.register(file) if file.fd >= 0 else 0
            if not inode.is_current:
                return await self._open_elsewhere(inode, flags, caller)
            if is_whole and backing_id:
                if not inode.served:
                    return self._opened_passthrough(inode, file, backing_id, flags, caller)
                if not self._was_told_stale(inode, caller):
                    self.inodes.supersede(inode)
                    return await self._open_elsewhere(inode, flags, caller)
            return self._opened_served(inode, file, flags, caller, keep_cache=True)
        finally:
            self.cache.unpin(file)

    async def _ask_again(self, inode: Inode) -> None:
        """Ask what the name stands for now; if for something else, the inode is current no more."""
        assert inode.info is not None
        assert inode.parent is not None
        directory = self._directories.get(self.inodes.key(inode.parent))
        try:
            info = await self._store.head(inode.info.key)
        except NotFoundError:
            self._directories.correct(directory, inode.name, None)
            self.inodes.supersede(inode)
            return
        if (info.etag, info.size) == (inode.info.etag, inode.info.size):
            inode.believed_until = time.monotonic() + self._directories.ttl_s
            return
        self._directories.correct(directory, inode.name, info)
        self.inodes.supersede(inode)

    async def _open_elsewhere(self, inode: Inode, flags: int, caller: Caller) -> Opened:
        """Send the opener to the name's new node, or give it what the old one has.

        Raises:
            OSError: ESTALE, for the kernel to look the name up again.
        """
        if not self._was_told_stale(inode, caller):
            self._told_stale[self._stale_key(inode, caller.pid)] = inode.nodeid
            self._log.stale(inode.nodeid, caller.pid, is_told=True)
            while len(self._told_stale) > MOST_STALE:
                self._told_stale.popitem(last=False)
            raise OSError(errno.ESTALE, "the name stands for something else now")
        return await self._open_anyway(inode, flags, caller)

    async def _open_anyway(self, inode: Inode, flags: int, caller: Caller) -> Opened:
        """Open an old node for a program that has no name to look up.

        It gets the old version if that is whole in the cache, else the
        current one under the old node if nobody has that open.

        Raises:
            OSError: ESTALE, neither is possible.
        """
        assert inode.info is not None
        file = self.cache.pin(inode.info.version)
        try:
            if file.is_complete and await self.cache.ensure_open(file) and file.is_complete:
                return await self._opened_either_way(inode, file, flags, caller, keep_cache=True)
        finally:
            self.cache.unpin(file)
        info = await self._current_info(inode)
        if inode.is_open or info is None:
            raise OSError(errno.ESTALE, "the object has been replaced while it was open")
        is_new = (info.etag, info.size) != (inode.info.etag, inode.info.size)
        if is_new:
            self.inodes.replace_version(inode, info)
            self.invalidate_attributes(inode.nodeid)
        file = self.cache.pin(info.version)
        try:
            await self._prepare(inode, info, file)
            return await self._opened_either_way(inode, file, flags, caller, keep_cache=not is_new)
        finally:
            self.cache.unpin(file)

    async def _current_info(self, inode: Inode) -> ObjectInfo | None:
        assert inode.info is not None
        try:
            return await self._store.head(inode.info.key)
        except NotFoundError:
            return None

    async def _prepare(self, inode: Inode, info: ObjectInfo, file: CacheFile) -> bool:
        """Have a version's first bytes in its file, all of them if it is small.

        Tells whether the file is whole. If the bucket has another version by
        now, the inode is not the current one any more.
        """
        if not info.size:
            return False
        if not self.cache.is_new(file) and not await self.cache.ensure_open(file):
            await self._ask_again(inode)
            return False
        if info.size <= SMALL:
            self._note_small(inode, info, was_there=file.is_complete)
        if file.is_complete:
            self.counters.hit(info.size)
            return True
        # The first bytes of a large file also show that the version is the current one.
        needed = info.size if info.size <= SMALL else 1
        if needed == 1 and file.present.covers(0, BLOCK):
            await self._ask_again(inode)
            return False
        self.counters.miss(needed)
        try:
            await self._fetcher.wait_for(file, 0, needed)
        except NotKeptError:
            await self._ask_again(inode)
        except (StaleVersionError, NotFoundError):
            self._forget_listing(inode)  # it changed since it was listed
        return file.is_complete

    def _forget_listing(self, inode: Inode) -> None:
        """A version turned out to be outdated: the next lookup asks the bucket."""
        if inode.parent is not None:
            directory = self._directories.get(self.inodes.key(inode.parent))
            self._directories.correct(directory, inode.name, None)
        self.inodes.supersede(inode)

    def _was_told_stale(self, inode: Inode, caller: Caller) -> bool:
        return self._stale_key(inode, caller.pid) in self._told_stale

    def recall_stale(self, nodeid: int, pid: int) -> None:
        """A process that was told ESTALE, and may have no name to look up."""
        inode = self.inodes.find(nodeid)
        if inode is not None:
            self._told_stale[self._stale_key(inode, pid)] = nodeid

    def _stale_key(self, inode: Inode, pid: int) -> tuple[int, str, int]:
        return (inode.parent.nodeid if inode.parent is not None else 0, inode.name, pid)

    async def _opened_either_way(
        self, inode: Inode, file: CacheFile, flags: int, caller: Caller, *, keep_cache: bool
    ) -> Opened:
        """Open in the mode that the node is in, or in the better one if it is in none."""
        if file.is_complete and file.size and not inode.served:
            backing_id = await self._backing.register(file)
            if backing_id and not inode.served:
                return self._opened_passthrough(inode, file, backing_id, flags, caller)
        return self._opened_served(inode, file, flags, caller, keep_cache=keep_cache)

    def _opened_passthrough(
        self, inode: Inode, file: CacheFile, backing_id: int, flags: int, caller: Caller
    ) -> Opened:
        assert inode.info is not None
        self.cache.pin_again(file)
        handle = self.handles.open_file(
            inode, inode.info.version, file, backing_id, flags, caller.unique
        )
        return Opened(handle.fh, keep_cache=True, backing_id=backing_id)

    def _opened_served(
        self, inode: Inode, file: CacheFile, flags: int, caller: Caller, *, keep_cache: bool
    ) -> Opened:
        assert inode.info is not None
        if inode.passthrough:
            # The kernel reads a file for this node; another mode would be an EIO.
            backing_id = self._backing.find(file)
            if not backing_id:
                raise OSError(errno.ESTALE, "the node is open for passthrough")
            return self._opened_passthrough(inode, file, backing_id, flags, caller)
        self.cache.pin_again(file)
        handle = self.handles.open_file(inode, inode.info.version, file, 0, flags, caller.unique)
        if not file.is_complete:
            handle.window = Window(self._fetcher, file)
        return Opened(handle.fh, keep_cache=keep_cache)

    def _note_small(self, inode: Inode, info: ObjectInfo, *, was_there: bool) -> None:
        """Let the directory's prefetch know that one of its small files is being opened."""
        assert inode.parent is not None
        prefix = self.inodes.key(inode.parent)
        siblings = self._siblings.get(prefix)
        if siblings is None:
            if was_there:
                return
            order = self._known_files(self._directories.get(prefix))
            siblings = self._siblings[prefix] = Siblings(self._fetcher, self.cache, order)
            while len(self._siblings) > 64:
                self._siblings.popitem(last=False)[1].close()
        siblings.opened(info, was_there=was_there)

    def _known_files(self, directory: Directory) -> Iterator[ObjectInfo]:
        """The files that listings have told of so far, in order."""
        at = ""
        while True:
            segment = next((one for one in directory.segments if one.start >= at), None)
            if segment is None:
                return
            for name in segment.ordered:
                entry = segment.entries.get(name)
                if entry is not None:
                    yield entry
            if segment.stop is None:
                return
            at = segment.stop

    def read(self, fh: int, offset: int, size: int) -> Answer[memoryview | bytes | bytearray]:
        """The bytes of a served handle's version at [offset, offset + size).

        Fewer only at the end of the file. The memory of an answer that comes
        at once is used again for the next.
        """
        try:
            handle = self.handles.files[fh]
        except KeyError:
            raise OSError(errno.EBADF, f"unknown file handle {fh}") from None
        file = handle.file
        stop = min(offset + size, file.size)
        if offset >= stop:
            return b""
        if file.is_complete or file.present.covers(offset, stop):
            if handle.window is not None and not file.is_complete:
                handle.window.reads(offset, stop)
            self.counters.hit(stop - offset)
            data = self._read_now(file, offset, stop - offset)
            if data is not None:
                return data
        return self._waiting(self._read_later(handle, offset, stop))

    def _read_now(self, file: CacheFile, offset: int, size: int) -> memoryview | None:
        """Read what the page cache has, all of it or None."""
        if file.fd < 0 or size > MAX_READ:
            return None
        data = self._read_buffer[:size]
        try:
            count = os.preadv(file.fd, (data,), offset, self._nowait)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not self._nowait:
                return None
            # tmpfs: it knows no RWF_NOWAIT, and never waits for a disk either.
            self._nowait = 0
            return self._read_now(file, offset, size)
        return data if count == size else None

    async def _read_later(self, handle: FileHandle, offset: int, stop: int) -> bytes | bytearray:
        file = handle.file
        self.cache.pin_again(file)  # the handle may be released before the answer is there
        try:
            if file.is_kept:
                try:
                    return await self._read_kept(handle, offset, stop)
                except NotKeptError:
                    pass
            return await self._read_unkept(handle, offset, stop)
        except NotFoundError:
            self._forget_listing(handle.inode)
            raise OSError(errno.ESTALE, "the object has been deleted") from None
        except StaleVersionError:
            self._forget_listing(handle.inode)
            raise
        finally:
            self.cache.unpin(file)

    async def _read_kept(self, handle: FileHandle, offset: int, stop: int) -> bytes:
        file = handle.file
        if not file.present.covers(offset, stop):
            self.counters.miss(stop - offset)
            if handle.window is not None:
                handle.window.reads(offset, stop)
            await self._fetcher.wait_for(file, offset, stop)
        elif not await self.cache.ensure_open(file):
            raise NotKeptError
        try:
            return await trio.to_thread.run_sync(
                read_fully, file.fd, offset, stop - offset, limiter=self._disk
            )
        except OSError as error:
            self.cache.refuse(file, error)
            raise NotKeptError from error

    async def _read_unkept(self, handle: FileHandle, offset: int, stop: int) -> bytearray:
        """Read past the cache, somewhat more than asked for, which serves the next reads."""
        start, data = handle.unkept
        if not (start <= offset and stop <= start + len(data)):
            start = offset
            end = min(handle.version.size, max(stop, offset + UNKEPT))
            data = await self._fetcher.read_unkept(handle.version, start, end)
            handle.unkept = (start, data)
        return data[offset - start : stop - start]

    def release(self, fh: int) -> None:
        """Close a handle; an unknown one is none any more."""
        handle = self.handles.close_file(fh)
        if handle is None:
            return
        if handle.window is not None:
            handle.window.close()
        self.cache.unpin(handle.file)

    # Directories

    @property
    def may_cache_directories(self) -> bool:
        """Whether the kernel may keep listings, which rewinddir then shows again."""
        return self._directories.ttl_s >= CACHED_DIRECTORY_TTL_S

    def opendir(self, nodeid: int, caller: Caller) -> tuple[DirectoryHandle, bool]:
        """Open a directory; also tell whether what the kernel has cached of it still holds."""
        inode = self._directory(nodeid)
        if known := self.handles.opened_by(caller.unique):
            return self.handles.directories[known], False
        directory = self._directories.get(self.inodes.key(inode))
        is_cached = inode.streamed_generation == directory.generation and directory.is_complete(
            time.monotonic()
        )
        return self.handles.open_directory(inode, directory.generation, caller.unique), is_cached

    def readdir(self, fh: int, offset: int, buffer: DirectoryBuffer) -> Answer[None]:
        """Add the entries behind `offset` to the buffer, as many as it holds; none at the end."""
        handle = self.handles.directory(fh)
        self._seek(handle, offset)
        if not self._add_dots(handle, buffer):
            return None
        directory = self._directories.get(self.inodes.key(handle.inode))
        while True:
            segment = self._directories.segment_now(directory, handle.position, handle.opened)
            if segment is None:
                # What is there is not held back by a request to the bucket.
                if buffer.is_empty:
                    return self._waiting(self._readdir_later(handle, directory, buffer))
                return None
            if not self._add_entries(handle, directory, segment, buffer):
                return None

    async def _readdir_later(
        self, handle: DirectoryHandle, directory: Directory, buffer: DirectoryBuffer
    ) -> None:
        """Wait for the next entries, and add those that come with them."""
        while buffer.is_empty:
            segment = await self._directories.segment_behind(
                directory, handle.position, handle.opened
            )
            if not self._add_entries(handle, directory, segment, buffer):
                return

    def _seek(self, handle: DirectoryHandle, offset: int) -> None:
        if offset == handle.offset:
            return
        handle.offset = offset
        if not offset:
            handle.opened = time.monotonic()  # rewound: as if opened now
        if offset in (0, DOT, DOT_DOT):
            handle.position = ""
            return
        inode = self.inodes.find(offset)
        if inode is None:
            raise OSError(errno.EINVAL, f"unknown directory offset {offset}")
        handle.position = names.position(inode.name)

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
        expires = segment.expires
        valid_s = max(0.0, expires - time.monotonic())
        ordered = segment.ordered
        for index in range(segment.after(handle.position), len(ordered)):
            name = ordered[index]
            inode = self._resolve(handle.inode, directory, name, segment.entries[name])
            if not buffer.add(name.encode(), inode, valid_s):
                self.inodes.drop_unknown(inode)
                return False
            if buffer.is_plus:
                self.inodes.count(inode, expires)
            else:
                self.inodes.mention(inode)
            handle.offset = inode.nodeid
            handle.position = name + "/"
        if segment.stop is None:
            if handle.generation == directory.generation:
                handle.inode.streamed_generation = directory.generation
            return False
        handle.position = max(handle.position, segment.stop)
        return True

    def releasedir(self, fh: int) -> None:
        handle = self.handles.close_directory(fh)
        if handle is not None and not handle.inode.served:
            self.inodes.close_directory(handle.inode)

    # What an object has beside its bytes

    def getxattr(self, nodeid: int, name: str) -> Answer[bytes]:
        """One extended attribute.

        Raises:
            OSError: ENODATA, there is none of this name.
        """
        inode = self.inodes.get(nodeid)
        if not name.startswith("user.s3."):
            raise OSError(errno.ENODATA, name)
        info = inode.info
        if name == "user.s3.key":
            return self.inodes.key(inode).encode()
        if info is None:
            raise OSError(errno.ENODATA, name)
        if name == "user.s3.etag":
            return info.etag.encode()
        if name == "user.s3.storage_class":
            return info.storage_class.encode()
        if name in ("user.s3.content_type", XATTR_VERSION):
            if info.content_type is None:
                return self._waiting(self._getxattr_later(inode, name))
            return _headed_xattr(info, name)
        raise OSError(errno.ENODATA, name)

    async def _getxattr_later(self, inode: Inode, name: str) -> bytes:
        """Ask for what no listing tells; remembered if it is about the same version."""
        assert inode.info is not None
        info = await self._store.head(inode.info.key)
        if (info.etag, info.size) != (inode.info.etag, inode.info.size):
            raise OSError(errno.ESTALE, "the object has been replaced")
        inode.info = info
        return _headed_xattr(info, name)

    def listxattr(self, nodeid: int) -> tuple[str, ...]:
        """The names that every object has; asks nothing, since `ls -l` asks for every file."""
        inode = self.inodes.get(nodeid)
        if inode.info is None:
            return XATTRS[:1]
        return XATTRS if inode.info.version_id is None else (*XATTRS, XATTR_VERSION)

    # Helpers

    async def retell(self, log: NodeLog) -> None:
        """Write every inode and handle to a new log, a few at a time."""
        self.tell_table(log)
        for index, inode in enumerate(self.inodes.all()):
            if inode.parent is not None and self.inodes.find(inode.nodeid) is inode:
                log.node(inode)
                if not inode.is_current:
                    log.superseded(inode.nodeid)
            if index % 200 == 0:
                await trio.lowlevel.checkpoint()
        for handle in list(self.handles.files.values()):
            if handle.fh in self.handles.files:
                self.handles.tell_file(handle)
        for directory in list(self.handles.directories.values()):
            self.handles.tell_directory(directory)

    def tell_table(self, log: NodeLog) -> None:
        """Put on record which numbers may have been used, and when the mount was made."""
        log.table(self.inodes.next_id, self.handles.next_fh, self.mounted_ns)

    def _directory(self, nodeid: int) -> Inode:
        inode = self.inodes.get(nodeid)
        if inode.children is None:
            raise OSError(errno.ENOTDIR, "not a directory")
        return inode

    async def _waiting(self, answer: Awaitable[Result]) -> Result:
        """Turn the store's errors into those of system calls, in this one place."""
        try:
            return await answer
        except StoreError as error:
            raise OSError(error.errno, str(error)) from error


@dataclass(slots=True)
class ReadCounters:
    """What was asked of the cache: requests and bytes that it had, and that it had not."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    miss_bytes: int = 0

    def hit(self, size: int) -> None:
        self.hits += 1
        self.hit_bytes += size

    def miss(self, size: int) -> None:
        self.misses += 1
        self.miss_bytes += size


def read_fully(fd: int, offset: int, size: int) -> bytes:
    """Read exactly `size` bytes, which are known to be there. Blocks.

    Raises:
        OSError: the disk failed, or the file is shorter than it was.
    """
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, "the cache file is too short")
        data += more
    return data


def _headed_xattr(info: ObjectInfo, name: str) -> bytes:
    value = info.version_id if name == XATTR_VERSION else info.content_type
    if value is None:
        raise OSError(errno.ENODATA, name)
    return value.encode()


def _too_long() -> Found:
    raise OSError(errno.ENAMETOOLONG, "a name has 255 bytes at most")
