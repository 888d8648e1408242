"""The limit of this process's descriptors, of which `RESERVED` are not for programs' files."""

from __future__ import annotations

import errno
import os
import resource

# Descriptors that are not used for programs' files (half of the limit if it is below 512): 128 for
# connections (the default), and as many for commands, the catalog, records and short-lived files.
RESERVED = 256


def raise_limit() -> None:
    """Raise this process's soft limit of descriptors to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_unreserved() -> None:
    """Raise OSError (EMFILE) if all descriptors but the `RESERVED` ones are taken."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fd = os.dup(2)  # the lowest number that is free; all of this takes 2 µs
    os.close(fd)
    if fd >= limit - min(RESERVED, limit // 2):
        raise OSError(errno.EMFILE, f"{fd} files are open: the last descriptors are for others")
