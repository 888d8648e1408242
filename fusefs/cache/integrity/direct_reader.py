"""Reads cache files past the page cache, to find what the disk really has."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from fusefs.cache.integrity.checksums import BLOCK

# Direct reads begin and end at multiples of this, the largest alignment that disks require.
ALIGNMENT = 4096

# Errors of a disk or file system that has lost bytes. Other errors (no memory, too many
# open files) say nothing about a file.
_LOST = {
    errno.EIO,
    errno.EBADMSG,
    errno.EUCLEAN,
    errno.ENODATA,
    errno.EREMOTEIO,
    errno.EILSEQ,
    errno.ENXIO,
    errno.ENODEV,
    errno.ETIMEDOUT,
}


class DirectReader:
    """Reads one file, past the page cache if its file system supports that. Blocks."""

    def __init__(self, path: str, *, is_direct: bool = True) -> None:
        """Open a file, for reads through the page cache if not `is_direct`; raises OSError."""
        # Anonymous memory is aligned to pages.
        self._buffer = memoryview(mmap.mmap(-1, BLOCK + 2 * ALIGNMENT))
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if is_direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags)  # tmpfs before Linux 6.6 has no O_DIRECT

    def read(self, size: int, offset: int) -> memoryview:
        """Read `size` (at most `BLOCK`) bytes; raises OSError. The next call overwrites them."""
        first = offset - offset % ALIGNMENT
        last = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        have = 0
        while have < last - first:
            count = self._read_into(self._buffer[have : last - first], first + have)
            have += count
            if not count or count % ALIGNMENT:
                break
        return self._buffer[offset - first : max(offset - first, min(have, offset - first + size))]

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # The disk requires another alignment.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.preadv(self._fd, [buffer], offset)

    def close(self) -> None:
        os.close(self._fd)


def is_lost(error: OSError) -> bool:
    """True if an error means that a disk can't read bytes that were written to it."""
    return error.errno in _LOST
