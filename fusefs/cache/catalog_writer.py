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
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.catalog import Catalog, KeyRange, Row, Stay, Total, key_ranges
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.damage import is_damage
from fusefs.cache.quota import Quota
from fusefs.linux.clock import steady_time

logger = logging.getLogger("fusefs.cache")

Result = TypeVar("Result")

# How many files are synced in one call of a thread, and for how long: the call
# can't be cancelled, and on a busy disk each file may take a second.
SYNC_AT_ONCE = 256
SYNC_GO_S = 1.0


class CatalogWriter:
    """The batches of one mount. Belongs to the event loop.

    `files` are the files that this mount has in memory, by name. `warn` is called with the
    reason why the catalog can't be written, `released` with the names of files that may be
    evicted again. `has_neighbours` turns True when another mount has written in the directory.
    """

    def __init__(
        self,
        catalog: Catalog,
        disk: Disk,
        quota: Quota,
        warn: Callable[[str], None],
        files: Mapping[str, CacheFile],
        identity: str,
        released: Callable[[set[str]], None],
    ) -> None:
        self._catalog = catalog
        self._disk = disk
        self._quota = quota
        self._warn = warn
        self._files = files
        self._identity = identity
        self._released = released
        self.has_neighbours = False
        self._dirty: dict[str, CacheFile] = {}  # with ranges that the catalog does not have
        # The name of the last file that was looked at to be synced.
        self._synced_to = ""
        # True if some were synced since the first file was looked at.
        self._has_synced = False
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
        """A file has new ranges or checksums."""
        if file.is_ours:  # else the name is another file's
            self._dirty[file.name] = file

    def used(self, file: CacheFile) -> None:
        """A file was used: its last-use time is written with the next batch."""
        self._used[file.name] = file

    def forget(self, file: CacheFile) -> None:
        """Drop the pending updates of a file."""
        if self._dirty.get(file.name) is file:
            del self._dirty[file.name]
        self._recording.discard(file)
        self._quota.uncommitted -= file.unrecorded

    def record_again(self, file: CacheFile) -> None:
        """Write a file's row anew, which was removed."""
        file.recorded = 0
        self._quota.uncommitted += file.present.total
        self.arrived(file)

    def lost(self, file: CacheFile) -> None:
        """A file is gone: remove its row with the next batch."""
        if file.recorded:
            self._changes.append(
                partial(self._catalog.remove, file.name, file.generation, file.st_ino)
            )

    def renamed(self, file: CacheFile, old_name: str) -> None:
        """A file has another name: rename its row with the next batch."""
        for files in (self._dirty, self._used):
            if files.get(old_name) is file:
                files[file.name] = files.pop(old_name)
        if file.recorded:
            self._changes.append(
                partial(self._catalog.rename, old_name, file.generation, file.st_ino, file.name)
            )
            # Recorded once more, it turns out whether another mount has that row.
            self._dirty[file.name] = file

    @property
    def new_files(self) -> int:
        """The number of files that the catalog does not have yet."""
        pending = {*self._dirty.values(), *self._recording}
        return sum(not file.recorded and file.present.total > 0 for file in pending)

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

    def is_idle(self, file: CacheFile) -> bool:
        """True if the catalog has all that is known of a file, so that it can be read again."""
        name = file.name
        is_pending = name in self._dirty or name in self._used or file in self._recording
        return not (is_pending or file.unrecorded or file.sums) and file.is_ours

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

            def update() -> tuple[list[bool], Total, bool]:
                for change in changes:
                    change()
                if retaining:
                    replaced = self._catalog.retain(self._identity, retaining, steady_time())
                    released.update(replaced)
                accepted, total = (
                    self._catalog.record(rows) if rows else ([], self._catalog.total())
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
            accepted, total, has_changed = answer
            self._quota.committed, self._quota.files = total
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
            if file.used_at == row.used_at and self._used.get(file.name) is file:
                del self._used[file.name]  # the row has the time as well
            file.recorded_sums(len(row.sums))

    async def remove(self, name: str, generation: str, st_ino: int, recorded: int) -> None:
        """Remove a row of `recorded` bytes now, or with the next batch if that fails."""
        async with self._counting:
            remove = partial(self._catalog.remove, name, generation, st_ino)
            changes, self._changes = self._changes, []

            def update() -> Total:
                for change in changes:
                    change()
                return remove()

            total = await self.in_catalog(update)
            if total is None:
                self._changes = [*changes, remove, *self._changes]
                # Else it would look as if nothing had become free, and all files would go.
                self._quota.committed -= recorded
            else:
                self._quota.committed, self._quota.files = total

    async def touch(self) -> None:
        """Write last-use times, for the order of eviction after a restart."""
        used, self._used = self._used, {}
        times = [(file.used_at, file.name, file.generation) for file in used.values()]
        await self.in_catalog(self._catalog.touch, times)

    async def sync_all(self, limit_s: float) -> None:
        """Make files safe against a power cut, as many as `limit_s` seconds suffice for."""
        with trio.move_on_after(limit_s):
            while await self.sync(idle_s=0.0):
                pass

    async def sync(self, idle_s: float) -> bool:
        """Make some files safe against a power cut that got no bytes for `idle_s` seconds.

        Returns False at the last of them, or where none of them could be synced. What the disk
        is too slow for is left to the next call, and what it refuses until all others have had
        their turn.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        after = self._synced_to
        rows = await self.in_catalog(self._catalog.unsynced, after, SYNC_AT_ONCE)
        if not rows:
            self._synced_to = ""
            has_synced, self._has_synced = self._has_synced, False
            return has_synced
        now = time.monotonic()
        due = [row for row in rows if self._may_be_synced(row, now - idle_s)]

        def sync_some() -> tuple[list[Row], str]:
            synced = []
            for row in due:
                if self._disk.sync(row.name, row.generation):
                    synced.append(row)
                if time.monotonic() - now >= SYNC_GO_S:
                    return synced, row.name
            return synced, rows[-1].name

        synced, self._synced_to = await trio.to_thread.run_sync(sync_some)
        marked = await self.in_catalog(self._catalog.mark_synced, synced)
        self._has_synced = self._has_synced or bool(marked)
        return True

    def _may_be_synced(self, row: Row, before: float) -> bool:
        """True unless a file got bytes since `before`, in monotonic seconds, or is about to."""
        file = self._files.get(row.name)
        if file is None or file.generation != row.generation:
            return True
        return file.written_at <= before and not file.downloads and not file.unrecorded

    async def in_catalog(self, function: Callable[..., Result], *args: object) -> Result | None:
        """Call a function in the catalog's thread, shielded, twice if damaged; None if it fails."""
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
        """After damage, begin another catalog with the files in memory; False if it was none."""
        if not is_damage(error):
            return False
        rows = [file.row() for file in self._files.values() if file.recorded]

        def begin_another() -> bool:
            try:
                return self._catalog.begin_another(error, rows)
            except OSError as why:
                raise sqlite3.OperationalError(str(why)) from why

        return await trio.to_thread.run_sync(begin_another, limiter=self._thread)
