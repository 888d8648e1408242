"""Checksums of the contents of closed files that the bucket does not have yet.

Such a content may lie on the local disk for long, and is nowhere else. Its checksum is computed
while its bytes are still in memory: at a close with local durability, and when an upload fails. The
checksum is stored in an attribute of the file, and compared before every upload. A content that
differs is not uploaded, but stays until a program writes to the file again or removes the file.

The attribute is removed before the content changes, so no file has the checksum of another content.
An edit of a large object has no checksum, as bytes of the object may be downloaded into its file at
any time; nor has a file that a program may change through a mapping. On a file system without
attributes the checksum is lost with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os

import trio

from fusefs.cache.integrity.checksums import BLOCK
from fusefs.linux.files import closing
from fusefs.posix.nodes.edit_base import IN_PARTS
from fusefs.posix.nodes.inode import StagedFile
from fusefs.store.checksum import crc32

ATTRIBUTE = "user.fusefs.sum"
# A content of at most this size is read in less time than a thread switch takes.
SMALL = 128 << 10
# Not the default limiter: programs wait for that one, for `note`, and for checks of small files.
_noting, _checking = trio.CapacityLimiter(16), trio.CapacityLimiter(4)


async def note(staged: StagedFile) -> None:
    """Store a content's checksum, unless known or the content changes; OSError if unreadable."""
    if staged.sum is not None or staged.base is not None or staged.lock.locked():
        return
    changes = staged.changes
    found = await _sum_of(staged, _noting)
    # A thread that is writing holds the lock. A released file's descriptor may be another file's.
    is_same = staged.changes == changes and staged.inode.staged is staged
    if is_same and staged.base is None and not (staged.lock.locked() or staged.may_be_mapped):
        staged.sum = found
        with contextlib.suppress(OSError):
            os.setxattr(staged.fd, ATTRIBUTE, found.to_bytes(4, "big"))


def recall(fd: int) -> int | None:
    """Read the checksum that an earlier process stored for a content; None if there is none."""
    try:
        return int.from_bytes(os.getxattr(fd, ATTRIBUTE), "big")
    except OSError:
        return None


def forget(staged: StagedFile) -> None:
    """Remove the checksum of a content that is about to change."""
    staged.sum = None
    with contextlib.suppress(OSError):
        os.removexattr(staged.fd, ATTRIBUTE)


async def check(staged: StagedFile) -> None:
    """Compare a file's content with its checksum, if it has one; raise EIO if they differ."""
    expected, limiter = staged.sum, _noting if staged.size() <= IN_PARTS else _checking
    if expected is None or await _sum_of(staged, limiter) == expected or staged.sum != expected:
        return
    raise OSError(
        errno.EIO,
        f"its content on the local disk differs from what was written; it is kept in {staged.path}"
        " and not uploaded: write the file again, or remove it",
    )


async def _sum_of(staged: StagedFile, limiter: trio.CapacityLimiter) -> int:
    size = staged.size()
    if size <= SMALL:
        return crc32(memoryview(os.pread(staged.fd, size, 0)))
    # The file may be uploaded, and released, while this waits for the disk.
    with closing(os.dup(staged.fd)) as fd:
        return await trio.to_thread.run_sync(_content_sum, fd, limiter=limiter)


def _content_sum(fd: int) -> int:
    """The CRC32 of a file's content. Blocks."""
    crc = offset = 0
    buffer = memoryview(bytearray(BLOCK))
    while count := os.preadv(fd, [buffer], offset):
        crc = crc32(buffer[:count], crc)
        offset += count
    return crc
