"""Descriptors of this process: as many as the system allows, and some of them not for files."""

from __future__ import annotations

import errno
import os
import resource

# Those that programs' files leave for the rest: 128 connections (the default), and as many for
# commands, the catalog, records, and files that are opened for a moment. Half of fewer than 512.
RESERVED = 256


def raise_limit() -> None:
    """Allow this process as many descriptors as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_unreserved() -> None:
    """Raise OSError (EMFILE) where the next descriptor would be one of the reserved."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fd = os.dup(2)  # the lowest number that is free; all of this takes 2 µs
    os.close(fd)
    if fd >= limit - min(RESERVED, limit // 2):
        raise OSError(errno.EMFILE, f"{fd} files are open: the last descriptors are for others")
