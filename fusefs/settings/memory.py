"""The division of the memory that one mount's daemon may take (`--memory-limit`).

What the process takes before it does anything (the interpreter, botocore,
the buffers of the session) comes first. The rest is divided among
what grows with use: requests on their way, bytes that are read past the cache,
listings, cached files that were used lately, and names that the kernel remembers. Each
has a limit of its own. They are seldom reached together; then, and for what the interpreter
does not give back, the process may be 64 MiB larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusefs.settings.types import MIB

# The least that a mount can do with: the process at rest, and a few of everything.
LEAST = 112 * MIB
# What the process takes at rest.
_AT_REST = 96 * MIB
# Of a large body: the client's buffers, and a chunk on its way to the disk or from it.
_PER_STREAM = 4 * MIB
_LEAST_STREAMS = 4
# A small body has at most 256 KiB.
_REQUESTS_PER_STREAM = 16
_LEAST_UNKEPT = 8 * MIB
# Measured: an entry of a listing, and a node with its name, version and places in tables.
_PER_ENTRY = 560
_PER_NAME = 1024
# Measured: a file of the cache that is in memory, with its name and places in tables.
_PER_FILE = 800
# A hundred times a usual data set's folder.
_MOST_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The shares of the parts in `limit` bytes.

    `requests` may be on their way to S3 at a time, and `streams` of these may have
    bodies of more than 256 KiB; `unkept` are bytes that are
    read past the cache; `entries` are kept of listings; beyond `names` the
    kernel is made to forget some; `files` of the cache are in memory besides those in use.
    """

    requests: int
    streams: int
    unkept: int
    entries: int
    names: int
    files: int

    @staticmethod
    def of(limit: int) -> MemoryBudget:
        """The division of `limit` bytes, which are at least LEAST."""
        free = max(limit, LEAST) - _AT_REST
        return MemoryBudget(
            requests=max(_LEAST_STREAMS, free // _PER_STREAM) * _REQUESTS_PER_STREAM,
            streams=max(_LEAST_STREAMS, free // _PER_STREAM),
            unkept=max(_LEAST_UNKEPT, free // 8),
            entries=min(_MOST_ENTRIES, free // 2 // _PER_ENTRY),
            names=free // 2 // _PER_NAME,
            files=free // 4 // _PER_FILE,
        )
