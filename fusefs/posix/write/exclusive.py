"""O_EXCL: the bucket decides if a file is new, at its creation or when its content is uploaded.

Two nodes that create one name with O_EXCL must not both succeed, and only the bucket can decide
between them. A *reservation*, an empty object that is PUT with `If-None-Match: *` before the
creation returns, decides at once, for programs that use the file as a lock. Programs that unpack
and copy (tar, cp, rsync) create every file with O_EXCL as well, where a second PUT would be wasted,
and other nodes would see an empty file first. For their files the PUT of the content has the
condition; if another object has the key by then, `close` and `fsync` fail with EEXIST.

A file is created without a reservation if its name is not a lock's and is known not to exist, and
if either this mount made the directory not long ago, or the process has just written other files
with some content. If such a file stays open and small for a second, it is reserved then, so that
other nodes see it. A name with a random part (mkstemp(3)) is unique, and is never reserved.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

import trio

from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.posix.nodes.temporary_names import has_random_part
from fusefs.posix.types import Caller
from fusefs.posix.write.upload_steps import CREATED_BY, content_type
from fusefs.store.contract import Store
from fusefs.store.errors import ConflictError
from fusefs.store.interface import IF_ABSENT, Expect, ObjectInfo, Write

# A directory that this mount has made counts as just made for this long.
MADE_S = 600.0
# The most new directories that are remembered, at about 200 bytes each.
MOST_MADE = 10_000
# The largest size of a lock file (a host, a process id, a time).
LOCK_SIZE = 4096
# A process counts as copying once it has written this many files of at least COPIED_SIZE
# bytes in a row, with at most COPYING_S between a close and the next creation.
COPIED_FILES = 2
COPIED_SIZE = 1024
COPYING_S = 10.0
MOST_PROCESSES = 256
# A small file is reserved after it has been open for this long.
OPEN_S = 1.0
# Names of files for locks, claims and leadership; `.pid`; `.swp` (vim); and the ending `#1` of
# object_store (Lance, delta-rs), by which nodes create one file before they link it to its name.
_LOCK_NAME = re.compile(
    r"lock|lck|mutex|lease|leader|claim|semaphore|owner|token|\.pid$|\.sw.$|#\d+$", re.IGNORECASE
)


class EmptyObjects:
    """The PUTs of empty objects: reservations of new files, and markers of directories.

    `mount` is a name that distinguishes this mount's reservations from those of others.
    """

    def __init__(self, store: Store, mount: str) -> None:
        self._store = store
        self._mount = mount
        self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    async def put(self, key: str, meta: Meta, caller: Caller) -> ObjectInfo:
        """Put an empty object under an unused key; EEXIST if another request has used the key."""
        # If the answer is lost, to this process or to the last one, the token
        # distinguishes our object from another node's.
        token = f"{self._mount}-{caller.unique}"
        try:
            write = Write(meta.as_metadata() | {CREATED_BY: token}, content_type(key), IF_ABSENT)
            return await self._store.put_file(key, self.fd, 0, write)
        except ConflictError as error:
            found = await self._store.head(key)
            if found.size or (found.metadata or {}).get(CREATED_BY) != token:
                raise OSError(errno.EEXIST, str(error)) from error
            return found

    async def put_marker(self, prefix: str, meta: Meta, etag: str | None) -> str:
        """Put a directory's marker in place of the one with `etag` (None: none); return its ETag.

        Raises ConflictError if an object with content is there.
        """
        write = Write(meta.as_metadata(), "application/x-directory", Expect(etag))
        return (await self._store.put_file(prefix, self.fd, 0, write)).etag


class ExclusiveCreates:
    """Decides which O_EXCL creations of one mount are reserved. Belongs to the event loop.

    The function `reserve` sends the reservation of an open file, and raises nothing.
    """

    def __init__(
        self, nursery: trio.Nursery, reserve: Callable[[StagedFile], Awaitable[None]]
    ) -> None:
        self._nursery = nursery
        self._reserve = reserve
        # By directory prefix: when this mount made the directory; the oldest first.
        self._made: OrderedDict[str, float] = OrderedDict()
        # By process: the number of files written in a row, and the time of the last one.
        self._copiers: OrderedDict[int, tuple[int, float]] = OrderedDict()
        # Files without a reservation, with the times (trio's seconds) at which they get one.
        self._watched: deque[tuple[float, StagedFile]] = deque()
        self._is_watching = False

    def made(self, prefix: str) -> None:
        self._made[prefix] = time.monotonic()
        self._made.move_to_end(prefix)
        if len(self._made) > MOST_MADE:
            self._made.popitem(last=False)

    def removed(self, prefix: str) -> None:
        """Forget that this mount made a directory, as the directory was removed or renamed."""
        self._made.pop(prefix, None)

    def is_reserved(self, prefix: str, name: str, pid: int) -> bool:
        """True if the process `pid` (0: unknown) may create the name only with a reservation."""
        if _LOCK_NAME.search(name):
            return True
        if has_random_part(prefix + name):
            return False
        now = time.monotonic()
        if now - self._made.get(prefix, -MADE_S) < MADE_S:
            return False
        count, last = self._copiers.get(pid, (0, 0.0))
        return count < COPIED_FILES or now - last > COPYING_S

    def wrote(self, pid: int, size: int) -> None:
        """Note that a process has closed a file of `size` bytes which it created with O_EXCL."""
        if not pid or size < COPIED_SIZE:
            return
        count, _ = self._copiers.get(pid, (0, 0.0))
        self._copiers[pid] = count + 1, time.monotonic()
        self._copiers.move_to_end(pid)
        if len(self._copiers) > MOST_PROCESSES:
            self._copiers.popitem(last=False)

    def lost(self, pid: int) -> None:
        """Note that a process's close failed with EEXIST, so that its next creation is reserved."""
        self._copiers.pop(pid, None)

    def watch(self, staged: StagedFile) -> None:
        """Reserve a new file in OPEN_S, if it is undecided and no larger than a lock file then."""
        if has_random_part(staged.key):
            return
        self._watched.append((trio.current_time() + OPEN_S, staged))
        if not self._is_watching:
            self._is_watching = True
            self._nursery.start_soon(self._watch)

    async def _watch(self) -> None:
        try:
            while self._watched:
                at, staged = self._watched[0]
                if is_undecided(staged):  # most files are uploaded by then
                    await trio.sleep_until(at)
                self._watched.popleft()
                if is_undecided(staged) and staged.size() <= LOCK_SIZE:
                    # In its own task, as the rename of a directory may block the reservation.
                    self._nursery.start_soon(self._reserve, staged)
        finally:
            self._is_watching = False


def is_undecided(staged: StagedFile) -> bool:
    """True if the bucket has not decided yet that an O_EXCL file is new."""
    return staged.exclusive is not None and not staged.is_unlinked and staged.inode.staged is staged
