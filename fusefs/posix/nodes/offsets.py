"""The offsets of directory entries (d_off): how seekdir and the next daemon find a place again.

An offset tells where in its directory an entry stands, so that nothing has to be
kept for each entry of an open directory, of which there may be millions. The
places where segments begin that a stream has shown are numbered (*marks*, on record in the
journal); 0 is the directory's beginning. An offset is the number of the mark before an
entry and a checksum of its name: to go there is to look through the listing behind the
mark for a name with that checksum.
"""

from __future__ import annotations

from zlib import adler32, crc32

# No node id is as large; an offset has 63 bits, for lseek knows no others.
_IS_OFFSET = 1 << 62
_CODE_BITS = 40
_CODE = (1 << _CODE_BITS) - 1
MOST_MARKS = (1 << 22) - 1


def base_of(mark: int) -> int:
    """The common base of the offsets behind a mark."""
    return _IS_OFFSET | mark << _CODE_BITS


def code_of(name: bytes) -> int:
    """A checksum of a name; those that differ in four neighbouring bytes have different ones."""
    return crc32(name) << 8 | adler32(name) & 0xFF


def divided(offset: int) -> tuple[int, int] | None:
    """The mark and the checksum of an offset; None if it has none."""
    if not offset & _IS_OFFSET:
        return None
    return (offset & ~_IS_OFFSET) >> _CODE_BITS, offset & _CODE
