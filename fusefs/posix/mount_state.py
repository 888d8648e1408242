"""The state that the parts of one mount's file system share: built once, before any of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fusefs.cache.downloader import Downloader
from fusefs.cache.file_cache import FileCache
from fusefs.posix.directory.listings import Directories
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import Attributes, Inode, InodeTable, NodeLog, Ownership
from fusefs.posix.nodes.notifier import Notifier
from fusefs.posix.nodes.temporary_names import is_temporary
from fusefs.posix.types import BackingFiles, ReadCounters
from fusefs.posix.write.staging import Staging
from fusefs.settings.durability import EVERYWHERE_AUTO, Durability, DurabilityRules
from fusefs.store.interface import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class WriteRules:
    """Rules of writing; see the settings of the same names. The keys begin with `prefix`."""

    durability: DurabilityRules = EVERYWHERE_AUTO
    prefix: str = ""
    fails_on_conflict: bool = False
    may_delete: bool = True

    def durability_of(self, key: str) -> Durability:
        """The place of a key's file when fsync and close return."""
        return self.durability.of(key[len(self.prefix) :])

    def is_local(self, key: str) -> bool:
        """True if the local disk is enough for the file of a key."""
        return self.durability_of(key) is Durability.LOCAL

    def is_temporary(self, key: str, *, is_exclusive: bool) -> bool:
        """True if the local disk is enough for the file of a key until it has its last name.

        `is_exclusive` says that it was created with O_EXCL.
        """
        is_auto = self.durability_of(key) is Durability.AUTO
        return is_auto and is_temporary(key[len(self.prefix) :], is_exclusive=is_exclusive)


@dataclass(frozen=True, slots=True)
class Writing:
    """The parts that a writable mount has beside those of a read-only one.

    Uploads, and changes whose caller was killed, run in `nursery`. Renames of
    directories are on record in the directory `renames`. `make_room` has the
    cache give up what the disk needs.
    """

    staging: Staging
    renames: Path
    nursery: trio.Nursery
    rules: WriteRules
    make_room: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class MountState:
    """The tables and services of one mount. Belongs to the event loop.

    `mounted_ns` is when the mount was made, in ns since the epoch; `owner` owns
    what has no owner of its own.
    """

    store: Store
    directories: Directories
    cache: FileCache
    downloader: Downloader
    backing: BackingFiles
    journal: NodeLog
    inodes: InodeTable
    handles: HandleTable
    owner: Ownership
    mounted_ns: int
    notifier: Notifier
    # The S3 endpoint that was named to the mount, "" where it is AWS's own.
    endpoint: str = ""
    counters: ReadCounters = field(default_factory=ReadCounters)

    def attributes(self, inode: Inode) -> Attributes:
        """The attributes that stat shows of an inode."""
        return inode.attributes(self.owner, self.mounted_ns)

    def mark_stale(self, inode: Inode, info: ObjectInfo | None = None) -> None:
        """The bucket has another version than the inode's: `info`, or an unknown one.

        What is being written here stays what its name stands for.
        """
        if inode.staged is not None:
            return
        if inode.parent is not None:
            directory = self.directories.get(self.inodes.key(inode.parent))
            self.directories.correct(directory, inode.name, info)
        self.inodes.mark_replaced(inode)
