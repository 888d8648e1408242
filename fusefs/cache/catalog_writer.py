"""Batches updates of the catalog.

New ranges, last-use times and removals are collected in memory and written by
one worker thread: a commit for each would cost more than the download of a
small file. An update that is lost in a crash only costs a repeated download.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TypeVar

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog import Catalog, Row, Stay
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.damage import is_damage
from fusefs.cache.quota import Quota
from fusefs.cache.retention import KeyRange, key_ranges
from fusefs.linux.clock import steady_time

logger = logging.getLogger("fusefs.cache")

Result = TypeVar("Result")

# How many files are synced in one call of a thread, and for how long: the call
# can't be cancelled, and on a busy disk each file may take a second.
SYNC_AT_ONCE = 256
SYNC_GO_S = 1.0
# The end of a mount whose syncing takes longer is logged.
SLOW_S = 2.0


class CatalogWriter:
    """The batches of one mount. Belongs to the event loop.

    `warn` is called with the reason why the catalog can't be written. `recorded`
    returns the rows that a catalog in memory begins with, `released` is called with
    the names of files that may be evicted again. `has_neighbours` turns True when
    another mount has written in the directory.
    """

    def __init__(
        self,
        catalog: Catalog,
        disk: Disk,
        quota: Quota,
        warn: Callable[[str], None],
        recorded: Callable[[], list[Row]],
        identity: str,
        released: Callable[[set[str]], None],
    ) -> None:
        self._catalog = catalog
        self._disk = disk
        self._quota = quota
        self._warn = warn
        self._recorded = recorded
        self._identity = identity
        self._released = released
        self.has_neighbours = False
        self._dirty: dict[str, CacheFile] = {}  # with ranges that the catalog does not have
        self._unsynced: dict[str, CacheFile] = {}
        self._used: dict[str, CacheFile] = {}
        # Those whose rows are being written, but for those that were forgotten meanwhile.
        self._recording: set[CacheFile] = set()
        # Rows to be removed or renamed, in this order.
        self._changes: list[Callable[[], object]] = []
        # The names of files that are to be retained, by key of the bucket `identity`.
        self._retaining: dict[str, str] = {}
        self._being_retained: dict[str, str] = {}
        self._thread = trio.CapacityLimiter(1)
        # Totals are used in the order in which the catalog computed them: of two
        # that were used the other way round, the older would count for too much.
        self._counting = trio.Lock()

    def arrived(self, file: CacheFile) -> None:
        """A file has new ranges."""
        if file.is_ours:  # else the name is another file's
            self._dirty[file.name] = file
            self._unsynced[file.name] = file

    def summed(self, file: CacheFile) -> None:
        """A file has new checksums."""
        if file.is_ours:
            self._dirty[file.name] = file

    def recovered(self, file: CacheFile) -> None:
        """A file of the catalog may not survive a power cut."""
        self._unsynced[file.name] = file

    def used(self, file: CacheFile) -> None:
        """A file was used: its last-use time is written with the next batch."""
        self._used[file.name] = file

    def forget(self, file: CacheFile) -> None:
        """Drop the pending updates of a file."""
        if self._dirty.get(file.name) is file:
            del self._dirty[file.name]
        if self._unsynced.get(file.name) is file:
            del self._unsynced[file.name]
        self._recording.discard(file)
        self._quota.uncommitted -= file.unrecorded

    def lost(self, file: CacheFile) -> None:
        """A file is gone: remove its row with the next batch."""
        if file.recorded:
            self._changes.append(
                partial(self._catalog.remove, file.name, file.generation, file.st_ino)
            )

    def renamed(self, file: CacheFile, old_name: str) -> None:
        """A file has another name: rename its row with the next batch."""
        for files in (self._dirty, self._unsynced, self._used):
            if files.get(old_name) is file:
                files[file.name] = files.pop(old_name)
        if file.recorded:
            self._changes.append(
                partial(self._catalog.rename, old_name, file.generation, file.st_ino, file.name)
            )
            # Recorded once more, it turns out whether another mount has that row.
            self._dirty[file.name] = file

    def retain(self, key: str, name: str) -> None:
        """A file of this key of the bucket is not to be evicted."""
        self._retaining[key] = name

    @property
    def retaining(self) -> set[str]:
        """The names of the files that the catalog may not know to be retained."""
        return {*self._being_retained.values(), *self._retaining.values()}

    async def release(self, path: str, stay: Stay, before: float = math.inf) -> bool:
        """As `Catalog.release`, for all keys at and below a path, in parts; False if it fails."""
        for keys in key_ranges(path):
            left: KeyRange | None = keys
            while left is not None:
                release = partial(self._catalog.release, self._identity, left, stay, before)
                page = await self.in_catalog(release)
                if page is None:
                    return False
                released, left = page
                self._released(released)
        return True

    async def look_up_retained(self, path: str, found: Callable[[list[str]], None]) -> None:
        """Call `found` with the names of the files retained for keys at and below a path."""
        for keys in key_ranges(path):
            left: KeyRange | None = keys
            while left is not None:
                page = await self.in_catalog(self._catalog.retained_in, self._identity, left)
                if page is None:
                    return
                names, left = page
                found(names)

    async def record(self) -> None:
        """Write everything that has arrived, and see whether other mounts wrote."""
        async with self._counting:
            files = [file for file in self._dirty.values() if file.generation and file.is_ours]
            changes, self._changes = self._changes, []
            self._dirty = {}
            self._recording = set(files)
            rows = [file.row() for file in files]
            counted = [file.present.total for file in files]
            retaining, self._retaining = self._retaining, {}
            self._being_retained = retaining
            released: set[str] = set()

            def update() -> tuple[list[bool], int, bool]:
                for change in changes:
                    change()
                if retaining:
                    replaced = self._catalog.retain(self._identity, retaining, steady_time())
                    released.update(replaced)
                accepted, total = (
                    self._catalog.record(rows) if rows else ([], self._catalog.total_bytes())
                )
                return accepted, total, self._catalog.has_changed()

            answer = await self.in_catalog(update)
            known, self._recording = self._recording, set()
            self._being_retained = {}
            if answer is None:
                self._dirty = {file.name: file for file in files if file in known} | self._dirty
                self._changes = changes + self._changes
                self._retaining = retaining | self._retaining
                return
            self._released(released)
            accepted, self._quota.committed, has_changed = answer
            self.has_neighbours = self.has_neighbours or has_changed
            for file, row, is_ours, bytes_now in zip(files, rows, accepted, counted, strict=True):
                if file in known and file.generation == row.generation:
                    self._was_recorded(file, row, bytes_now, is_ours=is_ours)
                elif is_ours:
                    # Dropped or evicted meanwhile, and its bytes were taken off then.
                    remove = partial(self._catalog.remove, row.name, row.generation, row.st_ino)
                    self._changes.append(remove)

    def _was_recorded(self, file: CacheFile, row: Row, bytes_now: int, *, is_ours: bool) -> None:
        """Note that the catalog has a row of a file, or with `is_ours` False has another's."""
        if file.name != row.name:
            # Renamed meanwhile. Recorded once more, it turns out whose the row of its name is.
            self._dirty[file.name] = file
            rename = partial(self._catalog.rename, row.name, row.generation, row.st_ino, file.name)
            self._changes.append(rename)
        elif not is_ours:
            file.is_ours = False
        if is_ours:
            self._quota.uncommitted -= bytes_now - file.recorded
            file.recorded = bytes_now
            file.recorded_sums(len(row.sums))

    async def remove(self, name: str, generation: str, st_ino: int, recorded: int) -> None:
        """Remove a row now, of `recorded` bytes, after the pending removals and renames.

        If the catalog can't be written, it goes with the next batch.
        """
        async with self._counting:
            remove = partial(self._catalog.remove, name, generation, st_ino)
            changes, self._changes = self._changes, []

            def update() -> int:
                for change in changes:
                    change()
                return remove()

            total = await self.in_catalog(update)
            if total is None:
                self._changes = [*changes, remove, *self._changes]
                # Else it would look as if nothing had become free, and all files would go.
                self._quota.committed -= recorded
            else:
                self._quota.committed = total

    async def touch(self) -> None:
        """Write last-use times, for the order of eviction after a restart."""
        used, self._used = self._used, {}
        times = [(file.used_at, file.name, file.generation) for file in used.values()]
        await self.in_catalog(self._catalog.touch, times)

    async def sync_all(self, limit_s: float) -> None:
        """Make files safe against a power cut, as many as `limit_s` seconds suffice for."""
        began, count = time.monotonic(), len(self._unsynced)
        with trio.move_on_after(limit_s):
            while await self.sync(idle_s=0.0):
                pass
        took_s, remaining = time.monotonic() - began, len(self._unsynced)
        if remaining or took_s > SLOW_S:
            logger.info(
                "the disk took %.1f s to make %d cached files safe against a power cut, %d are not",
                took_s,
                count - remaining,
                remaining,
            )

    async def sync(self, idle_s: float) -> bool:
        """Make files safe against a power cut that got no bytes for `idle_s` seconds.

        Returns whether there were any. What the disk is too slow for is left to
        the next call.
        """
        # Not later: what is no longer in `_unsynced` would never be synced.
        await trio.lowlevel.checkpoint_if_cancelled()
        now = time.monotonic()
        idle = (
            file
            for file in self._unsynced.values()
            if now - file.written_at >= idle_s and not file.downloads and not file.unrecorded
        )
        files = list(islice(idle, SYNC_AT_ONCE))
        for file in files:
            del self._unsynced[file.name]  # it comes back if more arrives from here on
        rows = [file.row() for file in files]
        done = 0

        def sync_some() -> list[Row]:
            nonlocal done
            synced = []
            while done < len(rows) and (not done or time.monotonic() - now < SYNC_GO_S):
                row = rows[done]
                if self._disk.sync(row.name, row.generation):
                    synced.append(row)
                done += 1
            return synced

        if rows:
            synced = await trio.to_thread.run_sync(sync_some)
            for file, row in zip(files[done:], rows[done:], strict=True):
                if file.generation == row.generation:  # else it was evicted meanwhile
                    self._unsynced.setdefault(file.name, file)
            await self.in_catalog(self._catalog.mark_synced, synced)
        return bool(rows)

    async def in_catalog(self, function: Callable[..., Result], *args: object) -> Result | None:
        """Call a function in the catalog's thread; None, and a warning, if it fails. Not cancelled.

        A damaged catalog goes on in memory, and the call is repeated once.
        """
        with trio.CancelScope(shield=True):
            try:
                try:
                    return await trio.to_thread.run_sync(function, *args, limiter=self._thread)
                except sqlite3.Error as error:
                    if not await self.recover_from(error):
                        raise
                return await trio.to_thread.run_sync(function, *args, limiter=self._thread)
            except sqlite3.Error as error:
                self._warn(f"its catalog can't be written ({error})")
        return None

    async def recover_from(self, error: sqlite3.Error) -> bool:
        """After damage, have the catalog go on in memory; False if that does not help."""
        if not is_damage(error):
            return False
        go_on = self._catalog.go_on_in_memory
        return await trio.to_thread.run_sync(go_on, error, self._recorded(), limiter=self._thread)
