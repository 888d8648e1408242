"""The cache directory: one sparse file per object version, and which ranges of it are there.

A file is as long as its object, is filled range by range, and is never
changed in any other way: it is not punched, truncated or rewritten, for the
kernel may be reading it on behalf of a program (passthrough) without our
knowledge. It is evicted whole, by unlink. Its name is a hash of everything
that makes the content (endpoint, bucket, key, ETag, size) plus a random
generation, so a file that was evicted and fetched again is another file.

Whoever uses a file *pins* it. While a file is pinned its descriptor carries a
shared flock, which keeps other mounts that share the directory from evicting
it; a file registered for passthrough keeps the lock through the kernel.

The state of all files is mirrored in memory and belongs to the event loop.
The catalog learns of new ranges in batches; what a killed daemon had not told
it is downloaded again.

    DIRECTORY/format              "fusefs cache 1"
    DIRECTORY/PRINCIPAL/catalog.sqlite3
    DIRECTORY/PRINCIPAL/objects/ab/abcdef….GENERATION
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Container
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio

from fusefs.cache.catalog import Catalog, DamagedCatalogError, Row
from fusefs.cache.ranges import RangeMap
from fusefs.store.base import ObjectVersion

if TYPE_CHECKING:
    from fusefs.cache.eviction import Space
    from fusefs.cache.fetch import Download

logger = logging.getLogger("fusefs.cache")

Result = TypeVar("Result")

FORMAT_MARK = "fusefs cache 1\n"
RECORD_EVERY_S = 2.0
TOUCH_EVERY = 30  # records
# A complete file is left alone this long before it is synced: what is being
# read for the first time should have the disk for itself.
SYNC_AFTER_S = 5.0
# How many files are made safe in one go.
SYNC_AT_ONCE = 256
# A file that was fetched ahead stays open this long for who wants it, and so many of them.
LINGER_S = 10.0
MOST_LINGERING = 512
# Files without a row are swept when they are older than any batch of the catalog.
ORPHAN_AGE_S = 15.0


class CacheDirectoryError(Exception):
    """The cache directory can't be used; the message is for the user."""


class CacheFile:
    """One file of the cache, there or about to be. Belongs to the event loop.

    `fd` is -1 while nobody needs it open; `pins` counts users. `is_kept` turns
    False when the disk refuses the file: its version is then read uncached.
    `is_ours` turns False when another mount keeps the same version: this file
    then goes with its last user.
    """

    __slots__ = (
        "_opening",
        "downloads",
        "fd",
        "generation",
        "is_kept",
        "is_ours",
        "name",
        "pins",
        "present",
        "recorded",
        "size",
        "st_ino",
        "used_at",
        "version",
        "written_at",
    )

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.version: ObjectVersion | None = None
        self.generation = ""
        self.st_ino = 0
        self.fd = -1
        self.pins = 0
        self.present = RangeMap()
        self.recorded = 0  # bytes of `present` that the catalog knows
        self.is_kept = True
        self.is_ours = True
        self.used_at = 0.0
        self.written_at = 0.0
        self._opening: trio.Lock | None = None
        self.downloads: list[Download] = []

    @property
    def is_complete(self) -> bool:
        return self.present.total == self.size

    @property
    def opening(self) -> trio.Lock:
        """Held by whoever opens or creates the file."""
        if self._opening is None:
            self._opening = trio.Lock()
        return self._opening

    def forget(self) -> None:
        """Nothing of it is on the disk any more."""
        self.generation = ""
        self.present = RangeMap()
        self.recorded = 0

    def row(self) -> Row:
        ranges = self.present.pack()
        return Row(self.name, self.generation, self.st_ino, self.size, ranges, self.used_at)


class OpenFile(NamedTuple):
    """A file as a thread has opened it; `ranges` is None if it is the one that was known."""

    fd: int
    generation: str
    st_ino: int
    ranges: bytes | None


class FileCache:
    """All files of one principal's part of a cache directory.

    `identity` is what makes objects of different stores different (endpoint
    and bucket). `disk` limits the threads that wait for the disk.
    """

    def __init__(self, directory: Path, identity: str, space: Space) -> None:
        """Open the directory and read the catalog. Blocks.

        Raises:
            CacheDirectoryError: it can't be used; the message says why.
        """
        self.directory = directory
        self.space = space
        self._identity = identity
        self._objects = directory / "objects"
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        try:
            for index in range(256):
                (self._objects / f"{index:02x}").mkdir(parents=True, exist_ok=True)
            self._catalog = Catalog(directory / "catalog.sqlite3", boot_id)
            rows = self._catalog.rows()
            space.committed = self._catalog.total_bytes()
        except DamagedCatalogError as error:
            raise CacheDirectoryError(
                f"the cache directory {directory} is damaged ({error}): remove it"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise CacheDirectoryError(
                f"can't use the cache directory {directory}: {error}"
            ) from error
        # In the order of their last use, oldest first.
        self._files = {row.name: _from_row(row) for row in rows}
        self._dirty: dict[str, CacheFile] = {}  # with ranges that the catalog does not know
        self._used: dict[str, CacheFile] = {}  # since the catalog was last told
        # Rows whose files are gone, to be removed with the next record.
        self._lost: list[tuple[str, str, int]] = []
        self._unsynced = {row.name: self._files[row.name] for row in rows if not row.is_synced}
        self._disk = trio.CapacityLimiter(16)
        self._database = trio.CapacityLimiter(1)
        self.warning: str | None = None
        # Called before an eviction; whoever holds the file open in the kernel lets go of it.
        self.on_evict: Callable[[CacheFile], None] = lambda _file: None
        self.evicted = 0
        self._lingering: dict[str, tuple[CacheFile, float]] = {}  # and until when, longest first
        # Whether other mounts write in this directory: only then is the catalog
        # asked for files that nothing is known of.
        self._has_neighbours = False
        space.attach(self)

    def __len__(self) -> int:
        return len(self._files)

    def name_of(self, version: ObjectVersion) -> str:
        told = "\0".join((self._identity, version.key, version.etag, str(version.size)))
        return blake2b(told.encode(), digest_size=16).hexdigest()

    def find(self, version: ObjectVersion) -> CacheFile | None:
        """The file of a version if it is known."""
        return self._files.get(self.name_of(version))

    async def whole_files(self, inodes: Container[int]) -> dict[int, CacheFile]:
        """The complete files that have one of these inode numbers, as the disk tells."""
        files = [one for one in self._files.values() if one.is_complete and one.st_ino in inodes]

        def check() -> dict[int, CacheFile]:
            return {file.st_ino: file for file in files if _has_inode(self._path(file), file)}

        return await trio.to_thread.run_sync(check, limiter=self._disk)

    def pin(self, version: ObjectVersion) -> CacheFile:
        """Return the file of a version, made known if it is not; undone by `unpin`.

        Asks the disk nothing: `ensure_open` does.
        """
        name = self.name_of(version)
        file = self._files.get(name)
        if file is None:
            file = CacheFile(name, version.size)
        file.version = version
        self.pin_again(file)
        return file

    def pin_again(self, file: CacheFile) -> None:
        """One more user of a file that is at hand."""
        file.pins += 1
        file.used_at = time.time()
        self._used[file.name] = file
        # Moves it to the end: the order is that of the last use.
        self._files.pop(file.name, None)
        self._files[file.name] = file

    def unpin(self, file: CacheFile) -> None:
        file.pins -= 1
        if file.pins:
            return
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1
        if file.present.total and file.is_kept and file.is_ours:
            return
        # Nothing of it is worth keeping, or it can't be kept under its name.
        if self._files.get(file.name) is file:
            del self._files[file.name]
        self._forget_unrecorded(file)
        if file.generation:
            try:
                self._path(file).unlink(missing_ok=True)
            except OSError as error:
                self.warn(error.strerror or str(error))
            if file.recorded:
                self._lost.append((file.name, file.generation, file.st_ino))

    def is_new(self, file: CacheFile) -> bool:
        """Whether nothing of a file is on the disk, so that who brings its bytes may create it."""
        return file.is_kept and not file.generation and not self._has_neighbours

    def linger(self, file: CacheFile) -> None:
        """Keep a pinned file open for a while longer: it was fetched ahead of its first open."""
        if file.name not in self._lingering:
            self.pin_again(file)
            self._lingering[file.name] = (file, time.monotonic() + LINGER_S)
            if len(self._lingering) > MOST_LINGERING:
                self._let_go(1)

    def _let_go(self, count: int) -> None:
        """Close those that have lingered longest."""
        for name in list(islice(self._lingering, count)):
            self.unpin(self._lingering.pop(name)[0])

    async def ensure_open(self, file: CacheFile) -> bool:
        """Have the file's descriptor open; the caller has it pinned.

        Returns False if the disk refuses it (`is_kept` is then False too).
        What is present may turn out to be less than it was: another mount may
        have evicted the file. Cancelling leaves it open or closed, whole.
        """
        if file.fd >= 0:
            return True
        if not file.is_kept:
            return False
        async with file.opening:
            if file.fd >= 0 or not file.is_kept:
                return file.fd >= 0
            try:
                found = await trio.to_thread.run_sync(self._open, file, limiter=self._disk)
            except sqlite3.Error as error:
                self.refuse(file, OSError(errno.EIO, f"its catalog can't be read ({error})"))
                return False
            except OSError as error:
                self.refuse(file, error)
                return False
            self.adopt(file, found)
            return True

    def refuse(self, file: CacheFile, error: OSError) -> None:
        """The disk did not take the file: read its version without a cache from now on."""
        file.is_kept = False
        self.warn(error.strerror or str(error))

    def _forget_unrecorded(self, file: CacheFile) -> None:
        """What the catalog was to be told of a file, it need not know any more."""
        if self._dirty.get(file.name) is file:
            del self._dirty[file.name]
        if self._unsynced.get(file.name) is file:
            del self._unsynced[file.name]
        self.space.uncommitted -= file.present.total - file.recorded

    def arrived(self, file: CacheFile, start: int, stop: int) -> int:
        """Note that the bytes [start, stop) have been written; return how many are new."""
        new = file.present.add(start, stop)
        file.written_at = time.monotonic()
        self._dirty[file.name] = file
        self._unsynced[file.name] = file
        self.space.took(new)
        return new

    async def trust(self, file: CacheFile, st_ino: int) -> None:
        """Know a pinned file as whole, since the kernel reads it; `st_ino` says which one it is.

        The process that filled it may have died before it told the catalog.
        """
        if file.is_complete and file.st_ino == st_ino:
            return
        found = await trio.to_thread.run_sync(
            self._generation_of, file.name, st_ino, limiter=self._disk
        )
        if found is not None:
            self._forget_unrecorded(file)
            file.forget()
            file.generation, file.st_ino = found, st_ino
            self.arrived(file, 0, file.size)

    async def run(self) -> None:
        """Keep the catalog up to date and the space within its limits, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep_later)
            while True:
                for _ in range(TOUCH_EVERY):
                    await trio.sleep(RECORD_EVERY_S)
                    await self.record()
                    now = time.monotonic()
                    self._let_go(sum(until <= now for _, until in self._lingering.values()))
                    await self._sync(SYNC_AFTER_S)
                    await self.space.tend()
                await self._touch()

    async def record(self) -> None:
        """Tell the catalog of everything that has arrived, and see what others have."""
        files = [file for file in self._dirty.values() if file.generation and file.is_ours]
        lost, self._lost = self._lost, []
        self._dirty = {}
        rows = [file.row() for file in files]
        counted = [file.present.total for file in files]

        def update() -> tuple[list[bool], int, bool]:
            for row in lost:
                self._catalog.remove(*row)
            accepted, total = (
                self._catalog.record(rows) if rows else ([], self._catalog.total_bytes())
            )
            return accepted, total, self._catalog.has_changed()

        answer = await self._in_database(update)
        if answer is None:
            self._dirty = {file.name: file for file in files if file.generation} | self._dirty
            self._lost += lost
            return
        accepted, self.space.committed, has_changed = answer
        self._has_neighbours = self._has_neighbours or has_changed
        for file, row, is_ours, bytes_now in zip(files, rows, accepted, counted, strict=True):
            if file.generation != row.generation:
                continue  # evicted meanwhile
            if is_ours:
                self.space.uncommitted -= bytes_now - file.recorded
                file.recorded = bytes_now
            else:
                file.is_ours = False

    async def aclose(self, *, sync: bool = True) -> None:
        """Record everything and (with `sync`) make it safe; takes a few seconds at most."""
        with trio.CancelScope(shield=True):
            await self.record()
            await self._touch()
            with trio.move_on_after(SYNC_AFTER_S):
                while sync and await self._sync(idle_s=0.0):
                    pass
            for file in self._files.values():
                if file.fd >= 0:
                    os.close(file.fd)
                    file.fd = -1
            await self._in_database(self._catalog.close)

    async def learn(self) -> None:
        """Get to know the files that other mounts have recorded in this directory."""
        rows = await self._in_database(self._catalog.rows)
        known = {row.name: _from_row(row) for row in rows or [] if row.name not in self._files}
        # What others used is as good as ours: behind what nobody has used for long.
        self._files = known | self._files

    # Eviction: what space.py asks for.

    def victims(self) -> list[CacheFile]:
        """The files that nobody uses, least recently used first."""
        self._let_go(len(self._lingering))
        return [file for file in self._files.values() if not file.pins and file.present.total]

    async def evict(self, file: CacheFile) -> int:
        """Unlink a file that nobody has pinned; return a descriptor if it is still mapped.

        The descriptor (else -1) is for `space`, which closes it when the
        kernel has let go of the blocks. A file that another mount uses, or
        that is opened in this moment, stays. Not cancelled halfway.
        """
        self.on_evict(file)
        generation = file.generation
        fd: int | None = None
        with trio.CancelScope(shield=True):
            try:
                fd = await trio.to_thread.run_sync(self._unlink, file, limiter=self._disk)
            except OSError as error:
                self.warn(error.strerror or str(error))
            if fd is not None:
                total = await self._in_database(
                    self._catalog.remove, file.name, generation, file.st_ino
                )
                self.space.committed = self.space.committed if total is None else total
        if fd is None:
            return -1
        if file.generation == generation:
            self._forget_unrecorded(file)
            file.forget()
        if not file.pins and self._files.get(file.name) is file:
            del self._files[file.name]
        self.evicted += 1
        return fd

    # What runs in threads.

    def _path(self, file: CacheFile) -> Path:
        return self._objects / file.name[:2] / f"{file.name}.{file.generation}"

    def _open(self, file: CacheFile) -> OpenFile:
        """Open the file, another mount's, or a new one."""
        for generation, st_ino, ranges in self._candidates(file):
            fd = self._open_existing(file, generation, st_ino)
            if fd >= 0:
                return OpenFile(fd, generation, st_ino, ranges)
            # A row without its file would keep the version from ever being kept again.
            self._catalog.remove(file.name, generation, st_ino)
        return self.create(file)

    def _open_existing(self, file: CacheFile, generation: str, st_ino: int) -> int:
        """The descriptor of a file that is really there, or -1."""
        path = self._objects / file.name[:2] / f"{file.name}.{generation}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return -1
        fcntl.flock(fd, fcntl.LOCK_SH)
        found = os.fstat(fd)
        # Between open and flock another mount may have evicted it.
        if found.st_nlink and found.st_ino == st_ino and found.st_size == file.size:
            return fd
        os.close(fd)
        return -1

    def _generation_of(self, name: str, st_ino: int) -> str | None:
        """The generation of the file of this name that has this inode."""
        with os.scandir(self._objects / name[:2]) as entries:
            for entry in entries:
                base, _, generation = entry.name.partition(".")
                if base == name and entry.inode() == st_ino:
                    return generation
        return None

    def _candidates(self, file: CacheFile) -> list[tuple[str, int, bytes | None]]:
        candidates: list[tuple[str, int, bytes | None]] = []
        if file.generation:
            candidates.append((file.generation, file.st_ino, None))
        row = self._catalog.find(file.name)
        if row is not None and row.generation != file.generation:
            candidates.append((row.generation, row.st_ino, row.ranges))
        return candidates

    def create(self, file: CacheFile) -> OpenFile:
        """Create an empty file for a version, under a new generation. Blocks.

        Raises:
            OSError: the disk refuses it.
        """
        generation = f"{random.getrandbits(32):08x}"
        path = self._objects / file.name[:2] / f"{file.name}.{generation}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.ftruncate(fd, file.size)
            return OpenFile(fd, generation, os.fstat(fd).st_ino, b"")
        except OSError:
            os.close(fd)
            path.unlink()
            raise

    def adopt(self, file: CacheFile, found: OpenFile) -> None:
        """Take over what a thread has opened or created."""
        file.fd = found.fd
        if found.ranges is None:
            return
        # Not the file that the mirror knew: what it knew of ranges went with it.
        self.space.uncommitted -= file.present.total - file.recorded
        file.generation, file.st_ino = found.generation, found.st_ino
        file.present = RangeMap.unpack(found.ranges)
        file.recorded = file.present.total

    def _unlink(self, file: CacheFile) -> int | None:
        """Unlink a file: None if another mount uses it, a descriptor if it is mapped, else -1."""
        path = self._path(file)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        path.unlink(missing_ok=True)
        # Whoever waits for the lock shall see that the file has gone.
        fcntl.flock(fd, fcntl.LOCK_UN)
        if is_unused(fd):
            os.close(fd)
            return -1
        return fd

    async def _touch(self) -> None:
        """Tell the catalog what has been used, for the order of eviction after a restart."""
        used, self._used = self._used, {}
        times = [(file.used_at, file.name, file.generation) for file in used.values()]
        await self._in_database(self._catalog.touch, times)

    async def _sync(self, idle_s: float) -> bool:
        """Make files safe against a power cut that have been left alone; tell if there were any."""
        now = time.monotonic()
        idle = [
            file
            for file in islice(self._unsynced.values(), SYNC_AT_ONCE)
            if now - file.written_at >= idle_s
            and not file.downloads
            and file.recorded == file.present.total
        ]
        for file in idle:
            del self._unsynced[file.name]  # it comes back if more arrives from here on
        rows = [(file.row(), self._path(file)) for file in idle]

        def sync_all() -> list[Row]:
            return [row for row, path in rows if _fdatasync(path)]

        if rows:
            synced = await trio.to_thread.run_sync(sync_all, limiter=self._disk)
            await self._in_database(self._catalog.mark_synced, synced)
        return bool(rows)

    async def _sweep_later(self) -> None:
        """Sweep when what the last daemon left has come of age."""
        await trio.sleep(2 * ORPHAN_AGE_S)
        await self._sweep_orphans()

    async def _sweep_orphans(self) -> None:
        """Remove files that no row tells of, as a killed daemon leaves them."""
        for index in range(256):
            folder = self._objects / f"{index:02x}"
            try:
                names = await trio.to_thread.run_sync(os.listdir, folder, limiter=self._disk)
            except OSError as error:
                self.warn(error.strerror or str(error))
                return
            for entry in names:
                name, _, generation = entry.partition(".")
                file = self._files.get(name)
                if file is None or file.generation != generation:
                    await trio.to_thread.run_sync(
                        self._remove_orphan, folder / entry, limiter=self._disk
                    )
            await trio.sleep(0.01)

    def _remove_orphan(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name, _, generation = path.name.partition(".")
            row = self._catalog.find(name)
            is_old = time.time() - os.fstat(fd).st_mtime > ORPHAN_AGE_S
            if is_old and (row is None or row.generation != generation):
                path.unlink()
        except (OSError, sqlite3.Error) as error:
            # Locked: somebody uses it. The rest is for the next start.
            logger.debug("%s stays: %s", path, error)
        finally:
            os.close(fd)

    def warn(self, why: str) -> None:
        """The cache does not do what it is for: said once."""
        if self.warning is None:
            self.warning = f"the cache {self.directory} does not work, reading without it: {why}"
            logger.warning("%s", self.warning)

    async def _in_database(self, function: Callable[..., Result], *args: object) -> Result | None:
        """Call the catalog in its thread; None, and a warning, if it fails. Not cancelled."""
        with trio.CancelScope(shield=True):
            try:
                return await trio.to_thread.run_sync(function, *args, limiter=self._database)
            except sqlite3.Error as error:
                self.warn(f"its catalog can't be written ({error})")
        return None


def _has_inode(path: Path, file: CacheFile) -> bool:
    try:
        return path.stat().st_ino == file.st_ino
    except OSError:
        return False


def _fdatasync(path: Path) -> bool:
    """Have a file's bytes on the disk; False if it is gone or the disk failed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.fdatasync(fd)
    except OSError as error:
        logger.info("can't sync %s: %s", path, error.strerror)
        return False
    finally:
        os.close(fd)
    return True


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


def prepare_directory(directory: Path) -> None:
    """Create the cache directory, or check that it is one, and ours alone. Blocks.

    Raises:
        CacheDirectoryError: it can't be used; the message says why.
    """
    mark = directory / "format"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise CacheDirectoryError(
                f"the cache directory {directory} belongs to another user (uid {status.st_uid}):"
                " choose another with --cache-dir"
            )
        if mark.exists():
            if mark.read_text() != FORMAT_MARK:
                raise CacheDirectoryError(
                    f"the cache directory {directory} is damaged or of another version: remove it"
                )
        elif {entry.name for entry in directory.iterdir()} - {"lost+found"}:
            raise CacheDirectoryError(
                f"{directory} is not empty and no cache of fusefs: choose another with --cache-dir"
            )
        # Only now that it is known to be ours, and nobody else's.
        directory.chmod(0o700)
        mark.write_text(FORMAT_MARK)
    except OSError as error:
        raise CacheDirectoryError(
            f"can't use the cache directory {directory}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise CacheDirectoryError(
            f"the cache directory {directory} is damaged: remove it"
        ) from error


def _from_row(row: Row) -> CacheFile:
    file = CacheFile(row.name, row.size)
    file.generation, file.st_ino = row.generation, row.st_ino
    file.present = RangeMap.unpack(row.ranges)
    file.recorded = file.present.total
    file.used_at = row.used_at
    return file
