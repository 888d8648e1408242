"""The division of the memory that one mount's daemon may use (`--memory-limit`).

First comes the memory of the idle process (the interpreter, botocore, the session's
buffers). The rest is divided among the parts that grow with use: requests under way,
bytes that are read past the cache, listings, recently used cached files, and names that
the kernel remembers. Each part has a limit of its own. All limits are rarely reached
together; then, and because of memory that the interpreter does not free, the process
may be 64 MiB larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusefs.settings.types import MIB

# The smallest limit: memory for the idle process, and for a few requests, names and so on.
LEAST = 112 * MIB
# The memory of the idle process.
_AT_REST = 96 * MIB
# For each large body: the client's buffers, and a chunk on its way to or from the disk.
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
# A hundred times the entries of a usual data set's directory.
_MOST_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The limits of the parts; `unkept` is in bytes, the others are numbers.

    `requests`: concurrent S3 requests; `streams`: those of them with bodies of more than
    256 KiB; `unkept`: bytes that are read past the cache; `entries`: entries of listings;
    `names`: names beyond which the kernel is made to forget some; `files`: cached files
    in memory besides those in use.
    """

    requests: int
    streams: int
    unkept: int
    entries: int
    names: int
    files: int

    @staticmethod
    def of(limit: int) -> MemoryBudget:
        """Divide `limit` bytes; a smaller limit than LEAST counts as LEAST."""
        free = max(limit, LEAST) - _AT_REST
        return MemoryBudget(
            requests=max(_LEAST_STREAMS, free // _PER_STREAM) * _REQUESTS_PER_STREAM,
            streams=max(_LEAST_STREAMS, free // _PER_STREAM),
            unkept=max(_LEAST_UNKEPT, free // 8),
            entries=min(_MOST_ENTRIES, free // 2 // _PER_ENTRY),
            names=free // 2 // _PER_NAME,
            files=free // 4 // _PER_FILE,
        )
