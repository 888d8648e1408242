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

The state of all files is mirrored in memory (cached_file.py) and belongs to the event
loop. What is done on the disk is in disk.py and runs in threads; what the
catalog has to be told is collected in catalog_writer.py.

    DIRECTORY/format              "fusefs cache 1"
    DIRECTORY/PRINCIPAL/catalog.sqlite3
    DIRECTORY/PRINCIPAL/objects/ab/abcdef….GENERATION
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Container
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fusefs.cache.cached_file import CHECKED_AT_OPEN, CacheFile, OpenFile
from fusefs.cache.catalog import Catalog, Row
from fusefs.cache.catalog_writer import Ledger
from fusefs.cache.directory import CacheDirectoryError
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.integrity.scrub import UseMark
from fusefs.cache.integrity.unreadable import Probing
from fusefs.cache.integrity.verify import Integrity
from fusefs.cache.lingering import Lingering
from fusefs.cache.opening import create, open_or_create
from fusefs.cache.ranges import RangeMap
from fusefs.cache.sweep import ORPHAN_AGE_S, sweep_orphans
from fusefs.store.interface import ObjectVersion

if TYPE_CHECKING:
    from fusefs.cache.quota import Space

logger = logging.getLogger("fusefs.cache")

RECORD_EVERY_S = 2.0
TOUCH_EVERY = 30  # records
# A complete file is left alone this long before it is synced: what is being
# read for the first time should have the disk for itself.
SYNC_AFTER_S = 5.0


class FileCache:
    """All files of one principal's part of a cache directory.

    `identity` is what makes objects of different stores different (endpoint
    and bucket).
    """

    def __init__(
        self, directory: Path, identity: str, space: Space, *, in_any_case: bool = False
    ) -> None:
        """Open the directory and read the catalog, `in_any_case` on a bad disk too. Blocks.

        Raises:
            CacheDirectoryError: it can't be used; the message says why.
        """
        self.directory = directory
        self.space = space
        self._identity = identity
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        try:
            self._disk = Disk(directory / "objects")
            self._catalog = Catalog(directory / "catalog.sqlite3", boot_id, in_any_case=in_any_case)
            rows, self._catalog.at_start = self._catalog.at_start, []
            space.committed = self._catalog.total_bytes()
        except (OSError, sqlite3.Error) as error:
            why = f"can't use the cache directory {directory}: {error}"
            raise CacheDirectoryError(why) from error
        # In the order of their last use, oldest first.
        self._files = {row.name: CacheFile.from_row(row) for row in rows}
        self._ledger = Ledger(self._catalog, self._disk, space, self.warn, self._recorded_rows)
        for row in rows:
            if not row.is_synced:
                self._ledger.recovered(self._files[row.name])
        self.lingering = Lingering(self.pin_again, self.unpin)
        self._threads = trio.CapacityLimiter(16)
        self.integrity = Integrity(
            self._disk, self._catalog, self.discard, self._summed, self._threads
        )
        self.probing = Probing(self._disk, self.integrity, self.refuse)
        self._mark = UseMark(directory / "in-use")
        # Called for each file that is dropped because its bytes are wrong.
        self.on_discard: Callable[[CacheFile], None] = lambda _file: None
        # The names of such files: what the kernel has kept of them may be wrong as well.
        self.discarded: set[str] = set()
        self.warning: str | None = None
        # Called before an eviction; whoever holds the file open in the kernel lets go of it.
        # Answers with what is set when the kernel has let a file go, if it had it.
        self.on_evict: Callable[[CacheFile], trio.Event | None] = lambda _file: None
        self.evicted = 0
        space.attach(self)

    def __len__(self) -> int:
        return len(self._files)

    def files(self) -> list[CacheFile]:
        return list(self._files.values())

    @property
    def was_unclean(self) -> bool:
        """Whether the last process that used the directory did not end as it should have."""
        return self._mark.was_unclean

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
            has = self._disk.has_inode
            return {one.st_ino: one for one in files if has(one.name, one.generation, one.st_ino)}

        return await trio.to_thread.run_sync(check, limiter=self._threads)

    def pin(self, version: ObjectVersion) -> CacheFile:
        """Return the file of a version, made known if it is not; undone by `unpin`.

        Asks the disk nothing: `ensure_open` does.
        """
        name = self.name_of(version)
        file = self._files.get(name) or CacheFile(name, version.size)
        file.version = version
        self.pin_again(file)
        return file

    def pin_again(self, file: CacheFile) -> None:
        """One more user of a file that is at hand."""
        file.pins += 1
        file.used_at = time.time()
        self._ledger.used(file)
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
        self._ledger.forget(file)
        # A file that was dropped while programs had it open may be registered still.
        self.on_evict(file)
        if file.generation:
            self._unlink(file)
            self._ledger.lost(file)

    def _unlink(self, file: CacheFile) -> None:
        try:
            self._disk.drop(file.name, file.generation)
        except OSError as error:
            self.warn(error.strerror or str(error))

    def discard(self, file: CacheFile) -> None:
        """Have a version fetched anew whose file has wrong bytes; see cache/integrity/verify.py.

        Where the kernel reads the file for a program, that goes on; who else
        has it pinned reads past the cache.
        """
        if self._files.get(file.name) is file:
            del self._files[file.name]
        self._ledger.forget(file)
        if file.generation:
            self._unlink(file)
            self._ledger.lost(file)
        file.is_kept = file.is_ours = False
        file.lose()
        self.discarded.add(file.name)
        self.on_discard(file)

    def is_new(self, file: CacheFile) -> bool:
        """Whether nothing of a file is on the disk, so that who brings its bytes may create it."""
        return file.is_kept and not file.generation and not self._ledger.has_neighbours

    async def ensure_open(self, file: CacheFile) -> bool:
        """Have the file's descriptor open; the caller has it pinned.

        Returns False if the disk refuses it (`is_kept` is then False too).
        What is present may turn out to be less than it was: another mount may
        have evicted the file. Cancelling leaves it open or closed, whole.
        """
        if file.fd >= 0 or not file.is_kept:
            return file.is_kept
        async with file.opening:
            if file.fd >= 0 or not file.is_kept:
                return file.is_kept
            try:
                found = await self._open_or_create(file)
            except sqlite3.Error as error:
                self.refuse(file, OSError(errno.EIO, f"its catalog can't be read ({error})"))
                return False
            except OSError as error:
                self.refuse(file, error)
                return False
            self.adopt(file, found)
            if found.fault is not None:
                self.integrity.drop(file, found.fault)
                return False
            if file.size <= CHECKED_AT_OPEN:
                file.is_checked = True
            if found.sums:
                self._summed(file, list(found.sums))
            return True

    async def _open_or_create(self, file: CacheFile) -> OpenFile:
        opening = partial(open_or_create, self._disk, self._catalog, file)
        try:
            return await trio.to_thread.run_sync(opening, limiter=self._threads)
        except sqlite3.Error as error:
            if not await self._ledger.get_over(error):
                raise
        return await trio.to_thread.run_sync(opening, limiter=self._threads)

    def _recorded_rows(self) -> list[Row]:
        """What the catalog knows, as far as this mount knows it too."""
        return [file.row() for file in self._files.values() if file.recorded]

    def _summed(self, file: CacheFile, sums: list[Sum]) -> None:
        """Note checksums of bytes that had none."""
        file.summed(sums)
        self._ledger.summed(file)

    def refuse(self, file: CacheFile, error: OSError) -> None:
        """The disk did not take the file: read its version without a cache from now on."""
        file.is_kept = False
        self.warn(error.strerror or str(error))

    def arrived(
        self, file: CacheFile, start: int, stop: int, sums: list[Sum] | None = None
    ) -> None:
        """Note that the bytes [start, stop) have been written, with these checksums."""
        new = file.present.add(start, stop)
        if sums:
            file.summed(sums)
        file.written_at = time.monotonic()
        self._ledger.arrived(file)
        self.space.took(new)

    async def trust(self, file: CacheFile, st_ino: int) -> None:
        """Know a pinned file as whole, since the kernel reads it; `st_ino` says which one it is.

        The process that filled it may have died before it told the catalog.
        """
        found = await trio.to_thread.run_sync(
            self._disk.generation_of, file.name, st_ino, limiter=self._threads
        )
        if found is not None:
            self._ledger.forget(file)
            file.become(found, st_ino, b"")
            file.is_checked = False
            self.arrived(file, 0, file.size)
        elif file.st_ino == st_ino:
            # It was dropped, and the process died before the catalog had it.
            self._ledger.forget(file)
            self._ledger.lost(file)
            file.forget()

    def take_in(
        self, version: ObjectVersion, path: str, fd: int, there: RangeMap | None = None
    ) -> bool:
        """Make a file the copy of a version that was uploaded from it; False if it stays as it is.

        `fd` is open for it, and `there` is what it has of the version, if not
        all. The caller writes to it no more.
        """
        file = self.pin(version)
        try:
            if file.generation:
                return False
            file.become(*self._disk.take_in(file.name, path), b"")
            for start, stop in there or ((0, file.size),):
                self.arrived(file, start, stop)
            self.integrity.sum_written(file, fd)
            return True
        except OSError as error:
            self.warn(error.strerror or str(error))
            return False
        finally:
            self.unpin(file)

    async def move(self, old: ObjectVersion, new: ObjectVersion) -> bool:
        """Let the file of a version be that of its copy in the bucket, whatever is there of it.

        Who uses the file goes on with it, and what is missing comes from the
        copy. False if nobody else will find it there: the copy has a file that
        is in use, or the disk refuses.
        """
        file, rival = self.find(old), self.find(new)
        while opening := [one.opening for one in (file, rival) if one and one.opening.locked()]:
            async with opening[0]:
                file, rival = self.find(old), self.find(new)
        # Nothing waits from here on. A rename takes no longer than a message to a thread.
        if file is None or file is rival:
            return True
        file.version = new
        if rival is not None and rival.pins:
            return False
        try:
            self._rename(file, self.name_of(new))
        except OSError as error:
            logger.info("%s stays where it is: %s", file.name, error.strerror)
            return False
        return True

    def _rename(self, file: CacheFile, name: str) -> None:
        rival = self._files.get(name)
        if rival is not None:
            self.on_evict(rival)
            self.pin_again(rival)
            rival.is_ours = False
            self.unpin(rival)
        if file.generation:
            self._disk.rename(file.name, file.generation, name)
        old_name, file.name = file.name, name
        del self._files[old_name]
        self._files[name] = file
        self._ledger.renamed(file, old_name)

    async def run(self) -> None:
        """Keep the catalog up to date and the space within its limits, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep_later)
            nursery.start_soon(self.integrity.run)
            while True:
                for _ in range(TOUCH_EVERY):
                    await trio.sleep(RECORD_EVERY_S)
                    await self.record()
                    self.lingering.tend()
                    await self._ledger.sync(SYNC_AFTER_S)
                    await self.space.tend()
                await self._ledger.touch()

    async def record(self) -> None:
        """Tell the catalog of everything that has arrived, and see what others have."""
        await self._ledger.record()

    async def aclose(self, *, sync: bool = True) -> None:
        """Record everything and (with `sync`) make it safe; takes a few seconds at most."""
        with trio.CancelScope(shield=True):
            await self.record()
            await self._ledger.touch()
            if sync:
                await self._ledger.sync_all(SYNC_AFTER_S)
            for file in self._files.values():
                if file.fd >= 0:
                    os.close(file.fd)
                    file.fd = -1
            await self._ledger.in_catalog(self._catalog.close)
            self._mark.end()

    async def learn(self) -> None:
        """Get to know the files that other mounts have recorded in this directory."""
        rows = await self._ledger.in_catalog(self._catalog.rows)
        others = [row for row in rows or [] if row.name not in self._files]
        known = {row.name: CacheFile.from_row(row) for row in others}
        # What others used is as good as ours: behind what nobody has used for long.
        self._files = known | self._files

    # Eviction: what quota.py asks for.

    def victims(self) -> list[CacheFile]:
        """The files that nobody uses, least recently used first."""
        self.lingering.end()
        return [file for file in self._files.values() if not file.pins and file.present.total]

    async def evict(self, file: CacheFile) -> int:
        """Unlink a file that nobody has pinned; return a descriptor if it is still mapped.

        The descriptor (else -1) is for `space`, which closes it when the
        kernel has let go of the blocks. A file that another mount uses, or
        that is opened in this moment, stays. Not cancelled halfway.
        """
        let_go = self.on_evict(file)
        generation, st_ino = file.generation, file.st_ino
        fd: int | None = None
        # Nobody opens it, for it is not pinned; who wants to from here on waits.
        file.opening.acquire_nowait()
        try:
            with trio.CancelScope(shield=True):
                if let_go is not None:
                    await let_go.wait()  # until then it looks like a file in use
                try:
                    fd = await trio.to_thread.run_sync(
                        self._disk.unlink, file.name, generation, limiter=self._threads
                    )
                except OSError as error:
                    self.warn(error.strerror or str(error))
                if fd is not None:
                    # Forgotten first: else what is recorded meanwhile could bring its row back.
                    if file.generation == generation:
                        self._ledger.forget(file)
                        file.forget()
                    await self._ledger.remove(file.name, generation, st_ino)
        finally:
            file.opening.release()
        if fd is None:
            return -1
        if not file.pins and self._files.get(file.name) is file:
            del self._files[file.name]
        self.evicted += 1
        return fd

    def create(self, file: CacheFile) -> OpenFile:
        """Create an empty file for a version, to be adopted. Blocks.

        Raises:
            OSError: the disk refuses it.
        """
        return create(self._disk, file)

    def adopt(self, file: CacheFile, found: OpenFile) -> None:
        """Take over what a thread has opened or created."""
        file.fd = found.fd
        if found.ranges is not None:
            # Not the file that the mirror knew: what it knew of ranges went with it.
            self.space.uncommitted -= file.unrecorded
            file.become(found.generation, found.st_ino, found.ranges)

    async def sweep(self) -> None:
        """Remove what a killed daemon has left."""

        def is_ours(name: str, generation: str) -> bool:
            file = self._files.get(name)
            return file is not None and file.generation == generation

        try:
            await sweep_orphans(self._disk, self._catalog, is_ours)
        except OSError as error:
            self.warn(error.strerror or str(error))

    async def _sweep_later(self) -> None:
        """Sweep when what the last daemon left has come of age."""
        await trio.sleep(2 * ORPHAN_AGE_S)
        await self.sweep()

    def warn_full(self) -> None:
        """What is read now does not fit beside what is in use: said once, and nothing is broken."""
        if self.warning is None:
            self.warning = (
                f"the cache {self.directory} is too small for what is open: what does not fit is"
                " read from S3 each time"
            )
            logger.warning("%s", self.warning)

    def warn(self, why: str) -> None:
        """The cache does not do what it is for: said once."""
        if self.warning is None:
            self.warning = f"the cache {self.directory} does not work, reading without it: {why}"
            logger.warning("%s", self.warning)
