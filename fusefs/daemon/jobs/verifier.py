"""Compares cached copies with their checksums on request: `fusefs verify`, the daemon's side.

What is at or below a path is listed in the bucket (selection.py), and the cached copies of
the versions that the listing names are read from the disk. What differs is dropped and
fetched again at once, so the answer says whether the bucket still has it.
What is not in the bucket yet is compared as well, and kept even if it differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from fusefs.cache.downloader import PART, Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.jobs.job import Job, JobTable
from fusefs.daemon.jobs.selection import Selected, Selector
from fusefs.linux.clock import steady_time
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write import staged_sums
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.verify")

# Files that are named in an answer; the others are counted.
MOST_NAMED = 1000


@dataclass
class Verification(Job):
    """The verification of one path; `differed` and `lost` name files.

    `lost_files` could not be fetched again. `skipped_files` are there, and could not be read to
    their ends.
    """

    files: int = 0
    bytes: int = 0
    skipped_files: int = 0
    differed_files: int = 0
    differed: list[str] = field(default_factory=list)
    lost_files: int = 0
    lost: list[str] = field(default_factory=list)

    def note_differing(self, name: str) -> None:
        """Count a file whose bytes differed from its checksums; the first ones are named."""
        self.differed_files += 1
        if len(self.differed) < MOST_NAMED:
            self.differed.append(name)

    def note_lost(self, name: str, why: str) -> None:
        """Count a file that could not be compared to its end; the first ones are named."""
        self.lost_files += 1
        if len(self.lost) < MOST_NAMED:
            self.lost.append(f"{name} ({why})")


class Verifier:
    """The verifications of one mount. Belongs to the event loop.

    `unsent` gives the files at or below a key that the bucket does not have yet.
    """

    def __init__(
        self,
        selector: Selector,
        cache: FileCache,
        downloader: Downloader,
        prefix: str,
        nursery: trio.Nursery,
        unsent: Callable[[str], list[StagedFile]],
    ) -> None:
        self._selector = selector
        self._cache = cache
        self._downloader = downloader
        self._prefix = prefix
        self._unsent = unsent
        self._jobs = JobTable[Verification](nursery)

    def job(self, path: str, *, is_new: bool) -> Verification:
        """The verification of a path ("" is the mount's root), begun as `JobTable` does."""
        return self._jobs.find_or_begin(
            path, Verification, partial(self._verify_path, path), is_new=is_new
        )

    async def _verify_path(self, path: str, job: Verification) -> None:
        for staged in self._unsent(self._prefix + path):
            # It may be uploaded, and its file closed, while another one is compared.
            if staged.inode.staged is staged:
                await self._verify_unsent(job, staged)
        try:
            await self._selector.select(path, partial(self._verify_all, job))
        except NotFoundError:
            if not job.files:
                raise

    async def _verify_unsent(self, job: Verification, staged: StagedFile) -> None:
        key, size = staged.key, staged.size()
        try:
            await staged_sums.check(staged)
        except OSError as error:
            job.note_lost(key[len(self._prefix) :], error.strerror or str(error))
        job.files += 1
        job.bytes += size

    async def _verify_all(self, job: Verification, selected: Selected) -> None:
        for info in selected.objects:
            await self._verify(job, info)
        await trio.lowlevel.checkpoint()

    async def _verify(self, job: Verification, info: ObjectInfo) -> None:
        [file] = await self._cache.look_up([info.version])
        if file is None or not file.present.total:
            return
        present = list(file.present)
        file.version = file.version or info.version
        examined = await self._cache.integrity.examine(file, is_direct=True)
        if examined.fault is None and not examined.is_whole:
            if not await self._cache.integrity.is_on_disk(file):
                return  # it was evicted
            # It may have been renamed meanwhile.
            examined = await self._cache.integrity.examine(file, is_direct=True)
        if examined.fault is None and not examined.is_whole:
            logger.warning("the cached copy of %s can't be read to be compared", info.key)
            job.skipped_files += 1
            return
        job.files += 1
        job.bytes += examined.size
        if examined.fault is None:
            return
        name = info.key[len(self._prefix) :]
        try:
            await self._fetch(info, present)
        except NotKeptError:
            pass  # there is no room: readers get it from the bucket
        except (StaleVersionError, NotFoundError):
            pass  # it was replaced or removed: this version is not needed
        except StoreError as error:
            job.note_lost(name, str(error))
            return
        job.note_differing(name)

    async def _fetch(self, info: ObjectInfo, ranges: list[tuple[int, int]]) -> None:
        """Fetch ranges that were dropped into the cache again."""
        file = self._cache.pin(info.version)
        try:
            for start, stop in ranges:
                for at in range(start, stop, PART):
                    await self._downloader.fill(file, at, min(at + PART, stop), steady_time())
        finally:
            self._cache.unpin(file)
