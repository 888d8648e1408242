"""Batches updates of the catalog.

New ranges, last-use times and removals are collected in memory and written by
one worker thread: one commit per update would take longer than the download of
a small file. An update that is lost in a crash only costs a repeated download.
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

from fusefs.cache.cached_file import MOST_RANGES, CacheFile
from fusefs.cache.catalog import Catalog, KeyRange, Row, Stay, Total, key_ranges
from fusefs.cache.disk import Disk
from fusefs.cache.integrity.damage import is_damage
from fusefs.cache.quota import Quota
from fusefs.linux.clock import steady_time

logger = logging.getLogger("fusefs.cache")

Result = TypeVar("Result")

# Limits of one call that syncs files in a thread, in files and seconds: the call
# can't be cancelled, and on a busy disk each file may take a second.
SYNC_AT_ONCE = 256
SYNC_GO_S = 1.0


class CatalogWriter:
    """Writes one mount's updates to the catalog in batches. Belongs to the event loop.

    `files` are the files that this mount has in memory, by name. `warn` is called with the
    reason why the catalog can't be written, `released` with the names of files that may be
    evicted again. `has_neighbours` turns True when another mount has written to the catalog.
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
        # The name up to which `sync` has gone through the files that are not synced.
        self._synced_to = ""
        # True if any file was synced since `sync` began with the first name.
        self._has_synced = False
        self._used: dict[str, CacheFile] = {}
        # The files whose rows are being written, without those forgotten meanwhile.
        self._recording: set[CacheFile] = set()
        # Pending removals and renames of rows, in order.
        self._changes: list[Callable[[], object]] = []
        # The names of files to exclude from eviction, by key of the bucket `identity`.
        self._retaining: dict[str, str] = {}
        self._being_retained: dict[str, str] = {}
        self._thread = trio.CapacityLimiter(1)
        # Held while a total is computed and applied to the quota, so that an older
        # total never replaces a newer one.
        self._counting = trio.Lock()

    def arrived(self, file: CacheFile) -> None:
        """Schedule a file's new ranges and checksums for the next batch."""
        if file.is_ours:  # else another file has the name's row
            self._dirty[file.name] = file

    def used(self, file: CacheFile) -> None:
        """Schedule a file's last-use time for the next `touch`."""
        self._used[file.name] = file

    def forget(self, file: CacheFile) -> None:
        """Cancel the pending write of a file's row; its unrecorded bytes leave the quota."""
        if self._dirty.get(file.name) is file:
            del self._dirty[file.name]
        self._recording.discard(file)
        self._quota.uncommitted -= file.unrecorded

    def record_again(self, file: CacheFile) -> None:
        """Schedule a file's row, which was removed, to be written again."""
        file.recorded = 0
        self._quota.uncommitted += file.present.total
        self.arrived(file)

    def lost(self, file: CacheFile) -> None:
        """Schedule the removal of the row of a file that is gone."""
        if file.recorded:
            self._changes.append(
                partial(self._catalog.remove, file.name, file.generation, file.st_ino)
            )

    def renamed(self, file: CacheFile, old_name: str) -> None:
        """Schedule the renaming of the row of a file that was called `old_name`."""
        for files in (self._dirty, self._used):
            if files.get(old_name) is file:
                files[file.name] = files.pop(old_name)
        if file.recorded:
            self._changes.append(
                partial(self._catalog.rename, old_name, file.generation, file.st_ino, file.name)
            )
            # Writing the row again shows whether another mount owns the row of the new name.
            self._dirty[file.name] = file

    @property
    def new_files(self) -> int:
        """The number of files that the catalog does not have yet."""
        pending = {*self._dirty.values(), *self._recording}
        return sum(not file.recorded and file.present.total > 0 for file in pending)

    def retain(self, key: str, name: str) -> None:
        """Schedule the exclusion from eviction of the file `name`, a version of `key`."""
        self._retaining[key] = name

    @property
    def retaining(self) -> set[str]:
        """The names of files given to `retain` whose exclusion may not be in the catalog yet."""
        return {*self._being_retained.values(), *self._retaining.values()}

    async def release(self, path: str, stay: Stay, before: float = math.inf) -> bool:
        """Let the files of the keys at and below a path be evicted; False if the catalog fails.

        The files of keys that `stay` returns, and files that were given to `retain` at or after
        `before` (seconds since the epoch), stay excluded from eviction.
        """
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
        """True if the catalog has all data of a file, so that it can be unloaded and read again."""
        name = file.name
        is_pending = name in self._dirty or name in self._used or file in self._recording
        return not (is_pending or file.unrecorded or file.sums) and file.is_ours

    async def record(self, *, is_full: bool = False) -> None:
        """Write pending updates except last-use times; check if other mounts have written.

        Files with many ranges, whose large rows take long to write, wait until `is_full` or until
        much is not recorded: other mounts of the directory count only bytes that are recorded.
        """
        async with self._counting:
            is_full |= self._quota.uncommitted > self._quota.limit // 64
            files = [file for file in self._dirty.values() if file.generation and file.is_ours]
            slow = [file for file in files if file.recorded and file.present.count > MOST_RANGES]
            self._dirty = {} if is_full else {file.name: file for file in slow}
            files = [file for file in files if file.name not in self._dirty]
            changes, self._changes = self._changes, []
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
                    released.update(self._catalog.retain(self._identity, retaining, steady_time()))
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
                    # The file was dropped or evicted meanwhile, and its bytes deducted then.
                    remove = partial(self._catalog.remove, row.name, row.generation, row.st_ino)
                    self._changes.append(remove)

    def _was_recorded(self, file: CacheFile, row: Row, bytes_now: int, *, is_ours: bool) -> None:
        """Note in `file` the result of writing `row`, made when the file had `bytes_now` bytes.

        If not `is_ours`, the catalog refused the row, as another file has the row of its name.
        """
        if file.name != row.name:
            # Renamed meanwhile. Writing the row again shows which file owns the new name's row.
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
            if file.sums is not None:
                file.sums = file.sums[len(row.sums) :] or None

    async def remove(self, name: str, generation: str, st_ino: int, recorded: int) -> None:
        """Remove a file's row (of `recorded` bytes) now, or with the next batch if that fails."""
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
                # Otherwise the evictor would see no bytes become free, and evict all files.
                self._quota.committed -= recorded
            else:
                self._quota.committed, self._quota.files = total

    async def touch(self) -> None:
        """Write the pending last-use times, for the order of eviction after a restart."""
        used, self._used = self._used, {}
        times = [(file.used_at, file.name, file.generation) for file in used.values()]
        await self.in_catalog(self._catalog.touch, times)

    async def sync(self, idle_s: float) -> bool:
        """Sync some files that got no bytes for `idle_s` seconds, so that they survive a power cut.

        Returns True if another call may sync more. Calls go through the files by name: each call
        continues where the last call ended. Failed files are retried after all others.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        rows = await self.in_catalog(self._catalog.unsynced, self._synced_to, SYNC_AT_ONCE)
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
        """False if a row's file got bytes after `before` (monotonic seconds), or will get some."""
        file = self._files.get(row.name)
        if file is None or file.generation != row.generation:
            return True
        return file.written_at <= before and not file.downloads and not file.unrecorded

    async def in_catalog(self, function: Callable[..., Result], *args: object) -> Result | None:
        """Run `function` in the catalog's thread, uncancellably; if it fails, warn and return None.

        A damaged catalog is replaced, and `function` is called again.
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
        """Begin a new catalog with the files in memory if `error` is damage; else return False."""
        if not is_damage(error):
            return False
        rows = [file.row() for file in self._files.values() if file.recorded]
        begin_another = partial(self._catalog.begin_another, error, rows)
        return await trio.to_thread.run_sync(begin_another, limiter=self._thread)
