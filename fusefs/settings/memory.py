"""The division of the memory that one mount's daemon may use (`--memory-limit`).

The idle process needs a part (the interpreter, botocore, buffers for the kernel's requests). The
rest is divided among the parts that grow with use: requests to S3, bytes that are read from S3
without being cached, listings, recently used cached files, and names that the kernel remembers.
Each part has a limit of its own. The process may exceed the limit by up to 64 MiB if all parts
reach their limits at once, because the interpreter does not free all memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusefs.settings.types import MIB

# The smallest limit: memory for the idle process, a few requests, names and so on.
LEAST = 112 * MIB
# The memory of the idle process.
_AT_REST = 96 * MIB
# The memory for each large body: the client's buffers, and a chunk to or from the disk.
_PER_STREAM = 4 * MIB
_LEAST_STREAMS = 4
# The number of requests with small bodies (at most 256 KiB) for each one with a large body.
_REQUESTS_PER_STREAM = 16
_LEAST_UNKEPT = 8 * MIB
# The measured bytes of a listing's entry, and of a node with its name and places in tables.
_PER_ENTRY = 560
_PER_NAME = 1024
# The measured bytes of a cached file's object in memory, with its name and places in tables.
_PER_FILE = 800
# The maximum number of entries, a hundred times that of a usual data set's directory.
_MOST_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The limits of the parts; `unkept` is in bytes, the other limits are numbers.

    `requests`: concurrent S3 requests; `streams`: concurrent requests with an answer of more than
    256 KiB, or a body from a file; `unkept`: bytes in memory that were read from S3 without being
    cached; `entries`: entries of listings;
    `names`: names that the kernel may remember before the daemon makes the kernel forget some;
    `files`: cached files that are not in use, but have a Python object in memory.
    """

    requests: int
    streams: int
    unkept: int
    entries: int
    names: int
    files: int

    @staticmethod
    def of(limit: int) -> MemoryBudget:
        """Divide a memory limit of `limit` bytes; a limit below LEAST counts as LEAST."""
        free = max(limit, LEAST) - _AT_REST
        return MemoryBudget(
            requests=max(_LEAST_STREAMS, free // _PER_STREAM) * _REQUESTS_PER_STREAM,
            streams=max(_LEAST_STREAMS, free // _PER_STREAM),
            unkept=max(_LEAST_UNKEPT, free // 8),
            entries=min(_MOST_ENTRIES, free // 2 // _PER_ENTRY),
            names=free // 2 // _PER_NAME,
            files=free // 4 // _PER_FILE,
        )
