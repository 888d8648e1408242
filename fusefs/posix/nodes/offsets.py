"""The offsets of directory entries (d_off), by which seekdir and the next daemon find an entry.

An open directory may have millions of entries, so no memory is spent on the offset of each entry:
the offset itself tells the entry's place. It consists of a mark's number and a checksum of the
entry's name. A *mark* is the position at which a segment of the listing begins; marks are numbered,
and recorded in the journal, and 0 is the directory's beginning. seekdir searches the listing
behind the mark for a name with that checksum.
"""

from __future__ import annotations

from zlib import adler32, crc32

# Node ids are smaller than this bit. Offsets have 63 bits, the most that lseek takes.
_IS_OFFSET = 1 << 62
_CODE_BITS = 40
_CODE = (1 << _CODE_BITS) - 1
MOST_MARKS = (1 << 22) - 1


def base_of(mark: int) -> int:
    """The bits that are equal in the offsets of all entries behind the mark of this number."""
    return _IS_OFFSET | mark << _CODE_BITS


def code_of(name: bytes) -> int:
    """The checksum of a name; names that differ only in four adjacent bytes never share it."""
    return crc32(name) << 8 | adler32(name) & 0xFF


def divided(offset: int) -> tuple[int, int] | None:
    """Split an offset into (mark's number, name's checksum); None for "." and ".."."""
    if not offset & _IS_OFFSET:
        return None
    return (offset & ~_IS_OFFSET) >> _CODE_BITS, offset & _CODE
