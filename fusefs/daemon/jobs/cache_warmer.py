"""The cache warmer, which fetches files before they are read: `fusefs warm` and `fusefs pin`.

A *job* selects all objects, or a shard, of a path of the mount (a file, or all files below a
directory), a pattern, or a list of paths. Listings find the objects (selection.py) and their
versions, so no node is made for the kernel. Files in the cache are skipped. On a writable mount,
whose lookups need each object's metadata, the job also sends a HEAD for each object.

All jobs share a bounded number of requests, and downloads for programs go first. A job stops
fetching when it could make room only by evicting files that it has fetched itself or that were
used since it began; it then only counts the files that do not fit. A job that pins first puts its
selection on record (cache/retention.py), and may evict all files that are not pinned.

The mount's state directory has a record of the jobs under way, and their lists, which arrive in
pieces; a daemon that takes over the mount continues these jobs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.error_groups import first_of
from fusefs.daemon.jobs.job import Job
from fusefs.daemon.jobs.selection import Deliver, Selected, Selector, Shard
from fusefs.daemon.takeover import Takeover, state_directory
from fusefs.launch.control import ControlError
from fusefs.linux import files
from fusefs.linux.clock import steady_time
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.settings.mount import MountSettings
from fusefs.settings.patterns import is_pattern, matches
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo

if TYPE_CHECKING:
    from fusefs.cluster_cache.filler import Filler

logger = logging.getLogger("fusefs.daemon.jobs.cache_warmer")

# The number of pages that are listed ahead of the fetching: 20 MB of memory.
PAGES_AHEAD = 50
# The number of a list's lines that are looked up together.
BLOCK_LINES = 20_000
# The bytes of all lists, which pods may write and no setting limits.
MOST_LISTED = 2 << 30
# A time later than each last use: a job that pins may evict any file that is not pinned.
EVICT_ANYTHING = sys.float_info.max
# The maximum number of parts that wait until the cluster cache has stored them: 2 GiB. Parts that
# the cluster cache has already do not wait for it, so a slow cluster cache does not delay them.
MOST_UNSTORED = 256
# The number of files that are skipped before other tasks get a turn.
TURN = 100
# The number of ended jobs that are kept for `describe`.
MOST_ENDED = 2000
# The number of failed files that a job names.
MOST_NAMED = 10
# The number of jobs for which `describe` returns the names of failed files.
MOST_WITH_NAMES = 100
# The speed is computed over this many seconds.
SPEED_OVER_S = 20


T = TypeVar("T")
_LIST_NAME = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The arguments of a job: its files, and whether they are pinned.

    `path` is a path or pattern of the mount ("" is the root), or the title of the list in
    the file `list_name`. Only the objects of `shard`, if given, are fetched; all selected
    objects are pinned if `is_pinned`.
    """

    path: str
    shard: Shard | None = None
    is_pinned: bool = False
    list_name: str = ""

    @property
    def id(self) -> str:
        """The job's identifier: its path or list's name, then shard and "pin" if it has them."""
        parts = [f"list {self.list_name}" if self.list_name else self.path]
        if self.shard is not None:
            parts.append(f"shard {self.shard.number}/{self.shard.count}")
        if self.is_pinned:
            parts.append("pin")
        return "\0".join(parts)

    @property
    def title(self) -> str:
        shard = self.shard
        return f"{self.path} (shard {shard.number}/{shard.count})" if shard else self.path

    def plain(self) -> list[object]:
        """Return the fields as a list for JSON, which `from_plain` reads."""
        shard = [self.shard.number, self.shard.count] if self.shard else None
        return [self.path, shard, self.is_pinned, self.list_name]

    @classmethod
    def from_plain(cls, path: str, shard: Any, is_pinned: Any, list_name: Any) -> JobSpec:
        """Make a spec from `plain`'s result or a request; ValueError or TypeError if invalid."""
        if shard is not None:
            number, count = map(int, shard)
            if not 0 <= number < count:
                raise ValueError("no such shard")
            shard = Shard(number, count)
        if list_name and not _LIST_NAME.fullmatch(list_name):
            raise ValueError("no list has such a name")
        return cls(str(path), shard, bool(is_pinned), str(list_name))


@dataclass
class WarmCounts(Job):
    """The progress of a job; `unshared_blocks`: blocks that the cluster cache did not store."""

    is_listed: bool = False
    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    fetched_bytes: int = 0
    left_out_files: int = 0
    left_out_bytes: int = 0
    failed_files: int = 0
    failed: list[str] = field(default_factory=list)
    unshared_blocks: int = 0


class WarmJob(WarmCounts):
    """A warm or pin job with its progress, started at `since` (seconds since the epoch)."""

    def __init__(self, spec: JobSpec, since: float, unpinned: Iterable[str] = ()) -> None:
        super().__init__()
        self.spec = spec
        self.since = since
        self.scope = trio.CancelScope()
        # Paths and patterns that were unpinned since the start, and must not be pinned again; the
        # job holds `pinning` while it adds pins.
        self.unpinned = list(map(str, unpinned))
        self.pinning = trio.Lock()
        self.is_full = False
        # Pairs of a time (monotonic seconds) and the number of bytes fetched until then.
        self._samples = deque([(time.monotonic(), 0)], maxlen=SPEED_OVER_S)

    @property
    def is_ending(self) -> bool:
        return self.has_ended or self.scope.cancel_called

    def is_within(self, path: str) -> bool:
        """True if the job's path is at or below `path`; for a list, if `path` is the root ("")."""
        if self.spec.list_name:
            return not path
        return not path or self.spec.path == path or self.spec.path.startswith(path + "/")

    def is_unpinned(self, path: str) -> bool:
        return any(
            path == other or path.startswith(other + "/") or matches(other, path)
            for other in self.unpinned
        )

    def found(self, infos: Sequence[ObjectInfo], *, is_last: bool) -> None:
        """Count the files on a page of the listing; `is_last` says that no page follows."""
        self.files += len(infos)
        self.bytes += sum(info.size for info in infos)
        self.is_listed = is_last

    def has(self, size: int) -> None:
        self.done_files += 1
        self.done_bytes += size

    def arrived(self, size: int, fetched: int) -> None:
        """Count `size` bytes that are in the cache now, of which `fetched` were downloaded."""
        self.done_bytes += size
        self.fetched_bytes += fetched
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self.fetched_bytes))

    def leave_out(self, size: int) -> None:
        """Count a file, or the rest of a file, for which the cache has no room."""
        self.left_out_files += 1
        self.left_out_bytes += size

    def lost(self, size: int, arrived: int) -> None:
        """Uncount a file that has changed: its `size` as listed, and its bytes that `arrived`."""
        self.files -= 1
        self.bytes -= size
        self.done_bytes -= arrived

    def fail(self, path: str, error: StoreError) -> None:
        self.failed_files += 1
        if len(self.failed) < MOST_NAMED:
            self.failed.append(f"{path} ({error})")

    def miss(self, line: int, path: str, error: StoreError) -> None:
        """Count a line of a list that names no existing file."""
        self.files += 1
        self.fail(f"line {line}: {path}", error)

    def describe_within(self, limit: int) -> dict[str, Any]:
        """Return counts, id, path, state and ETA for JSON, and the cache's `limit` in bytes."""
        return self.describe() | {
            "id": self.spec.id,
            "path": self.spec.title,
            "is_pinned": self.spec.is_pinned,
            "state": self._state(),
            "limit_bytes": limit,
            "eta_s": self._eta_s(),
        }

    def _state(self) -> str:
        if not self.has_ended:
            return "under way" if self.files or self.is_listed else "listing"
        return "cancelled" if self.scope.cancelled_caught else "ended"

    def _eta_s(self) -> float | None:
        """Return the seconds until the job ends at its recent speed; None if unknown."""
        began, fetched = self._samples[0]
        passed_s = time.monotonic() - began
        if self.has_ended or not self.is_listed or self.fetched_bytes == fetched or passed_s <= 0:
            return None
        remaining = self.bytes - self.done_bytes - self.left_out_bytes
        return max(0, remaining) * passed_s / (self.fetched_bytes - fetched)


class CacheWarmer:
    """The warm and pin jobs of one mount. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        cache: FileCache,
        downloader: Downloader,
        settings: MountSettings,
        selector: Selector,
        filler: Filler | None = None,
    ) -> None:
        self._filler = filler
        # The share of a page or a file (0 to 1) at which this node begins to fetch.
        self._turn = _turn(settings) if filler is not None else 0.0
        self._store = store
        self._cache = cache
        self._downloader = downloader
        self._prefix = settings.source.prefix
        self._record = state_directory(settings) / "warming.json"
        self._lists = state_directory(settings) / "warming"
        self._recording = trio.Lock()
        self._jobs: dict[str, WarmJob] = {}
        self._nursery: trio.Nursery
        self._head_cache: HeadCache
        self._has_begun = trio.Event()
        # The store reserves some connections for programs' requests. With as many slots as
        # connections, a request always waits in the store, and is sent once a connection is free.
        self._slots = trio.Semaphore(downloader.most_small)
        # A slot for each part that is being fetched, or that the cluster cache has not stored yet.
        self._parts = trio.Semaphore(downloader.most_small + MOST_UNSTORED)
        self._selector = selector

    async def run(self, takeover: Takeover | None, head_cache: HeadCache) -> None:
        """Run jobs until cancelled; after a takeover, first restart the last daemon's jobs."""
        self._head_cache = head_cache
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if takeover is not None and not takeover.is_fresh:
                for job in await trio.to_thread.run_sync(self._read):
                    self._begin(job)
            await trio.to_thread.run_sync(self._remove_lists)
            await self._write()
            self._has_begun.set()
            await trio.sleep_forever()

    async def start(self, spec: JobSpec) -> WarmJob:
        """Return the job under way for `spec` or a new job; ControlError if its list is missing."""
        await self._has_begun.wait()
        if spec.list_name and not (self._lists / spec.list_name).exists():
            raise ControlError("the list is incomplete, for the daemon was replaced; try again")
        job = self._jobs.get(spec.id)
        if job is not None and job.unpinned:
            job.scope.cancel()  # it would leave out the unpinned paths
        if job is None or job.is_ending:
            job = WarmJob(spec, steady_time())
            self._begin(job)
        await self._write()
        return job

    async def append(self, list_name: str, offset: int, lines: str) -> None:
        """Write lines, perhaps again, at `offset` bytes of a list's file; below 0, remove the file.

        Raises:
            ControlError: the list can't be written, or lines before `offset` are missing.
        """
        await self._has_begun.wait()
        if not _LIST_NAME.fullmatch(list_name):
            raise ControlError("no list has such a name")

        def write() -> None:
            path, content, used = self._lists / list_name, lines.encode(), 0
            if offset < 0:
                path.unlink(missing_ok=True)
                return
            self._lists.mkdir(mode=0o700, parents=True, exist_ok=True)
            for other in self._lists.iterdir():
                with suppress(FileNotFoundError):  # its job has just ended
                    used += other.stat().st_size
            if used + len(content) > MOST_LISTED:
                raise ControlError("the lists of a mount have 2 GiB together at most")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                if offset > os.fstat(fd).st_size:
                    raise ControlError(
                        "the list is incomplete, for the daemon was replaced; try again"
                    )
                file.seek(offset)
                file.write(content)

        try:
            await trio.to_thread.run_sync(write)
        except OSError as error:
            raise ControlError(f"the list can't be kept: {error.strerror}") from error

    def cancel(self, path: str) -> bool:
        """Cancel the jobs at and below a path; return True if any was under way."""
        jobs = [job for job in self._jobs.values() if not job.is_ending and job.is_within(path)]
        for job in jobs:
            job.scope.cancel()
        return bool(jobs)

    async def cancel_pins(self, path: str) -> None:
        """Stop all jobs from pinning files at or below `path`, or files that `path` matches.

        Jobs within `path` are cancelled; other jobs of a list or a pattern leave these files
        out. When the call returns, no job is adding such pins.
        """
        await self._has_begun.wait()
        pinning = [job for job in self._jobs.values() if job.spec.is_pinned and not job.has_ended]
        for job in pinning:
            if job.is_within(path):
                job.scope.cancel()
                await job.ended.wait()
            elif job.spec.list_name or is_pattern(job.spec.path):
                job.unpinned.append(path)
                async with job.pinning:
                    continue
        await self._write()  # else the next daemon could pin them again

    def describe(self) -> list[dict[str, Any]]:
        """Return the jobs as dicts for JSON, the latest job last."""
        jobs = [job.describe_within(self._cache.quota.limit) for job in self._jobs.values()]
        # With the names of all jobs the answer could be too large (launch/control.py).
        for job in [job for job in jobs if job["failed"]][:-MOST_WITH_NAMES]:
            job["failed"] = []
        return jobs

    def _begin(self, job: WarmJob) -> None:
        self._jobs.pop(job.spec.id, None)
        ended = [known for known, other in self._jobs.items() if other.has_ended]
        for known in ended[: -MOST_ENDED or None]:
            del self._jobs[known]
        self._jobs[job.spec.id] = job
        self._nursery.start_soon(self._run, job)

    # The record and the lists

    def _read(self) -> list[WarmJob]:
        now = steady_time()
        try:
            return [
                WarmJob(JobSpec.from_plain(*spec[:4]), min(float(since), now), *spec[4:])
                for since, *spec in json.loads(self._record.read_text())
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            logger.warning("the jobs of the cache warmer can't be read: %s", error)
            return []

    async def _write(self) -> None:

        def write(content: str) -> None:
            try:
                self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.replace(self._record, content)
            except OSError as error:
                logger.warning("the jobs of the cache warmer can't be put on record: %s", error)

        async with self._recording:
            jobs = [
                # Without an empty list, which earlier versions can't read.
                [job.since, *job.spec.plain(), *([job.unpinned] if job.unpinned else [])]
                for job in self._jobs.values()
                if not job.has_ended
            ]
            await trio.to_thread.run_sync(write, json.dumps(jobs))

    def _remove_lists(self) -> None:
        """Remove the lists that no job uses. Blocks."""
        used = {job.spec.list_name for job in self._jobs.values()}
        try:
            for path in self._lists.iterdir():
                if path.name not in used:
                    path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("the lists of the cache warmer can't be removed: %s", error)

    def _is_used(self, list_name: str) -> bool:
        jobs = self._jobs.values()
        return any(job.spec.list_name == list_name and not job.has_ended for job in jobs)

    # One job

    async def _run(self, job: WarmJob) -> None:
        logger.info("warming %r", job.spec.title)
        try:
            with job.scope:
                await self._fetch(job)
                if job.spec.is_pinned:
                    await self._finish_pin(job)
        except Exception as error:
            # Caught, because the job is on record: the error would end each next daemon, too.
            logger.exception("warming %r", job.spec.title)
            job.why = f"a fault in fusefs, see the log: {first_of(error)!r}"
        job.ended.set()
        if job.spec.list_name and not self._is_used(job.spec.list_name):
            with suppress(OSError):  # a bad disk must not end the mount
                (self._lists / job.spec.list_name).unlink()
        logger.info("warmed %r: %s", job.spec.title, job.describe_within(self._cache.quota.limit))
        await self._write()

    async def _fetch(self, job: WarmJob) -> None:
        send, receive = trio.open_memory_channel[list[ObjectInfo]](PAGES_AHEAD)
        async with trio.open_nursery() as nursery, receive:
            nursery.start_soon(self._list, job, send)
            async for page in receive:
                await self._cache.look_up(info.version for info in page)  # at once, for `_bring`
                for info in self._in_turn(page):
                    await self._bring(job, nursery, info)

    async def _finish_pin(self, job: WarmJob) -> None:
        """Write the cache's records; after a full pin of a path, unlisted files may be evicted."""
        await self._cache.record()
        is_all = job.why is None and not job.left_out_files
        if is_all and not job.spec.list_name and not is_pattern(job.spec.path):
            key = self._prefix + job.spec.path
            await self._cache.retention.release_unused(key.removesuffix("/"), job.since)

    async def _list(self, job: WarmJob, send: trio.MemorySendChannel[list[ObjectInfo]]) -> None:
        shard = job.spec.shard

        async def deliver(selected: Selected) -> None:
            if job.spec.is_pinned:
                try:
                    async with job.pinning:
                        at = len(self._prefix)
                        roots = [root for root in selected.roots if not job.is_unpinned(root[at:])]
                        await self._cache.retention.add(roots)
                except OSError as error:
                    why = error.strerror or str(error)
                    raise StoreError(f"the pin can't be put on record: {why}") from error
            infos = [info for info in selected.objects if shard is None or shard.has(info.key)]
            job.found(infos, is_last=False)
            await send.send(infos)

        async with send:
            try:
                if job.spec.list_name:
                    await self._select_lines(job, deliver)
                else:
                    await self._selector.select(job.spec.path, deliver)
            except StoreError as error:
                job.why = str(error)
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                job.why = f"its list can't be read: {why}"
            else:
                job.is_listed = True

    async def _select_lines(self, job: WarmJob, deliver: Deliver) -> None:
        """Deliver the objects at or below the paths in the job's list; lines count from 1."""
        path, number = self._lists / job.spec.list_name, 0
        # A carriage return may be part of a path.
        opening = partial(path.open, encoding="utf-8", newline="\n")
        with await trio.to_thread.run_sync(opening) as file:
            while lines := await trio.to_thread.run_sync(lambda: list(islice(file, BLOCK_LINES))):
                numbered = [(at, line.rstrip("\n")) for at, line in enumerate(lines, number + 1)]
                number += len(lines)
                wanted = [(at, line) for at, line in numbered if line]
                await self._selector.select_lines(wanted, deliver, job.miss)

    async def _bring(
        self, job: WarmJob, nursery: trio.Nursery, info: ObjectInfo, *, is_again: bool = False
    ) -> None:
        """Start the requests for one file, each as soon as a slot is free; skip a cached file.

        If the object changes meanwhile, the call is repeated for its new version, once: `is_again`.
        """
        if self._head_cache.lacks_version(info):
            await self._slots.acquire()
            nursery.start_soon(self._learn, info)
        [known] = await self._cache.look_up([info.version])
        is_there = known is not None and known.is_complete and not known.is_opening
        if known is not None and is_there and info.size and self._cache.has_neighbours:
            is_there = await self._cache.integrity.is_on_disk(known)
        if not info.size or is_there:
            file = self._cache.pin(info.version)  # counts as a use
            self._retain(job, file)
            self._cache.unpin(file)
            job.has(info.size)
            if job.done_files % TURN == 0:
                await trio.lowlevel.checkpoint()
            return
        if job.is_full or info.size > self._cache.quota.limit:
            job.leave_out(info.size)
            return
        work = _Work(job, info, self._cache.pin(info.version))
        self._retain(job, work.file)
        if not is_again:
            work.again = lambda: nursery.start_soon(self._bring_again, job, nursery, info.key)
        try:
            for start in self._in_turn(range(0, info.size, PART)):
                await self._take_turn()
                if work.is_over:
                    self._slots.release()
                    self._parts.release()
                    break
                work.under_way += 1
                nursery.start_soon(self._part, work, start, min(start + PART, info.size))
        finally:
            self._let_go(work)

    async def _take_turn(self) -> None:
        await self._parts.acquire()
        try:
            await self._slots.acquire()
        except trio.Cancelled:
            self._parts.release()
            raise

    def _in_turn(self, items: Sequence[T]) -> list[T]:
        """Rotate items, so that each node of a cluster cache begins at a different item."""
        first = int(self._turn * len(items))
        return [*items[first:], *items[:first]]

    def _retain(self, job: WarmJob, file: CacheFile) -> None:
        if job.spec.is_pinned:
            self._cache.retention.retain_again(file)

    async def _learn(self, info: ObjectInfo) -> None:
        try:
            await self._head_cache.learn_version(info)
        finally:
            self._slots.release()

    async def _part(self, work: _Work, start: int, stop: int) -> None:
        try:
            try:
                has_arrived = await self._fill(work, start, stop)
            finally:
                self._slots.release()
            if has_arrived and self._filler is not None:
                unshared = await self._filler.finish(work.file, start, stop)
                work.job.unshared_blocks += unshared
        finally:
            self._parts.release()
            self._let_go(work)

    async def _fill(self, work: _Work, start: int, stop: int) -> bool:
        """Fetch a part of a file that the cache lacks; return False if the part can't be cached."""
        job, file = work.job, work.file
        try:
            since = EVICT_ANYTHING if job.spec.is_pinned else job.since
            missing = await self._downloader.fill(file, start, stop, since)
            work.arrived += stop - start
            job.arrived(stop - start, missing)
            return True
        except NotKeptError:
            if file.is_kept:
                job.is_full = True
            elif not file.is_ours:
                work.error = StaleVersionError("the cached copy was damaged, and was dropped")
            else:
                work.error = StoreError(self._cache.trouble.recent or "the cache does not take it")
        except StoreError as error:
            work.error = work.error or error
        return False

    def _let_go(self, work: _Work) -> None:
        work.under_way -= 1
        if not work.under_way:
            self._cache.unpin(work.file)
            work.end(self._prefix)

    async def _bring_again(self, job: WarmJob, nursery: trio.Nursery, key: str) -> None:
        """Fetch the current version of an object that has changed since the listing."""
        try:
            info = await self._store.head(key)
        except NotFoundError:
            return  # the object was removed
        except StoreError as error:
            job.fail(key[len(self._prefix) :], error)
            return
        job.found([info], is_last=job.is_listed)
        await self._bring(job, nursery, info, is_again=True)


def _turn(settings: MountSettings) -> float:
    """Return where in a page or file this node begins (0 to 1), by host name and cache folder."""
    node = f"{socket.gethostname()}\0{settings.cache_dir}"
    digest = hashlib.blake2b(node.encode(errors="surrogateescape"), digest_size=4).digest()
    return int.from_bytes(digest, "big") / (1 << 32)


class _Work:
    """A file that a job fetches, part by part; `again` starts to fetch the object's new version."""

    def __init__(self, job: WarmJob, info: ObjectInfo, file: CacheFile) -> None:
        self.job = job
        self.info = info
        self.file = file
        self.again: Callable[[], None] | None = None
        self.under_way = 1
        self.arrived = 0
        self.error: StoreError | None = None

    @property
    def is_over(self) -> bool:
        """True if no more parts shall be fetched: after an error, or if the cache is full."""
        return self.error is not None or self.job.is_full

    def end(self, prefix: str) -> None:
        job, size = self.job, self.info.size
        if self.arrived == size:
            job.done_files += 1
        elif isinstance(self.error, NotFoundError | StaleVersionError) and self.again is not None:
            job.lost(size, self.arrived)
            self.again()
        elif self.error is not None:
            job.fail(self.info.key[len(prefix) :], self.error)
        elif job.is_full:
            job.leave_out(size - self.arrived)
