"""O_EXCL: when the bucket decides that a file is new, at its creation or with its content.

Two nodes that create one name with O_EXCL must not both succeed, and only the
bucket can decide between them. A *reservation*, an empty object that is PUT
with `If-None-Match: *` before the creation returns, decides at once, as a
program expects that locks by such a file. Programs that unpack and copy (tar,
cp, rsync) create every file with O_EXCL as well; a second PUT for each would be
wasted, and others would see an empty file first. Theirs is decided by the PUT
of the content, which has the same condition. If another object is there by
then, `close` and `fsync` fail with EEXIST.

A creation is reserved unless the name is not one of a lock, is not known to
exist, and either the directory was made by this mount not long ago, or the
process has just written other files that are larger than a lock's. What stays
open and small for a second is reserved then, so that other nodes see it. A name
with a random part, as mkstemp(3) chooses it, is never reserved: no other node makes it.
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

# How long a directory that was made here counts as this mount's own.
MADE_S = 600.0
# Directories that are remembered, at about 200 bytes for each.
MOST_MADE = 10_000
# What a lock file holds at most: a host, a process id, a time.
LOCK_SIZE = 4096
# A process copies if it has written this many files of at least COPIED_SIZE bytes in a row,
# with no more than COPYING_S between one and the next creation.
COPIED_FILES = 2
COPIED_SIZE = 1024
COPYING_S = 10.0
MOST_PROCESSES = 256
# How long a small file may be open before it is reserved.
OPEN_S = 1.0
# Names by which programs lock, claim and lead; `.pid` and `.swp` (vim) as endings, and what
# object_store (Lance, delta-rs) writes before it links it, under numbers that all nodes count.
_LOCK_NAME = re.compile(
    r"lock|lck|mutex|lease|leader|claim|semaphore|owner|token|\.pid$|\.sw.$|#\d+$", re.IGNORECASE
)


class EmptyObjects:
    """Objects without content: new files that are reserved, and markers of directories.

    `mount` tells what this mount makes from what others do.
    """

    def __init__(self, store: Store, mount: str) -> None:
        self._store = store
        self._mount = mount
        self.fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    async def put(self, key: str, meta: Meta, caller: Caller) -> ObjectInfo:
        """Make an object where there is none; EEXIST if another request has made one."""
        # Where the answer is lost, to this process or with the last one, this
        # tells our object from another node's.
        token = f"{self._mount}-{caller.unique}"
        try:
            metadata = meta.as_metadata() | {CREATED_BY: token}
            write = Write(metadata, content_type(key), IF_ABSENT)
            return await self._store.put_file(key, self.fd, 0, write)
        except ConflictError as error:
            found = await self._store.head(key)
            if found.size or (found.metadata or {}).get(CREATED_BY) != token:
                raise OSError(errno.EEXIST, str(error)) from error
            return found

    async def put_marker(self, prefix: str, meta: Meta, etag: str | None) -> str:
        """Make a prefix a directory, over a marker of this ETag; ConflictError for a content."""
        write = Write(meta.as_metadata(), "application/x-directory", Expect(etag))
        return (await self._store.put_file(prefix, self.fd, 0, write)).etag


class ExclusiveCreates:
    """The decisions about the exclusive creations of one mount. Belongs to the event loop.

    `reserve` sends the reservation of a file that is open, and raises nothing.
    """

    def __init__(
        self, nursery: trio.Nursery, reserve: Callable[[StagedFile], Awaitable[None]]
    ) -> None:
        self._nursery = nursery
        self._reserve = reserve
        # When this mount made a directory, by prefix; the oldest first.
        self._made: OrderedDict[str, float] = OrderedDict()
        # How many files in a row a process has written, and when it did so last.
        self._copiers: OrderedDict[int, tuple[int, float]] = OrderedDict()
        # Files that were not reserved, and when they are to be, in trio's seconds.
        self._watched: deque[tuple[float, StagedFile]] = deque()
        self._is_watching = False

    def made(self, prefix: str) -> None:
        self._made[prefix] = time.monotonic()
        self._made.move_to_end(prefix)
        if len(self._made) > MOST_MADE:
            self._made.popitem(last=False)

    def removed(self, prefix: str) -> None:
        """A directory is gone, or has another name."""
        self._made.pop(prefix, None)

    def is_reserved(self, prefix: str, name: str, pid: int) -> bool:
        """True if a process's creation is decided at once; `pid` 0: not known."""
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
        """A process has closed a file that it had created exclusively and that is `size` bytes."""
        if not pid or size < COPIED_SIZE:
            return
        count, _ = self._copiers.get(pid, (0, 0.0))
        self._copiers[pid] = count + 1, time.monotonic()
        self._copiers.move_to_end(pid)
        if len(self._copiers) > MOST_PROCESSES:
            self._copiers.popitem(last=False)

    def lost(self, pid: int) -> None:
        """A process lost a name at its close: its next creation is decided at once."""
        self._copiers.pop(pid, None)

    def watch(self, staged: StagedFile) -> None:
        """Have a file reserved that stays open without becoming larger than a lock's."""
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
                if is_undecided(staged):  # most are uploaded by then
                    await trio.sleep_until(at)
                self._watched.popleft()
                if is_undecided(staged) and staged.size() <= LOCK_SIZE:
                    # A rename of the directory may keep it waiting, and not the others.
                    self._nursery.start_soon(self._reserve, staged)
        finally:
            self._is_watching = False


def is_undecided(staged: StagedFile) -> bool:
    """True if a file is to be new and the bucket has not decided yet that it is."""
    return staged.exclusive is not None and not staged.is_unlinked and staged.inode.staged is staged
