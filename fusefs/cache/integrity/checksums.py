"""Checksums of cache files, which show if the disk has changed bytes.

Each download computes sums of the bytes it writes, in pieces that end at each MiB
boundary of the file. So a sum covers a range [start, stop) of at most a MiB, and a
comparison reads the whole range. Sums of one file may overlap if two mounts have
downloaded the same range.

The sum is CRC32, which uploads to S3 compute as well (store/checksum.py), so that the
sum of an uploaded file is known already.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fusefs.cache.ranges import RangeMap
from fusefs.store.checksum import crc32

BLOCK = 1 << 20

# Reads `size` bytes at `offset` of a file; fewer bytes only at its end.
Read = Callable[[int, int], memoryview]

_SUM = struct.Struct("<QII")


class Sum(NamedTuple):
    """The CRC32 of the bytes [start, stop) of a file."""

    start: int
    stop: int
    crc: int


def sums_of_bytes(data: memoryview, offset: int) -> list[Sum]:
    """Compute the sums of `data`, which is in a file at `offset`."""
    return sums_of(lambda size, at: data[at - offset :][:size], offset, offset + len(data))


def merged(sums: Iterable[Sum]) -> list[Sum]:
    """Sort sums, and drop each whose range lies within the range of another sum."""
    sums = list(sums)
    if len(sums) < 2:
        return sums  # most files
    kept: list[Sum] = []
    for sum_ in sorted(sums, key=lambda sum_: (sum_.start, -sum_.stop)):
        if not kept or sum_.stop > kept[-1].stop:
            kept.append(sum_)
    return kept


def pack(sums: Iterable[Sum]) -> bytes:
    return b"".join(_SUM.pack(start, stop - start, crc) for start, stop, crc in sums)


def unpack(data: object) -> list[Sum]:
    """The sums in `data`, a result of `pack`; none if `data` is truncated or of another type."""
    if not isinstance(data, bytes) or len(data) % _SUM.size:
        return []
    sums = (Sum(start, start + size, crc) for start, size, crc in _SUM.iter_unpack(data))
    return [sum_ for sum_ in sums if sum_.start < sum_.stop <= sum_.start + BLOCK]


def reader(fd: int) -> Read:
    """Return a function that reads an open file through the page cache."""
    return lambda size, offset: memoryview(os.pread(fd, size, offset))


def sums_of(read: Read, start: int, stop: int) -> list[Sum]:
    """Read the bytes [start, stop) of a file and compute their sums; raises OSError. Blocks."""
    sums: list[Sum] = []
    while start < stop:
        data = read(min(stop, start - start % BLOCK + BLOCK) - start, start)
        if not data:
            break
        sums.append(Sum(start, start + len(data), crc32(data)))
        start += len(data)
    return sums


def unsummed(present: RangeMap, sums: Iterable[Sum]) -> Iterator[tuple[int, int]]:
    """Yield the present ranges that no sum covers."""
    known = RangeMap((sum_.start, sum_.stop) for sum_ in sums)
    for start, stop in present:
        while (gap := known.first_missing(start, stop)) is not None:
            yield gap
            start = gap[1]


def is_within(sum_: Sum, start: int, stop: int) -> bool:
    """True if a sum covers any of the bytes [start, stop)."""
    return sum_.start < stop and start < sum_.stop


def first_wrong(read: Read, sums: Iterable[Sum], present: RangeMap) -> Sum | None:
    """Find the first sum that present bytes do not match, or None; raises OSError. Blocks."""
    for sum_ in sums:
        size = sum_.stop - sum_.start
        if not present.covers(sum_.start, sum_.stop):
            continue
        data = read(size, sum_.start)
        if len(data) < size or crc32(data) != sum_.crc:
            return sum_
    return None
