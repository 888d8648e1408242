"""A Bloom filter of the files that the catalog has and memory has not.

Where the filter tells that a file is not among them, its download creates it without a look
into the catalog: a look costs a new file a third of its time. Of the names that are not
there it takes one in a hundred for one that is, which costs that look.
"""

from __future__ import annotations

# Bits for each name, with three positions: 0.5% of other names are taken for known ones.
_BITS = 16
_LEAST = 1 << 16


class NameFilter:
    """The names of at most `capacity` files, which are hashes of 32 hexadecimal digits."""

    def __init__(self, capacity: int) -> None:
        self._mask = (1 << (_BITS * max(capacity, _LEAST) - 1).bit_length()) - 1
        self._bits = bytearray((self._mask + 1) // 8)
        self._left = (self._mask + 1) // _BITS

    @property
    def is_full(self) -> bool:
        """True if so many names were added that it tells little by now."""
        return self._left < 0

    def add(self, name: str) -> None:
        """Add a name, which is not removed again."""
        self._left -= 1
        for at in self._positions(name):
            self._bits[at >> 3] |= 1 << (at & 7)

    def __contains__(self, name: str) -> bool:
        return all(self._bits[at >> 3] >> (at & 7) & 1 for at in self._positions(name))

    def _positions(self, name: str) -> tuple[int, int, int]:
        value = int(name, 16)
        return value & self._mask, value >> 40 & self._mask, value >> 80 & self._mask
