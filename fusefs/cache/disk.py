"""Disk operations on the cache directory and its object files. They run in threads.

    DIRECTORY/format
    DIRECTORY/PRINCIPAL/objects/ab/abcdef….GENERATION

All calls block, and those of `Disk` may raise OSError. The content of a file
does not matter here: its name is a hash of the object version, and the generation
distinguishes it from all other files that ever had this name.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import TypeVar

import trio

from fusefs.cache.cached_file import OpenFile
from fusefs.cache.catalog import Catalog
from fusefs.linux import files
from fusefs.linux.descriptors import check_unreserved

logger = logging.getLogger("fusefs.cache")

T = TypeVar("T")

FORMAT_MARK = b"fusefs cache 1\n"
# State that mounts leave to later ones, mainly staged files; all else can be fetched again.
STATE = "mounts"
# The file that each mount locks in its part of the cache (`hold_in_use`).
IN_USE = "in-use"

FOLDERS = 256  # by the first two digits of the name
# A file without a row is removed at this age: no row waits so long to be written to the catalog.
ORPHAN_AGE_S = 15.0

# Disk accesses that take longer than this are slow.
SLOW_S = 0.02
SLOW_IN_THREAD_S = 0.25
# After a slow access, accesses go to threads for this long. The time doubles, up to the maximum,
# while the next access in the event loop is slow again, as each of these delays the event loop.
FIRST_IN_THREADS_S = 0.1
LONGEST_IN_THREADS_S = 3.2
# After this long without a slow access the disk has caught up.
FORGET_S = 5.0

# struct flock, for OFD locks: kind, whence, start, length (0: to the end), pid (0). The lock
# belongs to the open file description, which the kernel shares after registration (passthrough).
_LOCK = struct.Struct("hhqqi4x")

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """The cache files of one principal, for all mounts that share the directory.

    The returned descriptors carry a read lock, which keeps other mounts
    from unlinking the file. Each mount locks a byte of its own, so that it can
    distinguish its locks, including those that the kernel holds, from other mounts'.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder if it does not exist.

        Its subfolders are created when needed: creating all of them would be most of the
        time that it takes to open an empty cache.
        """
        self.folder = folder
        self._byte = 1  # the lock byte of mounts that take no files out
        folder.mkdir(parents=True, exist_ok=True)

    def lock_as(self, mount: str) -> None:
        """Set the byte to lock in files opened from now on; all daemons of `mount` use the same."""
        digest = blake2b(mount.encode(), digest_size=8).digest()
        self._byte = 2 + (int.from_bytes(digest, "big") >> 2)

    def create(self, name: str, size: int) -> OpenFile:
        """Create a sparse file of `size` bytes under a new generation, and open it."""
        path = self.new_path(name)
        fd = self._with_folder(name, partial(os.open, path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return self.created(path, fd)

    def new_path(self, name: str) -> str:
        """The path for a file of this name with a new generation; does not create the file."""
        check_unreserved()
        return self.path(name, f"{random.getrandbits(32):08x}")

    def created(self, path: str, fd: int) -> OpenFile:
        """Lock the new file `fd`, created at a `new_path`; return an `OpenFile` without ranges."""
        try:
            self._note_use(fd)
            return OpenFile(fd, path.rpartition(".")[2], os.fstat(fd).st_ino, b"")
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise

    def adopt(self, name: str, path: str) -> tuple[str, int]:
        """Move the file at `path` on the same disk into the cache; return (generation, st_ino)."""
        generation = f"{random.getrandbits(32):08x}"
        target = self.path(name, generation)
        self._with_folder(name, partial(os.rename, path, target))
        return generation, os.stat(target).st_ino

    def is_shared(self, fd: int) -> bool:
        """True if another mount holds a lock on the open file `fd`."""
        for start, length in ((0, self._byte), (self._byte + 1, 0)):
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
            if _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK:
                return True
        return False

    def _note_use(self, fd: int) -> None:
        use = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, self._byte, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, use)

    def rename(self, name: str, generation: str, new_name: str) -> None:
        """Rename a cache file to NEW_NAME.GENERATION, as its object has a new version."""
        paths = self.path(name, generation), self.path(new_name, generation)
        self._with_folder(new_name, partial(os.rename, *paths))

    def open(self, name: str, generation: str, st_ino: int, size: int) -> int:
        """Open and lock the file with this inode number and size; return its descriptor, or -1."""
        check_unreserved()
        path = self.path(name, generation)
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            return -1
        try:
            self._note_use(fd)
            found = os.fstat(fd)
            # Between open and lock, another mount may have unlinked the file or taken it out.
            is_there = os.stat(path).st_ino == found.st_ino
        except FileNotFoundError:
            is_there = False
        except OSError:
            os.close(fd)
            raise
        if is_there and found.st_ino == st_ino and found.st_size == size:
            return fd
        os.close(fd)
        return -1

    def unlink(self, name: str, generation: str) -> int | None:
        """Unlink a file unless locked (None); return a descriptor if a program maps it, else -1."""
        path = self.path(name, generation)
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            return -1
        try:
            _lock(fd, fcntl.F_WRLCK)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            # Mounts that wait for the lock then notice that the file is gone.
            _lock(fd, fcntl.F_UNLCK)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)  # also ends the lock, for which an open of the file would wait
            raise
        if is_unused(fd):
            os.close(fd)
            return -1
        return fd

    def drop(self, name: str, generation: str) -> None:
        """Unlink a file that no other mount knows; no error if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name, generation))

    def sync(self, name: str, generation: str) -> bool:
        """Call fdatasync on a file; False if the file is gone or the disk failed."""
        try:
            fd = os.open(self.path(name, generation), _FLAGS)
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
        """True if the file exists and has this inode number."""
        try:
            return os.stat(self.path(name, generation)).st_ino == st_ino
        except OSError:
            return False

    def generation_of(self, name: str, st_ino: int) -> str | None:
        """Find the generation of the file with this name and inode number, or None."""
        with contextlib.suppress(OSError), os.scandir(self.folder / name[:2]) as entries:
            for entry in entries:
                base, _, generation = entry.name.partition(".")
                if base == name and entry.inode() == st_ino:
                    return generation
        return None

    def listed(self, folder: int) -> list[tuple[str, str]]:
        """List the (name, generation) of each file in the subfolder with this number."""
        try:
            entries = os.listdir(self.folder / f"{folder:02x}")
        except FileNotFoundError:
            return []
        parts = (entry.partition(".") for entry in entries)
        return [(name, generation) for name, _, generation in parts]

    def remove_orphan(
        self, name: str, generation: str, age_s: float, is_known: Callable[[], bool]
    ) -> None:
        """Remove a file older than `age_s` seconds, unless in use, or known to the catalog."""
        path = self.path(name, generation)
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            return
        try:
            _lock(fd, fcntl.F_WRLCK)
            if time.time() - os.fstat(fd).st_mtime > age_s and not is_known():
                os.unlink(path)
        except OSError as error:
            # A locked file is in use. After other errors the next start tries again.
            logger.debug("%s stays: %s", path, error)
        finally:
            os.close(fd)

    def _with_folder(self, name: str, make_file: Callable[[], T]) -> T:
        """Call `make_file`, which creates a file of this name; create its subfolder if missing."""
        try:
            return make_file()
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder / name[:2])
            return make_file()

    def path(self, name: str, generation: str) -> str:
        # Not with pathlib, which takes longer than the disk does.
        return f"{self.folder}/{name[:2]}/{name}.{generation}"


def _lock(fd: int, kind: int) -> None:
    """Lock (`kind` F_WRLCK) or unlock (F_UNLCK) an open file; BlockingIOError if it is in use."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0))


def is_unused(fd: int) -> bool:
    """True if `fd` is the only open or mapping of its file: only then ext4 grants a write lease."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no leases: assume that it is unused
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


async def sweep_orphans(disk: Disk, catalog: Catalog, is_ours: Callable[[str, str], bool]) -> None:
    """Remove old files not in the catalog and not `is_ours(name, generation)`; raises OSError."""
    for folder in range(FOLDERS):
        for name, generation in await trio.to_thread.run_sync(disk.listed, folder):
            if not is_ours(name, generation):
                await trio.to_thread.run_sync(_remove, disk, catalog, name, generation)
        await trio.sleep(0.01)


def _remove(disk: Disk, catalog: Catalog, name: str, generation: str) -> None:
    def is_known() -> bool:
        row = catalog.find(name)
        # A catalog in memory does not have the rows of other mounts.
        return catalog.is_in_memory or (row is not None and row.generation == generation)

    try:
        disk.remove_orphan(name, generation, ORPHAN_AGE_S, is_known)
    except (sqlite3.Error, UnicodeEncodeError) as error:
        logger.debug("%r stays: %s", name, error)  # the next start tries again


def hold_in_use(directory: Path) -> int:
    """Lock a principal's part of the cache as in use (purge.py); return the descriptor or -1."""
    fd = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / IN_USE, flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError as error:
        logger.info("%s can't be locked: %s", directory / IN_USE, error.strerror)
    return fd


class DiskLatency:
    """Measures disk accesses of any thread, and decides if the event loop may make small ones.

    A write into the page cache takes microseconds, less than handing it to a thread, until the
    disk falls behind and the kernel throttles writers. A long write counts as slow only if its
    thread slept (a voluntary context switch), not if it lost the processor to other threads.

    A thread also sleeps while it waits for the interpreter lock, which looks the same. So the
    limit for a write in a thread is much higher: otherwise many threads would keep all writes
    in threads, where each costs twice as much.
    """

    def __init__(self) -> None:
        self._slow_until = 0.0
        self._in_threads_s = FIRST_IN_THREADS_S

    @property
    def is_quick(self) -> bool:
        """True if no recent access was slow, so that the event loop may make small accesses."""
        return time.monotonic() >= self._slow_until

    def timed(self, access: Callable[[], T], *, is_in_loop: bool) -> T:
        """Make an access in this thread, the event loop's if `is_in_loop`; return its result."""
        sleeps, began = getrusage(RUSAGE_THREAD).ru_nvcsw, time.monotonic()
        try:
            return access()
        finally:
            now = time.monotonic()
            limit_s = SLOW_S if is_in_loop else SLOW_IN_THREAD_S
            if now - began > limit_s and getrusage(RUSAGE_THREAD).ru_nvcsw > sleeps:
                if now - self._slow_until > FORGET_S:
                    self._in_threads_s = FIRST_IN_THREADS_S
                elif is_in_loop:
                    self._in_threads_s = min(LONGEST_IN_THREADS_S, 2 * self._in_threads_s)
                self._slow_until = max(self._slow_until, now + self._in_threads_s)


class CacheDirectoryError(Exception):
    """The cache directory can't be used; the message is for the user."""


@contextlib.contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CacheDirectoryError with a message for the user."""
    try:
        yield
    except OSError as error:
        raise CacheDirectoryError(
            f"can't use the cache directory {directory}: {error.strerror or error}"
        ) from error


def prepare_directory(directory: Path, *, in_any_case: bool = False) -> None:
    """Create the cache directory, or check that it is a cache and belongs to this user. Blocks.

    Raises CacheDirectoryError, or with `in_any_case` (a mount that is served already) logs it.
    """
    try:
        with usable(directory):
            _prepare(directory)
    except CacheDirectoryError as error:
        if not in_any_case:
            raise
        logger.warning("%s; the mount goes on with it", error)


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"the cache directory {directory} belongs to another user (uid {status.st_uid}):"
            " choose another with --cache-dir"
        )
    mark = directory / "format"
    if mark.exists():
        if mark.read_bytes() != FORMAT_MARK:
            raise CacheDirectoryError(
                f"the cache directory {directory} is of another version of fusefs, or damaged:"
                " remove it, or choose another with --cache-dir"
            )
        return
    names = {entry.name for entry in directory.iterdir()} - {"lost+found"}
    if not all(name.startswith("format.") for name in names):
        raise CacheDirectoryError(
            f"{directory} is not empty, and is not a cache of fusefs: choose another with"
            " --cache-dir"
        )
    # Only now: the directory belongs to this user and has no other use.
    directory.chmod(0o700)
    # Written atomically and durably: at a power cut the directory may have a staged file already.
    files.replace(mark, FORMAT_MARK, is_durable=True, suffix=f".{os.getpid()}")
