"""Files of random bytes that tests send."""

import os
from collections.abc import Callable
from pathlib import Path


class LocalFile:
    """A file of random bytes, open for reading."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.write_bytes(os.urandom(size))
        self.fd = os.open(path, os.O_RDONLY)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def data(self) -> bytes:
        return self.path.read_bytes()

    def change(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def append(self, size: int) -> None:
        with self.path.open("ab") as file:
            file.write(os.urandom(size))


MakeFile = Callable[[int], LocalFile]
