"""Checksums of cache files, so that bytes that a disk has changed are noticed.

Each download sums what it writes, in pieces that end where a mebibyte of the
file ends. A sum therefore covers a range [start, stop) of at most a mebibyte,
and a comparison reads that range whole. Sums of one file may overlap where two
mounts have downloaded the same range.

The sum is CRC32, as S3 compares it with what arrives (store/checksum.py): what was
just uploaded has been summed already.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fusefs.cache.ranges import RangeMap
from fusefs.store.checksum import crc32

BLOCK = 1 << 20

# Reads (size, offset) of a file; fewer bytes only at its end.
Read = Callable[[int, int], memoryview]

_SUM = struct.Struct("<QII")


class Sum(NamedTuple):
    """The CRC32 of the bytes [start, stop) of a file."""

    start: int
    stop: int
    crc: int


def sums_of_bytes(data: memoryview, offset: int) -> list[Sum]:
    """The sums of bytes that are in a file from `offset` on."""
    sums, start, stop = [], offset, offset + len(data)
    while start < stop:
        end = min(stop, start - start % BLOCK + BLOCK)
        sums.append(Sum(start, end, crc32(data[start - offset : end - offset])))
        start = end
    return sums


def merged(sums: Iterable[Sum]) -> list[Sum]:
    """The sums in order, without those of ranges that another one covers."""
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
    """The sums that `pack` packed; none of data that is cut off or of another kind."""
    if not isinstance(data, bytes) or len(data) % _SUM.size:
        return []
    sums = (Sum(start, start + size, crc) for start, size, crc in _SUM.iter_unpack(data))
    return [sum_ for sum_ in sums if sum_.start < sum_.stop <= sum_.start + BLOCK]


def reader(fd: int) -> Read:
    """Read an open file, through the page cache."""
    return lambda size, offset: memoryview(os.pread(fd, size, offset))


def sums_of(read: Read, start: int, stop: int) -> list[Sum]:
    """The sums of [start, stop) as they are in the file now; raises OSError. Blocks."""
    sums: list[Sum] = []
    while start < stop:
        data = read(min(stop, start - start % BLOCK + BLOCK) - start, start)
        if not data:
            break
        sums.append(Sum(start, start + len(data), crc32(data)))
        start += len(data)
    return sums


def unsummed(present: RangeMap, sums: Iterable[Sum]) -> Iterator[tuple[int, int]]:
    """The ranges that are present and have no sum."""
    known = RangeMap((sum_.start, sum_.stop) for sum_ in sums)
    for start, stop in present:
        while (gap := known.first_missing(start, stop)) is not None:
            yield gap
            start = gap[1]


def is_within(sum_: Sum, start: int, stop: int) -> bool:
    """True if a sum covers some of the bytes [start, stop)."""
    return sum_.start < stop and start < sum_.stop


def first_wrong(read: Read, sums: Iterable[Sum], present: RangeMap) -> Sum | None:
    """The first sum that present bytes do not match, or None; may raise OSError. Blocks."""
    for sum_ in sums:
        size = sum_.stop - sum_.start
        if not present.covers(sum_.start, sum_.stop):
            continue
        data = read(size, sum_.start)
        if len(data) < size or crc32(data) != sum_.crc:
            return sum_
    return None
