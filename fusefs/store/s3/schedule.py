"""How an upload is cut into parts: the same way whatever the size turns out to be.

S3 takes 10,000 parts of up to 5 GiB. A file that is sent while it is written
has no size yet, so the parts can't be all alike: after each thousand they are
twice as large. With first parts of 8 MiB, all of them hold 8 TiB, and a file of
8 GB has none but these.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_PARTS = 10_000
ALIKE = 1_000
LARGEST = 4 << 30


@dataclass(frozen=True, slots=True)
class Schedule:
    """Parts, counted from 1, of which the first have `first` bytes."""

    first: int

    def size_of(self, number: int) -> int:
        """How many bytes a part has, unless it is the last.

        Raises:
            ValueError: S3 takes no part with this number.
        """
        if not 1 <= number <= MOST_PARTS:
            raise ValueError(f"there is no part {number}")
        return self._size_in((number - 1) // ALIKE)

    def start_of(self, number: int) -> int:
        """Where a part begins."""
        group, behind = divmod(number - 1, ALIKE)
        size = self.size_of(number)
        return sum(ALIKE * self._size_in(one) for one in range(group)) + behind * size

    def part_at(self, offset: int) -> int:
        """The number of the part that has the byte at `offset`.

        Raises:
            ValueError: it is in none.
        """
        number = 1
        for group in range(MOST_PARTS // ALIKE):
            size = self._size_in(group)
            if offset < ALIKE * size:
                return number + offset // size
            offset -= ALIKE * size
            number += ALIKE
        raise ValueError("the file is too large for S3")

    def count(self, size: int) -> int:
        """How many parts a file of `size` bytes has."""
        return self.part_at(size - 1) if size else 0

    def range_of(self, number: int, size: int) -> tuple[int, int]:
        """The bytes [start, stop) that a part has in a file of `size` bytes.

        Raises:
            ValueError: such a file has no such part.
        """
        start = self.start_of(number)
        if start >= size:
            raise ValueError(f"a file of {size} bytes has no part {number}")
        return start, min(start + self.size_of(number), size)

    def _size_in(self, group: int) -> int:
        return min(self.first << group, LARGEST)
