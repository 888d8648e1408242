"""What the requests of a mount's programs have in common, and what may be done about it.

`fusefs profile` adds the requests as they come; memory is bounded by the number of files that
are looked at, and of these the rest is counted alone.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# Of what is read, which parts were read before is noted in blocks of this size.
BLOCK = 1 << 20
MOST_FILES = 100_000
MOST_HANDLES = 100_000
# Files up to this size are one request each, however little that brings.
SMALL = 1 << 20
# Of more requests of one operation, so many at random say how long they took.
MOST_TIMES = 10_000


class Access(NamedTuple):
    """One request. `at_s` is since recording began, `seconds` how long it took.

    `size` is in bytes: that of the file for an open, of the answer for a read. `source` is
    where the answer came from: `cache` (the local disk), `s3`, `staged` (written and still
    local), `memory`; for an open it is how reads go on, `passthrough` or `served`. `errno`
    is 0 for success.
    """

    at_s: float
    operation: str
    key: str
    handle: int = 0
    offset: int = 0
    size: int = 0
    seconds: float = 0.0
    source: str = ""
    errno: int = 0


@dataclass(slots=True)
class _File:
    """What is known of one file."""

    size: int = 0
    opens: int = 0
    is_passed: bool = False  # whether it was open for passthrough: the kernel reads it
    blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MountContext:
    """What the mount is set to: bytes of its cache, and seconds for which listings hold."""

    cache_limit: int | None = None
    metadata_ttl_s: float | None = None


class AccessSummary:
    """Counts requests; the results are attributes and methods."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.lost = 0  # there were more, which are not counted otherwise
        self.operations: Counter[str] = Counter()
        self.read_bytes: Counter[str] = Counter()  # by source
        self.reads: Counter[str] = Counter()
        # By operation, of what came from S3.
        self.waited_s: dict[str, float] = defaultdict(float)
        self.waits: Counter[str] = Counter()
        self.sequential_reads = 0
        self.again_bytes = 0  # of blocks that were read before
        self.written_bytes = 0
        self.left_out_files = 0
        self._files: dict[str, _File] = {}
        self._ends: dict[int, int] = {}  # where the last read of a handle ended
        self._times: dict[str, list[float]] = {}

    def add(self, access: Access) -> None:
        """Count one request."""
        self.requests += 1
        self.operations[access.operation] += 1
        times = self._times.setdefault(access.operation, [])
        if len(times) < MOST_TIMES:
            times.append(access.seconds)
        elif (place := random.randrange(self.operations[access.operation])) < MOST_TIMES:
            times[place] = access.seconds  # each request is as likely to be kept
        if access.source == "s3":
            self.waits[access.operation] += 1
            self.waited_s[access.operation] += access.seconds
        if access.errno:
            self.failed += 1
        elif access.operation == "open":
            self._open(access)
        elif access.operation == "read":
            self._read(access)
        elif access.operation == "write":
            self.written_bytes += access.size
        elif access.operation == "release":
            self._ends.pop(access.handle, None)

    def _file(self, key: str) -> _File | None:
        file = self._files.get(key)
        if file is None:
            if len(self._files) >= MOST_FILES:
                self.left_out_files += 1
                return None
            file = self._files[key] = _File()
        return file

    def _open(self, access: Access) -> None:
        file = self._file(access.key)
        if file is not None:
            file.opens += 1
            file.size = access.size
            file.is_passed |= access.source == "passthrough"

    def _read(self, access: Access) -> None:
        self.reads[access.source] += 1
        self.read_bytes[access.source] += access.size
        self.sequential_reads += self._ends.get(access.handle, 0) == access.offset
        self._ends[access.handle] = access.offset + access.size
        if len(self._ends) > MOST_HANDLES:  # releases were lost
            del self._ends[next(iter(self._ends))]
        file = self._file(access.key)
        if file is None or not access.size:
            return
        first, last = access.offset // BLOCK, (access.offset + access.size - 1) // BLOCK
        is_first = access.offset % BLOCK == 0
        # Within a block a reader goes on; to begin one that was read already is to read it again.
        for block in range(first, last + 1):
            if block in file.blocks and (is_first or block > first):
                self.again_bytes += min(BLOCK, access.size)
            file.blocks.add(block)

    # Results

    @property
    def opened_files(self) -> list[int]:
        """The sizes of the files that were opened, smallest first."""
        return sorted(file.size for file in self._files.values() if file.opens)

    @property
    def opens(self) -> int:
        return sum(file.opens for file in self._files.values())

    @property
    def passthrough_opens(self) -> int:
        return sum(file.opens for file in self._files.values() if file.is_passed)

    @property
    def reopened_files(self) -> int:
        """How many files were opened more than once."""
        return sum(file.opens > 1 for file in self._files.values())

    @property
    def working_set(self) -> int:
        """How many different bytes were read; of what the kernel reads alone, whole files."""
        return sum(_used(file) for file in self._files.values())

    @property
    def all_reads(self) -> int:
        return sum(self.reads.values())

    def median_s(self, operation: str) -> float:
        """The median latency of an operation that there was, in seconds."""
        from statistics import median  # a mount's start does without

        return median(self._times[operation])

    def percentile_99_s(self, operation: str) -> float:
        """What one in a hundred exceeds, in seconds."""
        times = sorted(self._times[operation])
        return times[min(len(times) - 1, int(0.99 * len(times)))]

    def advice(self, around: MountContext) -> Iterable[str]:
        """Sentences that say what may be changed, the most useful first; none is possible."""
        yield from self._about_cache(around)
        yield from self._about_metadata(around)
        yield from self._about_files()

    def _about_cache(self, around: MountContext) -> Iterable[str]:
        total = sum(self.read_bytes.values())
        from_s3 = self.read_bytes["s3"] / total if total else 0.0
        if around.cache_limit is not None and self.working_set > around.cache_limit:
            yield (
                "the files that were read do not fit into the cache: with a --cache-size of"
                f" {_in_gib(self.working_set)} or more they would be read from S3 once"
            )
        if from_s3 > 0.5 or self.waits["open"] > 0.5 * max(1, self.opens):
            yield (
                "most of what was read came from S3: fusefs warm fetches it before it is needed,"
                " with as many requests at once as the path to S3 bears"
            )
        random = self.all_reads - self.sequential_reads
        if self.all_reads > 100 and random > 0.5 * self.all_reads and from_s3 > 0.1:
            yield (
                "most reads jump within their files, and wait for S3 each: fusefs warm fetches the"
                " whole files"
            )

    def _about_metadata(self, around: MountContext) -> Iterable[str]:
        names = ("lookup", "getattr", "readdir", "readdirplus")
        waits = sum(self.waits[name] for name in names)
        waited_s = sum(self.waited_s[name] for name in names)
        ttl_s = around.metadata_ttl_s
        if waits > 20 and waited_s > 0.1 * sum(self.waited_s.values()) and ttl_s is not None:
            yield (
                f"{waits:,} look-ups waited for S3: where the bucket is not changed by others, a"
                f" --metadata-ttl longer than {ttl_s:.0f} s (or indefinite) asks less often"
            )

    def _about_files(self) -> Iterable[str]:
        sizes = self.opened_files
        is_small = len(sizes) > 100 and sizes[len(sizes) // 2] <= SMALL
        if is_small and self.waits["open"] > 0.2 * self.opens:
            yield (
                "most files are small, and each costs a request: packed into shards of 100 MiB"
                " and more (tar, WebDataset, Parquet) they are read at the speed of the path to S3"
            )


def _used(file: _File) -> int:
    if file.is_passed:
        return file.size
    read = len(file.blocks) * BLOCK
    return min(read, file.size) if file.size else read


def _in_gib(size: int) -> str:
    return f"{max(1, -(-size // (1 << 30)))}GiB"
