"""Counting and dropping the cached copies of a path: `fusefs status PATH`, `fusefs drop`.

A job lists a path or pattern as `fusefs warm` does (selection.py), and looks up the
cached copy of each version in the listing. Files that programs have open, pinned files
and files that wait for upload are counted, but never dropped. Copies of versions that
the bucket no longer has are dropped, too, if this process has used them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.evictor import Evictor
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.jobs.job import Job, JobTable
from fusefs.daemon.jobs.selection import Selected, Selector
from fusefs.posix.nodes.names import is_at_or_below
from fusefs.settings.patterns import is_pattern, matches
from fusefs.store.errors import NotFoundError

# The maximum number of files that an answer names; the others are only counted.
MOST_NAMED = 10
# The number of files that are looked at before other tasks get a turn.
TURN = 100

# A function that returns the number and the bytes of files at or below a key that wait for upload.
Pending = Callable[[str], tuple[int, int]]


# The prefixes of counts; "" is for all files. `local`: whole copies and empty files; `partial`: the
# cached bytes of incomplete copies; `in_use`: copies that programs have open, and were not dropped.
KINDS = ("", "local_", "partial_", "pinned_", "downloading_", "dropped_", "in_use_", "pending_")


@dataclass
class CopiesJob(Job):
    """A job that counts or drops copies: `counts` of files, number of `pins`, paths `in_use`."""

    is_pinned: bool = False
    pins: int = 0
    in_use: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts = {f"{kind}{what}": 0 for kind in KINDS for what in ("files", "bytes")}

    def add(self, kind: str, size: int, files: int = 1) -> None:
        self.counts[f"{kind}files"] += files
        self.counts[f"{kind}bytes"] += size

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.counts


@dataclass
class Unpinning(Job):
    """A job that removes `pins` pins; if that is 0, `above` has the pinned parent directories."""

    pins: int = 0
    above: list[str] = field(default_factory=list)


class LocalCopies:
    """The jobs of one mount that count or drop copies or remove pins. For the event loop."""

    def __init__(
        self,
        cache: FileCache,
        evictor: Evictor,
        selector: Selector,
        prefix: str,
        nursery: trio.Nursery,
        pending: Pending,
        cancel_pins: Callable[[str], Awaitable[None]],
    ) -> None:
        self._cache = cache
        self._evictor = evictor
        self._selector = selector
        self._prefix = prefix
        self._jobs = JobTable[CopiesJob](nursery)
        self._unpinning = JobTable[Unpinning](nursery)
        self._pending = pending
        self._cancel_pins = cancel_pins

    def job(self, path: str, *, is_new: bool, drops: bool = False) -> CopiesJob:
        """Return the job that counts or `drops` copies at a path; `is_new` repeats an ended job."""
        return self._jobs.find_or_begin(
            (path, drops), CopiesJob, partial(self._look, path, drops=drops), is_new=is_new
        )

    def unpinning(self, path: str, *, is_new: bool) -> Unpinning:
        """Return the job that removes pins of a path or pattern; `is_new` repeats an ended job."""
        return self._unpinning.find_or_begin(
            path, Unpinning, partial(self._unpin, path), is_new=is_new
        )

    async def _unpin(self, path: str, job: Unpinning) -> None:
        try:
            await self._cancel_pins(path)
            job.pins = await self._cache.retention.remove_pins(self._key(path))
            if not job.pins and is_pattern(path):
                root = self._key("")  # shown as ".", which no pattern shall match
                job.pins = await self._cache.retention.remove_pins(
                    root, lambda pin: pin != root and matches(path, self._shown(pin))
                )
            if not job.pins:
                above = self._cache.retention.pins_above(self._key(path))
                job.above = [self._shown(pin) for pin in above[:MOST_NAMED]]
        except OSError as error:
            job.why = f"the pins can't be changed: {error.strerror or error}"

    def _key(self, path: str) -> str:
        """Return the key or prefix of a path, without a slash at the end."""
        return self._prefix + path if path else self._prefix.rstrip("/")

    def _shown(self, key: str) -> str:
        """Return a key's path in the mount; "." for the root or a key above the root."""
        return key[len(self._prefix) :] or "."

    async def _look(self, path: str, job: CopiesJob, *, drops: bool) -> None:
        key = self._key(path)
        await self._cache.retention.refresh()
        job.is_pinned = self._cache.retention.covers(key)
        job.pins = await self._cache.retention.count(key)
        files, size = self._pending(key)
        job.add("pending_", size, files)
        staying: set[CacheFile] = set()

        async def look(selected: Selected) -> None:
            files = await self._cache.look_up(info.version for info in selected.objects)
            for number, (info, file) in enumerate(zip(selected.objects, files, strict=True)):
                job.add("", info.size)
                if not info.size:
                    job.add("local_", 0)  # an empty file needs no copy
                if file is not None and await self._is_there(file):
                    file.version = file.version or info.version
                    _count(job, file)
                    if drops and file.present.total:
                        await self._drop(job, file)
                        if file.present.total:
                            staying.add(file)
                if number % TURN == 0:
                    await trio.lowlevel.checkpoint()

        try:
            await self._selector.select(path, look)
        except NotFoundError:
            if not job.counts["pending_files"]:
                raise
        if drops:
            await self._drop_others(job, key, staying)

    async def _is_there(self, file: CacheFile) -> bool:
        if file.pins or not self._cache.has_neighbours:
            return True
        return await self._cache.integrity.is_on_disk(file)  # another mount may have evicted it

    async def _drop(self, job: CopiesJob, file: CacheFile) -> None:
        if file.is_retained:
            return
        size = file.present.total
        self._cache.close_unused()
        if file.pins or not await self._evictor.drop(file):
            job.add("in_use_", size)
            if len(job.in_use) < MOST_NAMED and file.version is not None:
                job.in_use.append(file.version.key[len(self._prefix) :])
        else:
            job.add("dropped_", size)

    async def _drop_others(self, job: CopiesJob, key: str, staying: Set[CacheFile]) -> None:
        """Drop unused copies at and below `key` except `staying`, whose versions the bucket has."""
        for number, file in enumerate(self._cache.files()):
            version = file.version
            is_idle = file.present.total and not file.pins and not file.is_retained
            is_other = is_idle and file not in staying
            if version is not None and is_other and is_at_or_below(version.key, key):
                await self._drop(job, file)
            if number % (10 * TURN) == 0:
                await trio.lowlevel.checkpoint()


def _count(job: CopiesJob, file: CacheFile) -> None:
    size = file.present.total
    if file.is_retained:
        job.add("pinned_", size)
    if file.downloads:
        job.add("downloading_", file.size - size)
    if size:
        job.add("local_" if file.is_complete else "partial_", size)
