"""The offsets of directory entries (d_off), by which seekdir and the next daemon find an entry.

An offset itself tells the place of an entry, so that no memory is needed for each
entry of an open directory, of which there may be millions. The positions at which the
segments of a stream begin are numbered (*marks*, which the journal has as well);
0 is the directory's beginning. An offset is the number of the mark before an
entry and a checksum of the entry's name: seekdir searches the listing behind the
mark for a name with that checksum.
"""

from __future__ import annotations

from zlib import adler32, crc32

# No node id is as large. Offsets have 63 bits, the most that lseek takes.
_IS_OFFSET = 1 << 62
_CODE_BITS = 40
_CODE = (1 << _CODE_BITS) - 1
MOST_MARKS = (1 << 22) - 1


def base_of(mark: int) -> int:
    """The part that the offsets of all entries behind a mark have in common."""
    return _IS_OFFSET | mark << _CODE_BITS


def code_of(name: bytes) -> int:
    """The checksum of a name; names that differ only in four adjacent bytes never share it."""
    return crc32(name) << 8 | adler32(name) & 0xFF


def divided(offset: int) -> tuple[int, int] | None:
    """Split an offset into (mark's number, name's checksum); None for that of "." or ".."."""
    if not offset & _IS_OFFSET:
        return None
    return (offset & ~_IS_OFFSET) >> _CODE_BITS, offset & _CODE
