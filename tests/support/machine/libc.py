"""System calls that Python hides or softens, called as a C program does."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
_libc.telldir.restype = ctypes.c_long
_libc.telldir.argtypes = (ctypes.c_void_p,)
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.rewinddir.argtypes = (ctypes.c_void_p,)
_libc.closedir.argtypes = (ctypes.c_void_p,)
_libc.readdir.argtypes = (ctypes.c_void_p,)


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_ulong),
        ("d_off", ctypes.c_long),
        ("d_reclen", ctypes.c_ushort),
        ("d_type", ctypes.c_ubyte),
        ("d_name", ctypes.c_char * 256),
    )


_libc.readdir.restype = ctypes.POINTER(_Dirent)


class Mapping:
    """A shared, read-only mapping whose descriptor is closed right after mmap."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            self.size = os.fstat(fd).st_size
            address = _libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap")
            self._address: int = address
        finally:
            os.close(fd)

    def read(self, start: int, stop: int) -> bytes:
        return ctypes.string_at(self._address + start, min(stop, self.size) - start)

    def forget_pages(self) -> None:
        """Take the pages out of this process, so that the next access faults."""
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(self.size), 4)

    def close(self) -> None:
        _libc.munmap(self._address, self.size)


@contextmanager
def mapped(path: Path) -> Iterator[Mapping]:
    """A `Mapping` for a while."""
    mapping = Mapping(path)
    try:
        yield mapping
    finally:
        mapping.close()


class DirectoryStream:
    """opendir(3) and what goes with it."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            raise OSError(ctypes.get_errno(), "opendir", str(path))

    def __enter__(self) -> DirectoryStream:
        return self

    def __exit__(self, *_: object) -> None:
        _libc.closedir(self._stream)

    def read(self) -> tuple[str, int] | None:
        """The next name and its inode number; None at the end."""
        ctypes.set_errno(0)
        entry = _libc.readdir(self._stream)
        if not entry:
            if ctypes.get_errno():
                raise OSError(ctypes.get_errno(), "readdir")
            return None
        return os.fsdecode(entry.contents.d_name), entry.contents.d_ino

    def names(self) -> list[str]:
        """All names from here to the end."""
        found = []
        while (entry := self.read()) is not None:
            found.append(entry[0])
        return found

    def tell(self) -> int:
        position: int = _libc.telldir(self._stream)
        return position

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)
