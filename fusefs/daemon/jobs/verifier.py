"""Compares cached copies with their checksums on request: `fusefs verify`, the daemon's side.

What is at or below a path is listed in the bucket (selection.py), and the cached copies of
the versions that the listing names are read from the disk. What differs is dropped and
fetched again at once, so the answer says whether the bucket still has it.
What is not in the bucket yet is compared as well, and kept even if it differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from fusefs.cache.downloader import PART, Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.jobs.selection import Selected, Selector
from fusefs.linux.clock import steady_time
from fusefs.posix.nodes.inode import StagedFile
from fusefs.posix.write import staged_sums
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.verify")

# Files that are named in an answer; the others are counted.
MOST_NAMED = 1000
# Verifications that can still be described after they have ended.
MOST_ENDED = 100


class Verification:
    """The verification of one path.

    `differed` and `lost` name files, `size` counts bytes, and `why` is the error that ended it.
    `skipped_files` are there, and could not be read to their ends.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.has_ended = False
        self.files = 0
        self.size = 0
        self.skipped_files = 0
        self.differed_files = 0
        self.differed: list[str] = []
        self.lost_files = 0
        self.lost: list[str] = []
        self.why: str | None = None

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

    def describe(self) -> dict[str, Any]:
        """The verification as JSON can hold it; sizes are in bytes."""
        return {
            "path": self.path,
            "has_ended": self.has_ended,
            "files": self.files,
            "bytes": self.size,
            "skipped_files": self.skipped_files,
            "differed_files": self.differed_files,
            "differed": self.differed,
            "lost_files": self.lost_files,
            "lost": self.lost,
            "why": self.why,
        }


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
        self._nursery = nursery
        self._unsent = unsent
        self._jobs: dict[str, Verification] = {}

    def start(self, path: str) -> Verification:
        """Start the verification of a path ("" is the mount's root), or join it if under way."""
        job = self._jobs.get(path)
        if job is None or job.has_ended:
            ended = [old for old, other in self._jobs.items() if other.has_ended]
            for old in ended[:-MOST_ENDED]:
                del self._jobs[old]
            job = self._jobs[path] = Verification(path)
            self._nursery.start_soon(self._run, job)
        return job

    def find(self, path: str) -> Verification:
        return self._jobs.get(path) or self.start(path)

    async def _run(self, job: Verification) -> None:
        try:
            for staged in self._unsent(self._prefix + job.path):
                # It may be uploaded, and its file closed, while another one is compared.
                if staged.inode.staged is staged:
                    await self._verify_unsent(job, staged)
            await self._selector.select(job.path, partial(self._verify_all, job))
        except NotFoundError as error:
            if not job.files:
                job.why = str(error)
        except StoreError as error:
            job.why = str(error)
        except Exception as error:  # no fault in it is to end the mount
            logger.exception("verifying %r", job.path)
            job.why = f"a fault in fusefs, see the log: {error!r}"
        finally:
            job.has_ended = True

    async def _verify_unsent(self, job: Verification, staged: StagedFile) -> None:
        key, size = staged.key, staged.size()
        try:
            await staged_sums.check(staged)
        except OSError as error:
            job.note_lost(key[len(self._prefix) :], error.strerror or str(error))
        job.files += 1
        job.size += size

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
        job.size += examined.size
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
