"""The types of the arguments and answers of operations, which the sessions use as well.

An operation answers at once, or returns a coroutine when it has to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.nodes.inode_table import Inode

Result = TypeVar("Result")
# Greater than any thread id.
_USERS = 1 << 31
# An answer, or the coroutine that waits for it.
Answer: TypeAlias = Result | Coroutine[Any, Any, Result]


async def answered(answer: Answer[Result]) -> Result:
    """Return an operation's answer; await it if it is a coroutine."""
    return await answer if isinstance(answer, Coroutine) else answer


@dataclass(slots=True)
class Caller:
    """The sender of a request: the request's id (`unique`), the user, the group and the thread.

    `pid` is the thread's id in the mount's pid namespace, 0 if it has none there.
    """

    unique: int
    uid: int
    gid: int
    pid: int

    @property
    def program(self) -> int:
        """A number that tells programs apart: the thread's id if it is known, else the user's."""
        return self.pid or _USERS | self.uid


class InFile(NamedTuple):
    """An answer to a READ: a range of the cache file, to be read with the `flags` of preadv2(2)."""

    fh: int
    file: CacheFile
    offset: int
    size: int
    flags: int


@dataclass(slots=True)
class LookupResult:
    """A name's inode (None: no such name) and the seconds for which the kernel may cache it.

    Without `has_attributes` only the inode's type is known; a GETATTR gets the others.
    """

    inode: Inode | None
    valid_s: float
    has_attributes: bool = True


@dataclass(slots=True)
class OpenResult:
    """The answer to an open: the handle `fh`; with a `backing_id` of 0 the daemon serves it.

    `is_direct`: the kernel need not cache the bytes written through the handle.
    """

    fh: int
    keep_cache: bool
    backing_id: int = 0
    may_write: bool = False
    is_direct: bool = False


@dataclass(slots=True)
class NewAttributes:
    """The changes of a SETATTR; an attribute of None stays. `mtime_ns` is in ns since the epoch.

    `has_handle`: the program changes the file through a handle that it has open.
    """

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    mtime_ns: int | None = None
    has_handle: bool = False


class NameKind(enum.Enum):
    """The type of a directory entry that is shown without attributes, as far as it is known."""

    DIRECTORY = enum.auto()
    FILE = enum.auto()
    # A file or a symbolic link: only the object's attributes tell.
    OBJECT = enum.auto()


class DirectoryBuffer(Protocol):
    """The entries of one READDIR reply; each session has a class of its own for them."""

    @property
    def is_plus(self) -> bool:
        """True for READDIRPLUS: an entry gives the kernel a reference to its inode as well."""

    @property
    def takes_names(self) -> bool:
        """True if entries but "." and ".." may be names alone, without attributes and reference."""

    @property
    def is_empty(self) -> bool: ...

    def add(self, name: bytes, inode: Inode, offset: int, valid_s: float) -> bool:
        """Add an entry with its inode; False if there is no room."""

    def add_name(self, name: bytes, ino: int, offset: int, kind: NameKind) -> bool:
        """Add a name alone; False if there is no room."""


@dataclass(slots=True)
class ReadCounters:
    """Counts of reads of cached bytes (hits), and of bytes that had to be fetched (misses).

    The first read of bytes that were fetched ahead is a miss. The open of a file that is
    whole in the cache counts as one read of all of it, as the kernel's reads are not seen.
    """

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    miss_bytes: int = 0
    unkept_bytes: int = 0  # the part of `miss_bytes` that the cache did not keep
    # The bytes with which the daemon answered READs: from the cache disk, or fetched from S3.
    cache_bytes: int = 0
    s3_bytes: int = 0
    ahead_bytes: int = 0  # the part of `miss_bytes` that was fetched ahead (as last computed)
    served_opens: int = 0
    passthrough_opens: int = 0
    passthrough_bytes: int = 0  # total size of the files that were opened for passthrough
    # The part of `passthrough_bytes` that was cached: an estimate of the kernel's reads.
    kernel_bytes: int = 0

    def answered(self, size: int, fetched: int) -> None:
        """Count a READ that the daemon answered with `size` bytes, `fetched` of them from S3."""
        self.cache_bytes += size - fetched
        self.s3_bytes += fetched

    def miss(self, size: int) -> None:
        self.misses += 1
        self.miss_bytes += size

    @property
    def local_share(self) -> float | None:
        """The share of the bytes read that the cache had; None before the first read."""
        total = self.hit_bytes + self.miss_bytes
        return self.hit_bytes / total if total else None

    def passthrough(self, size: int, fetched: int) -> None:
        """Count an open for passthrough as a read of the file's `size` bytes, `fetched` from S3."""
        self.passthrough_opens += 1
        self.passthrough_bytes += size
        self.kernel_bytes += size - fetched
        self.s3_bytes += fetched
        self.read(size, fetched)

    def read(self, size: int, fetched: int) -> None:
        """Count a read of `size` bytes, of which `fetched` came from S3."""
        self.hit_bytes += size - fetched
        if fetched:
            self.miss(fetched)
        else:
            self.hits += 1
