"""Files whose object was replaced by another node while a program here changed them.

A content that its programs have made anew (O_TRUNC) takes the place of whatever the bucket
has: the store sees to that (`Expect`). Any other content is built on one object, and is sent
on the condition that this object is there still. If the bucket refuses that:

1. An object that an earlier request of this file made is its own, and is replaced.
2. An object that is gone has nothing to lose: the content is put as a new one.
3. What was appended, and nothing else was changed, goes behind the new object.
4. Attributes that were changed alone are given up.
5. Else both are kept, the content under a name of its own, and the program is told (ESTALE).

With `--conflict fail`, and of a file that is to be new (O_EXCL), only 1, 4 and 5 are done.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import partial

import trio

from fusefs.posix.nodes import object_metadata
from fusefs.posix.nodes.edit_base import IN_PARTS
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write.sparse_edit import SparseEditor
from fusefs.posix.write.staging import Staging
from fusefs.posix.write.upload_steps import CREATED_BY, UploadSteps
from fusefs.store.errors import NotFoundError, StaleVersionError
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.uploads")


class Conflicts:
    """The conflicts of one mount's uploads. Belongs to the event loop.

    The files are locked.
    """

    def __init__(
        self, steps: UploadSteps, staging: Staging, editor: SparseEditor, *, fails: bool
    ) -> None:
        self._steps = steps
        self._staging = staging
        self._editor = editor
        self._fails = fails
        self._disk = trio.CapacityLimiter(4)

    async def is_settled(self, staged: StagedFile, theirs: ObjectInfo | None) -> bool:
        """True if a file can be sent after all, over the object that is there (None: none is).

        Raises:
            StoreError: the object can't be read.
        """
        if theirs is not None and (
            theirs.etag == staged.etag or await self._is_own(theirs, staged)
        ):
            staged.etag, staged.exclusive = theirs.etag, None
            return True
        if self._fails or staged.exclusive is not None or not staged.is_content_dirty:
            return False
        if theirs is None:
            is_whole = staged.base is None or not staged.base.lacks(0, staged.size())
            if staged.etag is None or staged.is_leftover or not is_whole:
                return False
            staged.etag = None
            return True
        if staged.appended_from is None or staged.backing is not None:
            return False
        if await self.is_content_of(theirs, staged):
            return False
        try:
            await self._append_to(theirs, staged)
        except (NotFoundError, StaleVersionError):
            return True  # it is replaced again already: the bucket refuses the next request as well
        except OSError as error:
            logger.warning("%s can't go behind the new object: %s", staged.key, error)
            return False
        logger.info("%s was replaced by another node: what was appended is behind it", staged.key)
        return True

    async def _is_own(self, theirs: ObjectInfo, staged: StagedFile) -> bool:
        """True if the object is a file's own: a reservation, or an earlier content, by a request of
        which no process has had the answer.
        """
        if str(theirs.token) in staged.tokens and not await self.is_content_of(theirs, staged):
            return True
        mark = (theirs.metadata or {}).get(CREATED_BY)
        return staged.exclusive is not None and not theirs.size and mark == staged.exclusive

    async def is_content_of(self, info: ObjectInfo, staged: StagedFile) -> bool:
        """True if an object is a file's content: its size, its time, and its making or its bytes.

        The time alone tells nothing: it ticks every few ms, and two nodes may write in one tick.
        """
        mtime_ns = object_metadata.read_time(info.metadata or {})
        if (info.size, mtime_ns) != staged.stamp():
            return False
        if str(info.token) in staged.tokens:
            return True
        if info.size > IN_PARTS:
            return False
        found = await trio.to_thread.run_sync(_md5, staged.fd, info.size, limiter=self._disk)
        return info.etag.strip('"') == found

    async def _append_to(self, theirs: ObjectInfo, staged: StagedFile) -> None:
        """Have a file be another object with what was appended to the last one behind it.

        Raises:
            NotFoundError, StaleVersionError: the object is there no more.
            StoreError: it can't be read.
            OSError: the disk does not take it.
        """
        await self._steps.abandon(staged)
        start, size, at = staged.appended_from, staged.size(), theirs.size
        assert start is not None
        with self._staging.another_content(staged) as fd:
            base = await self._editor.copy(theirs.version, fd, at)
            try:
                if staged.tokens and base is None and start < size <= at:
                    has_tail = partial(_has_tail, fd, staged.fd, start, size)
                    if await trio.to_thread.run_sync(has_tail, limiter=self._disk):
                        start = size  # an upload without an answer was executed, and appended to
                if base is not None:
                    await self._editor.fill_edges(base, fd, at, at + size - start)
                    base.wrote(at, at + size - start)
                copy = partial(_copy_tail, staged.fd, start, size, fd, at)
                await trio.to_thread.run_sync(copy, limiter=self._disk)
                self._staging.replace_content(staged, fd, theirs, base)
            except BaseException:
                if base is not None:
                    self._editor.drop(base)
                raise


def _md5(fd: int, size: int) -> str:
    return hashlib.md5(os.pread(fd, size, 0), usedforsecurity=False).hexdigest()


def _has_tail(fd: int, source: int, start: int, stop: int) -> bool:
    """True if a file has the bytes [start, stop) of another one at the same place. Blocks."""
    return all(
        os.pread(fd, min(IN_PARTS, stop - at), at) == os.pread(source, min(IN_PARTS, stop - at), at)
        for at in range(start, stop, IN_PARTS)
    )


def _copy_tail(source: int, start: int, stop: int, target: int, at: int) -> None:
    """Have the bytes [start, stop) of one file in another one, on the disk. Blocks."""
    modified_ns = os.fstat(source).st_mtime_ns
    while start < stop and (count := os.copy_file_range(source, target, stop - start, start, at)):
        start, at = start + count, at + count
    os.utime(target, ns=(modified_ns, modified_ns))
    os.fsync(target)
