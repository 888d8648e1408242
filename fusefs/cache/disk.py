"""The folder of the object files: what threads do there.

    FOLDER/ab/abcdef….GENERATION

All calls block, and all may raise OSError. They know nothing of what a file
holds; the name says which version it is of, and the generation tells it from
all other files that ever had this name.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from fusefs.cache.integrity.probes import DirectReader

logger = logging.getLogger("fusefs.cache")

FOLDERS = 256  # by the first two digits of the name

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """The object files of one cache directory, of all mounts that share it.

    A descriptor that it gives out carries a shared flock, which keeps the
    other mounts from unlinking the file.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder, or make it."""
        self._folder = folder
        for index in range(FOLDERS):
            (folder / f"{index:02x}").mkdir(parents=True, exist_ok=True)

    def create(self, name: str, size: int) -> tuple[int, str, int]:
        """Create an empty file of a new generation: (descriptor, generation, st_ino)."""
        generation = f"{random.getrandbits(32):08x}"
        path = self._path(name, generation)
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.ftruncate(fd, size)
            return fd, generation, os.fstat(fd).st_ino
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise

    def take_in(self, name: str, path: str) -> tuple[str, int]:
        """Give another file of this disk a new generation of a name: (generation, st_ino)."""
        generation = f"{random.getrandbits(32):08x}"
        target = self._path(name, generation)
        os.rename(path, target)
        return generation, os.stat(target).st_ino

    def rename(self, name: str, generation: str, new_name: str) -> None:
        """Let a file be that of another name; it stays the same generation."""
        os.rename(self._path(name, generation), self._path(new_name, generation))

    def open(self, name: str, generation: str, st_ino: int, size: int) -> int:
        """The descriptor of a file that is really there, or -1."""
        try:
            fd = os.open(self._path(name, generation), _FLAGS)
        except FileNotFoundError:
            return -1
        fcntl.flock(fd, fcntl.LOCK_SH)
        found = os.fstat(fd)
        # Between open and flock another mount may have unlinked it.
        if found.st_nlink and found.st_ino == st_ino and found.st_size == size:
            return fd
        os.close(fd)
        return -1

    def open_to_examine(self, name: str, generation: str, *, is_direct: bool) -> DirectReader:
        """A file to be read; with `is_direct` past the page cache."""
        return DirectReader(self._path(name, generation), is_direct=is_direct)

    def unlink(self, name: str, generation: str) -> int | None:
        """Unlink a file: None if a mount uses it, a descriptor if it is mapped, else -1."""
        path = self._path(name, generation)
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        # Whoever waits for the lock shall see that the file has gone.
        fcntl.flock(fd, fcntl.LOCK_UN)
        if is_unused(fd):
            os.close(fd)
            return -1
        return fd

    def drop(self, name: str, generation: str) -> None:
        """Unlink a file of ours that nobody else knows."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name, generation))

    def sync(self, name: str, generation: str) -> bool:
        """Have a file's bytes safe against a power cut; False if it is gone or the disk failed."""
        try:
            fd = os.open(self._path(name, generation), _FLAGS)
        except OSError:
            return False
        try:
            os.fdatasync(fd)
        except OSError as error:
            logger.info("can't sync %s: %s", name, error.strerror)
            return False
        finally:
            os.close(fd)
        return True

    def has_inode(self, name: str, generation: str, st_ino: int) -> bool:
        """Whether a file is there and is this one."""
        try:
            return os.stat(self._path(name, generation)).st_ino == st_ino
        except OSError:
            return False

    def generation_of(self, name: str, st_ino: int) -> str | None:
        """The generation of the file of a name that has this inode."""
        with os.scandir(self._folder / name[:2]) as entries:
            for entry in entries:
                base, _, generation = entry.name.partition(".")
                if base == name and entry.inode() == st_ino:
                    return generation
        return None

    def listed(self, folder: int) -> list[tuple[str, str]]:
        """The (name, generation) of each file in one of the folders."""
        entries = (entry.partition(".") for entry in os.listdir(self._folder / f"{folder:02x}"))
        return [(name, generation) for name, _, generation in entries]

    def remove_orphan(
        self, name: str, generation: str, age_s: float, is_known: Callable[[], bool]
    ) -> None:
        """Remove a file that nobody uses, that is older than `age_s`, and not known."""
        path = self._path(name, generation)
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(fd).st_mtime > age_s and not is_known():
                os.unlink(path)
        except OSError as error:
            # Locked: somebody uses it. The rest is for the next start.
            logger.debug("%s stays: %s", path, error)
        finally:
            os.close(fd)

    def _path(self, name: str, generation: str) -> str:
        # By hand: pathlib takes longer than the disk does.
        return f"{self._folder}/{name[:2]}/{name}.{generation}"


def is_unused(fd: int) -> bool:
    """Whether no other open or mapping of the file is left, as the kernel knows it.

    A write lease is granted to the only user alone (tried on ext4).
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no leases: believe that it is
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
