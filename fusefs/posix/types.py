"""The arguments and answers of operations: the types that sessions share with them.

An operation answers at once, or returns a coroutine when it has to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.nodes.inode_table import Inode
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import ObjectInfo

Result = TypeVar("Result")
# Above what threads are numbered with.
_USERS = 1 << 31
# An answer, or the coroutine that waits for it.
Answer: TypeAlias = Result | Coroutine[Any, Any, Result]


@dataclass(slots=True)
class Caller:
    """The origin of a request: its id, and the process as the mount's namespace sees it.

    `pid` is a thread's, and 0 where that namespace has no number for it.
    """

    unique: int
    uid: int
    gid: int
    pid: int

    @property
    def program(self) -> int:
        """The number that tells programs apart as far as can be: the thread, else the user."""
        return self.pid or _USERS | self.uid


class InFile(NamedTuple):
    """The answer to a READ of handle `fh`: bytes of its cache file, to be read with `flags`."""

    fh: int
    file: CacheFile
    offset: int
    size: int
    flags: int


@dataclass(slots=True)
class LookupResult:
    """A name's inode (None: there is none) and for how many seconds to believe it.

    Without `has_attributes` only its type is known: whoever wants more asks again.
    """

    inode: Inode | None
    valid_s: float
    has_attributes: bool = True


@dataclass(slots=True)
class OpenResult:
    """An open handle. `backing_id` is not 0 for passthrough.

    What is written through an `is_direct` handle need not be kept by the kernel, too.
    """

    fh: int
    keep_cache: bool
    backing_id: int = 0
    may_write: bool = False
    is_direct: bool = False


@dataclass(slots=True)
class NewAttributes:
    """The changes of a SETATTR; None for what stays. Times are in ns since the epoch.

    `has_handle`: a program changes it through a file that it has open.
    """

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    mtime_ns: int | None = None
    has_handle: bool = False


class NameKind(enum.Enum):
    """The known type of a name that is shown alone."""

    DIRECTORY = enum.auto()
    FILE = enum.auto()
    # Where attributes are read from the bucket it may be a symbolic link.
    OBJECT = enum.auto()


class DirectoryBuffer(Protocol):
    """The buffer in which a session collects the entries of one reply."""

    @property
    def is_plus(self) -> bool:
        """True if an entry also hands out a reference to its inode."""

    @property
    def takes_names(self) -> bool:
        """True if an entry may be a name alone, without attributes and reference."""

    @property
    def is_empty(self) -> bool: ...

    def add_dot(self, name: bytes, ino: int, offset: int) -> bool:
        """Add "." or ".."; False if there is no room."""

    def add(self, name: bytes, inode: Inode, offset: int, valid_s: float) -> bool:
        """Add an entry with its inode; False if there is no room."""

    def add_name(self, name: bytes, ino: int, offset: int, kind: NameKind) -> bool:
        """Add a name alone; False if there is no room."""


@dataclass(slots=True)
class ReadCounters:
    """Reads served locally (hits), and those of bytes that had to be fetched for them (misses).

    What was fetched ahead of its first read was fetched for it. An open of a file that is
    whole in the cache counts as one read of all of it: the kernel's reads are not seen.
    """

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    miss_bytes: int = 0
    unkept_bytes: int = 0  # of the misses, read past the cache
    # What the daemon answered READs with: from the cache disk, or fetched for them.
    cache_bytes: int = 0
    s3_bytes: int = 0
    ahead_bytes: int = 0  # of the misses, fetched ahead of their first read (as last computed)
    served_opens: int = 0
    passthrough_opens: int = 0
    passthrough_bytes: int = 0  # sizes of the files that were opened for it
    kernel_bytes: int = 0  # of these, what was not fetched for the open: an estimate of its reads

    def answered(self, size: int, fetched: int) -> None:
        """Count a READ that was answered with `size` bytes, of which `fetched` were fetched."""
        self.cache_bytes += size - fetched
        self.s3_bytes += fetched

    def miss(self, size: int) -> None:
        self.misses += 1
        self.miss_bytes += size

    @property
    def local_share(self) -> float | None:
        """The share of all bytes read that was served locally; None before the first read."""
        total = self.hit_bytes + self.miss_bytes
        return self.hit_bytes / total if total else None

    def passthrough(self, size: int, fetched: int) -> None:
        """Count an open for passthrough of a whole file, as a read of all of it."""
        self.passthrough_opens += 1
        self.passthrough_bytes += size
        self.kernel_bytes += size - fetched
        self.s3_bytes += fetched
        self.read(size, fetched)

    def read(self, size: int, fetched: int) -> None:
        """Count a read of `size` bytes, of which `fetched` had to be fetched for it."""
        self.hit_bytes += size - fetched
        if fetched:
            self.miss(fetched)
        else:
            self.hits += 1


async def find(store: Store, key: str) -> ObjectInfo | None:
    """The object that the bucket has under a key, None if there is none."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None


async def waiting(answer: Awaitable[Result]) -> Result:
    """Turn the store's errors into those of system calls, in this one place."""
    try:
        return await answer
    except StoreError as error:
        raise OSError(error.errno, str(error)) from error
