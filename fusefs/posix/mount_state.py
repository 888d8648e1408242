"""The state that the parts of one mount's file system share, and the base class of the parts."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from fusefs.cache.downloader import Downloader
from fusefs.cache.file_cache import FileCache
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import Attributes, Inode, InodeTable, Ownership
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.types import ReadCounters
from fusefs.store.contract import Store
from fusefs.store.interface import ObjectInfo


@dataclass(frozen=True, slots=True)
class MountState:
    """The tables and services of one mount. Belongs to the event loop.

    `mounted_ns` is the time of the mount, in ns since the epoch; `owner` has the defaults for
    mode and owner; `begun` are the ids of requests that an earlier process had begun.
    """

    store: Store
    directories: Directories
    cache: FileCache
    downloader: Downloader
    backing: PassthroughFiles
    journal: Journal
    inodes: InodeTable
    handles: HandleTable
    owner: Ownership
    mounted_ns: int
    notifier: KernelNotifier
    # The S3 endpoint that the mount was given, "" for AWS's own.
    endpoint: str = ""
    begun: Set[int] = frozenset()
    counters: ReadCounters = field(default_factory=ReadCounters)

    def attributes(self, inode: Inode) -> Attributes:
        return inode.attributes(self.owner, self.mounted_ns)

    def mark_stale(self, inode: Inode, info: ObjectInfo | None = None) -> None:
        """Separate an inode from its name, which has another object now (`info`, if known)."""
        if inode.staged is not None:
            return
        if inode.parent is not None:
            directory = self.directories.get(self.inodes.key(inode.parent))
            self.directories.correct(directory, inode.name, info)
        self.inodes.mark_replaced(inode)


class MountPart:
    """A part of one mount's file system, which shares the tables and services of the mount."""

    def __init__(self, state: MountState) -> None:
        self._state = state
        self._store = state.store
        self._directories = state.directories
        self._cache = state.cache
        self._downloader = state.downloader
        self._backing = state.backing
        self._inodes = state.inodes
        self._handles = state.handles
        self._counters = state.counters
        self._notifier = state.notifier
