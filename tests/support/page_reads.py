"""Who answers the reads of an open file, found out by the requests that a daemon gets.

With random access advised and nothing in the page cache, a file that the
daemon serves costs a request for each page, and a passthrough file none.
"""

from __future__ import annotations

import os

from tests.support.mounting import Mount

PAGE = 4096
# What else may come to a daemon meanwhile: forgets, and whoever looks at the mount.
FEW = 5


def requests(mount: Mount) -> int:
    total: int = mount.status()["requests"]["total"]
    return total


def read_by_page(fd: int) -> bytes:
    """All of a file, read page by page, of which none is in the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return b"".join(os.pread(fd, PAGE, at) for at in range(0, os.fstat(fd).st_size, PAGE))


def is_passthrough(mount: Mount, fd: int) -> bool:
    """Whether reads through a descriptor don't reach the daemon. Reads all of the file."""
    pages = os.fstat(fd).st_size // PAGE
    assert pages > 10 * FEW, "too small to tell"
    before = requests(mount)
    read_by_page(fd)
    sent = requests(mount) - before
    assert sent <= FEW or sent >= pages // 2, f"{sent} requests for {pages} pages"
    return sent <= FEW
