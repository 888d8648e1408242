"""The present bytes of a file: a set of disjoint, ordered ranges [start, stop)."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeMap:
    """A set of byte ranges; adjacent ranges are merged. `total` is the number of bytes in them."""

    __slots__ = ("_starts", "_stops", "total")

    def __init__(self, ranges: Iterator[tuple[int, int]] | None = None) -> None:
        self._starts = array("Q")  # a fifth of a list's memory
        self._stops = array("Q")
        self.total = 0
        for start, stop in ranges or ():
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    @property
    def count(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def add(self, start: int, stop: int) -> int:
        """Add [start, stop); return how many of these bytes are new."""
        if start >= stop:
            return 0
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        before = 0
        for index in range(low, high):
            before += self._stops[index] - self._starts[index]
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._starts[low:high] = array("Q", (start,))
        self._stops[low:high] = array("Q", (stop,))
        new = stop - start - before
        self.total += new
        return new

    def covers(self, start: int, stop: int) -> bool:
        """True if every byte of [start, stop) is present."""
        if start >= stop:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and stop <= self._stops[index]

    def run_at(self, offset: int) -> tuple[int, int] | None:
        """The range with the byte at `offset`; None if that byte is missing."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or self._stops[index] <= offset:
            return None
        return self._starts[index], self._stops[index]

    def part(self, start: int, stop: int) -> RangeMap:
        """Return the parts of the ranges that lie in [start, stop)."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return RangeMap(
            (max(start, self._starts[index]), min(stop, self._stops[index]))
            for index in range(low, high)
        )

    def first_missing(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first missing range of [start, stop); None if all is present."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0:
            start = max(start, self._stops[index])
        if start >= stop:
            return None
        index += 1
        if index < len(self._starts):
            stop = min(stop, self._starts[index])
        return start, stop

    def pack(self) -> bytes:
        pairs = array("Q", bytes(16 * self.count))
        pairs[::2], pairs[1::2] = self._starts, self._stops
        return pairs.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> RangeMap:
        pairs, ranges = array("Q", data), cls()
        ranges._starts, ranges._stops = pairs[::2], pairs[1::2]
        ranges.total = sum(ranges._stops) - sum(ranges._starts)
        return ranges
