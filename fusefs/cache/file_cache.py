"""The cache directory: one sparse file per object version, and the byte ranges each file has.

A cache file is as long as its object and is filled range by range. It is never punched, truncated
or rewritten, because the kernel may be reading it for a program (passthrough); a file that will be
written to is first taken out of the cache (handover.py). Eviction unlinks a whole file. The name is
a hash of the version (endpoint, bucket, key, ETag, size) plus a random generation, so a file that
is evicted and fetched again gets a new name.

Each user of a file *pins* it. The open descriptor of a pinned file carries a read lock, so that
other mounts of the directory do not evict it. For a passthrough file the kernel holds the lock.

Files that are or were lately in use are in memory (cached_file.py), up to the number that
`--memory-limit` allows; the catalog lists all files (integrity/opening.py). Disk operations (in
disk.py) run in threads; catalog_writer.py collects the updates of the catalog.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Container, Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import trio

from fusefs.cache import disk
from fusefs.cache.cached_file import CHECKED_AT_OPEN, CacheFile, OpenFile
from fusefs.cache.catalog import Catalog, Row
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.cache.eviction_order import MOST_LATEST, EvictionOrder
from fusefs.cache.handover import Handover
from fusefs.cache.integrity.checksums import Sum
from fusefs.cache.integrity.opening import open_or_create
from fusefs.cache.integrity.trouble import Trouble
from fusefs.cache.integrity.verify import Integrity
from fusefs.cache.passthrough import MOST_AT_ONCE, PassthroughFiles
from fusefs.cache.quota import Quota
from fusefs.cache.ranges import RangeMap
from fusefs.cache.residency import Residency
from fusefs.cache.retention import Retention
from fusefs.linux.clock import boot_id, steady_time
from fusefs.store.interface import ObjectVersion
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.cache")

RECORD_EVERY_S = 2.0
TOUCH_EVERY = 30  # calls of `record` for each call of `touch`
# A file is synced this long after its last write: a file that is being read for
# the first time should have the disk for itself.
SYNC_AFTER_S = 5.0
# Files that were fetched ahead stay open this long for their first open.
KEEP_OPEN_S = 10.0
MOST_KEPT_OPEN = 512
# The time that a file waits for others that are registered in the same message.
GATHER_S = 0.02
# Size of the cache of file names: as many as the files that the kernel may read (passthrough.py).
MOST_NAMES = 16384
# Errors of an open that are not caused by the file.
_NOT_ITS_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS, errno.ENOLCK}


class FileCache:
    """All files of one principal's part of a cache directory. Belongs to the event loop.

    `identity` (endpoint and bucket) distinguishes objects of different stores.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        quota: Quota,
        *,
        most_in_memory: int = 50_000,
        in_any_case: bool = False,
        backing: PassthroughFiles | None = None,
        on_discard: Callable[[CacheFile], None] = lambda _file: None,
    ) -> None:
        """Open the directory and read the catalog, on a bad disk too if `in_any_case`. Blocks.

        At most `most_in_memory` unused files are kept in memory. `backing` has the files that
        the kernel reads itself (passthrough). `on_discard` is called with each file that is
        dropped because its bytes are wrong.

        Raises:
            CacheDirectoryError: the directory can't be used; the message says why.
        """
        self.directory = directory
        self.quota = quota
        self._identity = identity
        # The name of a version's file, without its generation. Warm files are opened often,
        # and computing the hash would be a tenth of the time of an open.
        self.name_of = lru_cache(MOST_NAMES)(self._make_name)
        # The files in memory, by the name that `name_of` returns. Always the same dict.
        self.by_name: dict[str, CacheFile] = {}
        try:
            rows = self._open_catalog(most_in_memory, in_any_case=in_any_case)
        except (OSError, sqlite3.Error) as error:
            why = f"can't use the cache directory {directory}: {error}"
            raise disk.CacheDirectoryError(why) from error
        self.by_name.update((row.name, CacheFile.from_row(row)) for row in rows)
        self.order.restore(file for file in self.by_name.values() if not file.is_retained)
        self.residency = Residency(
            self.by_name, self._catalog, self._catalog_writer, self.order, quota, most_in_memory
        )
        # Versions that the bucket no longer has.
        self._obsolete: list[ObjectVersion] = []
        # Files that are pinned until a time of the monotonic clock, the earliest first.
        self._kept_open: dict[CacheFile, float] = {}
        self._threads = trio.CapacityLimiter(16)
        self.integrity = Integrity(
            self.disk, self._catalog, self.discard, self._summed, self._threads
        )
        self.handover = Handover(
            self.disk, self.by_name, self._catalog_writer, self.order, self.ensure_open
        )
        self._use = disk.hold_in_use(directory)
        self._on_discard = on_discard
        # The names of discarded files: the kernel's cached pages of them may be wrong, too.
        self.discarded: set[str] = set()
        self.trouble = Trouble()
        # Not `or`: without registered files `backing` is false.
        self._backing = PassthroughFiles() if backing is None else backing
        self.evicted = 0
        self.evicted_bytes = 0
        self.evicted_unread = 0  # evicted bytes that were fetched and never read
        self.refused = 0  # files whose removal the disk refused

    def _open_catalog(self, most: int, *, in_any_case: bool) -> list[Row]:
        """Open the catalog; return the rows of the `most` files that were used last."""
        self.disk = disk.Disk(self.directory / "objects")
        path = self.directory / "catalog.sqlite3"
        self._catalog = Catalog(path, boot_id(), in_any_case=in_any_case)
        self._catalog_writer = CatalogWriter(
            self._catalog,
            self.disk,
            self.quota,
            self.warn,
            self.by_name,
            self._identity,
            lambda names: self.retention.released(names),
        )
        self.order = EvictionOrder(self.quota, min(MOST_LATEST, most // 4))
        self.retention = Retention(
            self._identity,
            self.by_name,
            self._catalog,
            self._catalog_writer,
            self.order.leave,
            self.put_back,
        )
        rows = self._newest(most, in_any_case=in_any_case)
        self.quota.committed, self.quota.files = self._catalog.total()
        return rows

    def __len__(self) -> int:
        """The number of cached files of all mounts that share the directory."""
        return self.quota.files + self._catalog_writer.new_files

    def _newest(self, most: int, *, in_any_case: bool) -> list[Row]:
        try:
            self.retention.refresh_now()
            return self._catalog.newest(most)
        except sqlite3.Error as error:
            has_begun = self._catalog.begin_another(error, [])
            if not in_any_case and (self._catalog.is_in_memory or not has_begun):
                raise
            return []

    def files(self) -> list[CacheFile]:
        """The files in memory."""
        return list(self.by_name.values())

    def _make_name(self, version: ObjectVersion) -> str:
        content = "\0".join((self._identity, version.key, version.etag, str(version.size)))
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def find(self, version: ObjectVersion) -> CacheFile | None:
        """The file of a version, or None if it is not in memory."""
        return self.by_name.get(self.name_of(version))

    async def look_up(self, versions: Iterable[ObjectVersion]) -> list[CacheFile | None]:
        """Find the file of each version, in memory or in the catalog; None if there is no file."""
        names = [self.name_of(version) for version in versions]
        await self.residency.load(names)
        return [self.by_name.get(name) for name in names]

    async def whole_files(self, inodes: Container[int]) -> dict[int, CacheFile]:
        """The complete files whose inode number on the disk is in `inodes`, by that number."""
        files = [
            file for file in self.by_name.values() if file.is_complete and file.st_ino in inodes
        ]

        def check() -> dict[int, CacheFile]:
            has = self.disk.has_inode
            return {
                file.st_ino: file for file in files if has(file.name, file.generation, file.st_ino)
            }

        return await trio.to_thread.run_sync(check, limiter=self._threads)

    def pin(self, version: ObjectVersion) -> CacheFile:
        """Pin a version's `CacheFile` (made if needed) until `unpin`; does not open the file."""
        name = self.name_of(version)
        file = self.by_name.get(name) or CacheFile(name, version.size)
        file.version = version
        if not file.is_retained and self.retention.covers(version.key):
            self.retention.retain(file, version.key)
        self.pin_again(file)
        return file

    def pin_again(self, file: CacheFile) -> None:
        """Add a user to `file`; a matching `unpin` removes the user."""
        if not file.pins:
            self.order.leave(file)
            self.residency.leave(file)
            # Readers of a dropped file continue, but a newer file may have its name by now.
            if file.is_kept:
                self.by_name.setdefault(file.name, file)
        file.pins += 1
        file.used_at = steady_time()
        self._catalog_writer.used(file)

    def opened(self, file: CacheFile) -> None:
        """Count a program's open of a pinned file as a use in the eviction order."""
        if self._kept_open.pop(file, None) is not None:
            self.unpin(file)
        self.order.use(file)

    def unpin(self, file: CacheFile, *, was_used: bool = True) -> None:
        """Remove a user of a file; after the last one, close the file and let it be evicted.

        The last user's leaving counts as the file's last use only if `was_used`.
        """
        file.pins -= 1
        if file.pins:
            return
        file.used_at = steady_time() if was_used else file.used_at
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1
        if file.is_passed_over:
            file.is_kept, file.is_passed_over = True, False
        if file.present.total and file.is_kept and file.is_ours:
            if not file.is_retained:
                self.order.insert(file)
            return
        # The file has no bytes, or can't stay in the cache under its name.
        self._drop(file)

    def _drop(self, file: CacheFile) -> None:
        if self.by_name.get(file.name) is file:
            del self.by_name[file.name]
        self.order.forget(file)
        self.residency.leave(file)
        self._catalog_writer.forget(file)
        if not file.pins:
            self._backing.drop(file)  # it may still be registered from when programs had it open
        if file.generation:
            try:
                self.disk.drop(file.name, file.generation)
            except OSError as error:
                self.warn(error.strerror or str(error))
            self._catalog_writer.lost(file)

    def discard(self, file: CacheFile) -> None:
        """Drop a file that has wrong bytes (integrity/verify.py); its version is fetched again.

        Programs for which the kernel reads the file (passthrough) continue to read it;
        all other users read past the cache.
        """
        file = self._in_memory(file)
        self._drop(file)
        file.is_kept = file.is_ours = file.is_passed_over = False
        file.lose()
        self.discarded.add(file.name)
        self._on_discard(file)

    def _in_memory(self, file: CacheFile) -> CacheFile:
        """Return the `CacheFile` in memory for `file`, which was perhaps unloaded and reloaded."""
        known = self.by_name.get(file.name, file)
        return known if known.generation == file.generation else file

    @property
    def has_neighbours(self) -> bool:
        """True if another mount has written in the directory since this one began."""
        return self._catalog_writer.has_neighbours

    def is_new(self, file: CacheFile) -> bool:
        """True if a file does not exist on the disk yet, so that its download may create it."""
        return file.is_kept and not file.generation and self.residency.lacks(file.name)

    async def ensure_open(self, file: CacheFile) -> bool:
        """Open the file's descriptor if it is not open; the caller has pinned the file.

        Returns False if the disk fails (`is_kept` is then False too). Afterwards
        fewer bytes may be present than before, as another mount may have evicted
        the file. Cancelling leaves the file either open or closed.
        """
        if file.fd < 0 and file.is_kept:
            with stage(WaitCause.CACHE_DISK):
                async with file.opening:
                    if file.fd < 0 and file.is_kept:
                        await self._open(file)
        return file.is_kept

    async def _open(self, file: CacheFile) -> None:
        opening = partial(open_or_create, self.disk, self._catalog, file)
        try:
            try:
                found = await trio.to_thread.run_sync(opening, limiter=self._threads)
            except sqlite3.Error as error:
                if not await self._catalog_writer.recover_from(error):
                    raise
                found = await trio.to_thread.run_sync(opening, limiter=self._threads)
        except sqlite3.Error as error:
            why = OSError(errno.EIO, f"its catalog can't be read ({error})")
            self.disable(file, why, for_now=True)
            return
        except OSError as error:
            self.disable(file, error)
            return
        self.set_open(file, found)
        if found.fault is not None:
            self.integrity.drop(file, found.fault)
            return
        if file.size <= CHECKED_AT_OPEN:
            file.is_checked = True
        if found.sums:
            self._summed(file, list(found.sums))

    def keep_open(self, file: CacheFile, nursery: trio.Nursery) -> None:
        """Keep a prefetched file open for a while, so that compiled code can answer its first open.

        For passthrough a task of `nursery` registers the file with the kernel.
        """
        if file not in self._kept_open:
            self.pin_again(file)
            self._kept_open[file] = time.monotonic() + KEEP_OPEN_S
            if len(self._kept_open) > MOST_KEPT_OPEN:
                self._end_keeping_open(1)
        if self._backing.is_on:
            self.pin_again(file)
            self._backing.gathered.append(file)
            if len(self._backing.gathered) == 1:
                nursery.start_soon(self._register_ahead)

    async def _register_ahead(self) -> None:
        """Register prefetched files by few messages to the keeper: each wakes two processes."""
        backing = self._backing
        while files := backing.gathered[:MOST_AT_ONCE]:
            if len(files) < MOST_AT_ONCE:
                await trio.sleep(GATHER_S)
                files = backing.gathered[:MOST_AT_ONCE]
            await backing.register_all(files)
            await backing.wait_for(files)  # an open may be registering some of the files
            # Only now, as an empty list means that no task is running.
            del backing.gathered[: len(files)]
            for file in files:
                self.unpin(file, was_used=False)

    def _end_keeping_open(self, count: int) -> None:
        """Unpin the `count` files that `keep_open` has held for longest."""
        for file in list(islice(self._kept_open, count)):
            del self._kept_open[file]
            self.unpin(file, was_used=False)

    def _summed(self, file: CacheFile, sums: list[Sum]) -> None:
        """Add checksums of bytes that had none; the catalog gets them with its next batch."""
        file = self._in_memory(file)
        file.summed(sums)
        self._catalog_writer.arrived(file)

    def disable(self, file: CacheFile, error: OSError, *, for_now: bool = False) -> None:
        """Let a file's users read past the cache after `error`; `for_now`: until all have gone."""
        for_now = for_now or error.errno in _NOT_ITS_FAULT
        file.is_passed_over = for_now and (file.is_kept or file.is_passed_over)
        file.is_kept = False
        self.warn(error.strerror or str(error))

    def arrived(
        self, file: CacheFile, start: int, stop: int, sums: list[Sum] | None = None
    ) -> None:
        """Record that the bytes [start, stop) were written, and their checksums if given."""
        new = file.arrived(start, stop)
        if sums:
            file.summed(sums)
        file.written_at = time.monotonic()
        self._catalog_writer.arrived(file)
        self.quota.written(new)
        self.order.fetched += new

    async def assume_complete(self, file: CacheFile, st_ino: int) -> None:
        """Mark a pinned file, whose inode `st_ino` the kernel reads, as complete.

        The catalog may know fewer bytes. A file that has left the cache is forgotten instead.
        """
        found = await trio.to_thread.run_sync(
            self.disk.generation_of, file.name, st_ino, limiter=self._threads
        )
        if found is not None:
            self._catalog_writer.forget(file)
            file.become(found, st_ino, b"")
            file.is_checked = False
            self.arrived(file, 0, file.size)
            file.first_read(0, file.size)
        elif file.st_ino == st_ino:
            # The file was dropped, and the process died before its catalog row was removed.
            self._catalog_writer.forget(file)
            self._catalog_writer.lost(file)
            file.forget()

    def adopt_uploaded(
        self,
        version: ObjectVersion,
        path: str,
        fd: int,
        present: RangeMap | None = None,
        crc: int | None = None,
        taken: CacheFile | None = None,
    ) -> bool:
        """Move the file at `path` into the cache as the copy of the version uploaded from it.

        The caller closes the file's descriptor `fd`, and must not write to the file any more. Only
        the ranges `present` have content (None: all). `crc` is the file's CRC32, if known; `taken`
        is its `CacheFile`, if `Handover.take_out` took it out of the cache. Blocks briefly. Returns
        False, and leaves the file there, if the version has or is getting another file, or (with
        `taken`) another user, or if the disk fails.
        """
        file = self.pin(version)
        try:
            if file.generation or file.is_opening or (taken is not None and file.pins > 1):
                return False
            generation, st_ino = self.disk.adopt(file.name, path)
            if taken is not None:
                self.handover.succeed(file, taken)
                file = taken
                self.pin_again(file)
            file.become(generation, st_ino, b"")
            for start, stop in present or ((0, file.size),):
                self.arrived(file, start, stop)
                file.first_read(start, stop)
            self.integrity.sum_written(file, fd, crc)
            return True
        except OSError as error:
            self.warn(error.strerror or str(error))
            return False
        finally:
            self.unpin(file)

    async def move(self, old: ObjectVersion, new: ObjectVersion) -> bool:
        """Assign the cache file of `old` to `new`, its copy in the bucket (for a rename).

        Users of the file continue to use it, and its missing bytes are fetched from `new`.
        Returns False if later opens of `new` will not find this file: `new` has
        another file that is in use, or the disk fails.
        """
        file, rival = await self.look_up([old, new])
        while opening := [used.opening for used in (file, rival) if used and used.opening.locked()]:
            async with opening[0]:
                file, rival = self.find(old), self.find(new)
        # No await from here on. A rename takes no longer than handing it to a thread would.
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
        if (rival := self.by_name.get(name)) is not None:
            self._backing.drop(rival)
            self.pin_again(rival)
            rival.is_ours = False
            self.unpin(rival)
        if file.generation:
            self.disk.rename(file.name, file.generation, name)
        old_name, file.name = file.name, name
        del self.by_name[old_name]
        self.by_name[name] = file
        self._catalog_writer.renamed(file, old_name)
        # The next `fusefs pin` or `unpin` of the old key's path removes its `retained` row.
        self.retention.note(file, is_retained=False)
        self.retention.retain_again(file)

    async def run(self) -> None:
        """Update the catalog and do the cache's other periodic work, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweep_later)
            nursery.start_soon(self.integrity.run)
            await self.residency.learn_names()
            have_pins_changed = is_shared = False
            while True:
                for _ in range(TOUCH_EVERY):
                    await ACTIVITY.pause(RECORD_EVERY_S)
                    await self.record()
                    if self.has_neighbours and not is_shared:
                        is_shared = True
                        await self._open_used()
                    if have_pins_changed:
                        await self.retention.learn()
                    # If the pins have changed, the next round reads anew which files they cover.
                    have_pins_changed = await self.retention.refresh()
                    if have_pins_changed:
                        ACTIVITY.note()
                    now = time.monotonic()
                    self._end_keeping_open(sum(until <= now for until in self._kept_open.values()))
                    await self._catalog_writer.sync(SYNC_AFTER_S)
                    self.order.note_time(steady_time())
                    await self.residency.unload(self._backing.drop)
                await self._catalog_writer.record(is_full=True)
                await self._catalog_writer.touch()

    async def _open_used(self) -> None:
        """Try to open the closed files in use: their locks keep other mounts from evicting them."""
        closed = [file for file in self.files() if file.pins and file.fd < 0 and file.generation]
        for file in closed:
            if not file.pins or not file.is_kept:
                continue
            self.pin_again(file)
            try:
                if not await self.ensure_open(file) and file.is_passed_over:
                    return  # without descriptors all others would be read past the cache, too
            finally:
                self.unpin(file, was_used=False)

    async def record(self) -> None:
        """Write all pending updates into the catalog, and check if other mounts have written."""
        await self._catalog_writer.record()

    async def aclose(self, *, sync: bool = True) -> None:
        """Write the catalog, sync files for a few seconds if `sync`, close all. Not cancellable."""
        with trio.CancelScope(shield=True):
            await self._catalog_writer.record(is_full=True)
            await self._catalog_writer.touch()
            if sync:
                with trio.move_on_after(SYNC_AFTER_S):
                    while await self._catalog_writer.sync(idle_s=0.0):
                        pass
            for file in self.by_name.values():
                if file.fd >= 0:
                    os.close(file.fd)
                    file.fd = -1
            await self._catalog_writer.in_catalog(self._catalog.close)
            if self._use >= 0:
                os.close(self._use)

    # Eviction, for evictor.py.

    def obsolete(self, version: ObjectVersion) -> None:
        """Schedule the removal of the cached copy of a version that the bucket no longer has."""
        self._obsolete.append(version)

    async def take_obsolete(self) -> list[tuple[ObjectVersion, CacheFile]]:
        """Take the cached versions given to `obsolete`, with their files; end their retention."""
        versions, self._obsolete = self._obsolete, []
        found = zip(versions, await self.look_up(versions), strict=True)
        copies = [(version, file) for version, file in found if file is not None]
        for _, file in copies:
            if file.is_retained:
                await self.retention.release_file(file)
        return copies

    def close_unused(self) -> None:
        """Unpin all files that `keep_open` holds for their first open."""
        self._end_keeping_open(len(self._kept_open))

    def next_victim(
        self, *, is_ahead: bool = False, used_before: float = math.inf
    ) -> CacheFile | None:
        """The file to evict next (`EvictionOrder.next`), else one from `keep_open`, or None."""
        file = self.order.next(is_ahead=is_ahead, used_before=used_before)
        if file is None and not is_ahead and self._kept_open:
            self.close_unused()
            file = self.order.next(used_before=used_before)
        return file

    def put_back(self, file: CacheFile) -> None:
        """Return a file to the eviction order, unless used, retained, empty or no longer cached."""
        is_evictable = not file.pins and file.present.total and not file.is_retained
        if is_evictable and self.by_name.get(file.name) is file:
            self.order.insert(file)

    async def evict(self, file: CacheFile, *, for_room: bool = True) -> None:
        """Unlink an unpinned file.

        A file that is being opened, that another mount uses, or that a pin covers, is not unlinked,
        but leaves the eviction order until `put_back`. The statistics of evicted files count
        removals `for_room` only. Can't be cancelled halfway.
        """
        self.order.leave(file)
        self.residency.leave(file)
        if file.is_opening:
            return  # a rename that waited for an earlier eviction of the file is next
        let_go = self._backing.drop(file)
        generation, st_ino = file.generation, file.st_ino
        size, unread = file.present.total, file.unread
        fd: int | None = None
        file.opening.acquire_nowait()  # opens of the file now wait
        try:
            with trio.CancelScope(shield=True):
                if let_go is not None:
                    await let_go.wait()  # until then the kernel's lock makes it look used
                try:
                    fd = await trio.to_thread.run_sync(
                        self._unlink_evicted, file, generation, limiter=self._threads
                    )
                except OSError as error:
                    self.refused += 1
                    self.warn(error.strerror or str(error))
                if fd is not None:
                    recorded = file.recorded
                    # Forget the file first, or a batch in between could write its row again.
                    if file.generation == generation:
                        self._catalog_writer.forget(file)
                        self.order.forget(file)
                        file.forget()
                    await self._catalog_writer.remove(file.name, generation, st_ino, recorded)
        finally:
            file.opening.release()
        if fd is None:
            return
        self.quota.unlinked(fd, size)
        if not file.pins and self.by_name.get(file.name) is file:
            del self.by_name[file.name]
        if for_room:
            self.evicted += 1
            self.evicted_bytes += size
            self.evicted_unread += unread

    def _unlink_evicted(self, file: CacheFile, generation: str) -> int | None:
        """Unlink a file and return what `Disk.unlink` does, or None if it is retained. Blocks."""
        with contextlib.suppress(sqlite3.Error):  # then rely on what this mount knows
            file.is_retained = file.is_retained or self._catalog.is_retained(file.name)
        return None if file.is_retained else self.disk.unlink(file.name, generation)

    def set_open(self, file: CacheFile, found: OpenFile) -> None:
        """Take over the result `found` of opening or creating `file` in a thread."""
        file.fd = found.fd
        if found.ranges is not None:
            # It is not the file that was known before, whose ranges no longer exist.
            self.quota.uncommitted -= file.unrecorded
            file.become(found.generation, found.st_ino, found.ranges)
            if found.ranges:
                self.order.keep(file, found.used_at)

    async def sweep(self) -> None:
        """Remove files without a catalog row, which a killed daemon has left."""

        def is_ours(name: str, generation: str) -> bool:
            file = self.by_name.get(name)
            return file is not None and file.generation == generation

        try:
            await disk.sweep_orphans(self.disk, self._catalog, is_ours)
        except OSError as error:
            self.warn(error.strerror or str(error))

    async def _sweep_later(self) -> None:
        """Sweep once, when files of the previous daemon are old enough to be removed."""
        await trio.sleep(2 * disk.ORPHAN_AGE_S)
        await self.sweep()

    def warn(self, why: str) -> None:
        """Warn that the cache does not work, and why."""
        self.trouble.note(f"the cache {self.directory} does not work, reading without it: {why}")
