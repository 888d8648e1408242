"""Fetches files into the cache ahead of their first read: `fusefs warm`, the daemon's side.

A *job* is a path of the mount: a file, or all below a directory. It is listed by flat
pages, a thousand keys each, however many directories they are in, and works on the
versions that listings name: no node is made for the kernel, and an open finds what was
fetched because it looks for the same version. What is in the cache is passed over, so a
job that is started again goes on where it was. On a writable mount, whose lookups need
each object's metadata, the job sends those HEADs as well.

All jobs share one bounded number of requests; downloads go after what programs wait for.
Small files are one download each; a large one is cut into parts, which are begun in order.

A job stops fetching when it could make room only by evicting what it has fetched itself,
or what was used since it began. It goes on counting, to report what does not fit.

Jobs under way are on record in the mount's state directory: the daemon that takes a mount
over goes on with them.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Fetcher, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.takeover import Handover, state_directory
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.nodes import names
from fusefs.settings.mount import MountSettings
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ListPage, ObjectInfo, Store

logger = logging.getLogger("fusefs.daemon.cache_warmer")

# Requests at a time, of all jobs; three quarters of the connections at most.
MOST_REQUESTS = 24
# Pages that are listed ahead: 20 MB.
PAGES_AHEAD = 50
# Listings at a time: they do not queue behind what programs wait for.
LISTINGS = 2
# Files passed over before other tasks have their turn.
TURN = 100
# Ended jobs that can still be described.
MOST_ENDED = 2000
# Files of a job that could not be read and are named.
MOST_NAMED = 10
# The speed is computed over this many seconds.
SPEED_OVER_S = 20


class WarmJob:
    """Everything at or below `path` of the mount, "" being its root.

    `since` is when it was started, in seconds since the epoch. Sizes are in
    bytes; `files` and `size` count what has been listed so far.
    """

    def __init__(self, path: str, since: float) -> None:
        self.path = path
        self.since = since
        self.scope = trio.CancelScope()
        self.is_listed = False
        self.has_ended = False
        self.is_full = False
        self.files = 0
        self.size = 0
        self.done_files = 0
        self.done = 0
        self.fetched = 0
        self.left_out_files = 0
        self.left_out = 0
        self.failed_files = 0
        self.failed: list[str] = []
        self.error: str | None = None
        # How much had been fetched at which time of the monotonic clock.
        self._samples = deque([(time.monotonic(), 0)], maxlen=SPEED_OVER_S)

    @property
    def is_ending(self) -> bool:
        return self.has_ended or self.scope.cancel_called

    def is_within(self, path: str) -> bool:
        return not path or self.path == path or self.path.startswith(path + "/")

    def found(self, infos: Sequence[ObjectInfo], *, is_last: bool) -> None:
        """Count the files of a page of the listing."""
        self.files += len(infos)
        self.size += sum(info.size for info in infos)
        self.is_listed = is_last

    def has(self, size: int) -> None:
        """Count a file that is in the cache already."""
        self.done_files += 1
        self.done += size

    def arrived(self, size: int, fetched: int) -> None:
        """Count bytes that are in the cache now, of which `fetched` were missing."""
        self.done += size
        self.fetched += fetched
        now = time.monotonic()
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self.fetched))

    def leave_out(self, size: int) -> None:
        """Count a file, or the rest of one, for which there is no room."""
        self.left_out_files += 1
        self.left_out += size

    def lost(self, size: int, arrived: int) -> None:
        """Take back a file that has changed since it was listed; some of it had `arrived`."""
        self.files -= 1
        self.size -= size
        self.done -= arrived

    def fail(self, path: str, error: StoreError) -> None:
        """Count a file that can't be read."""
        self.failed_files += 1
        if len(self.failed) < MOST_NAMED:
            self.failed.append(f"{path} ({error})")

    def end(self) -> None:
        self.has_ended = True

    def describe(self, limit: int) -> dict[str, Any]:
        """The job as JSON can hold it; `limit` is how many bytes the cache may hold."""
        return {
            "path": self.path,
            "state": self._state(),
            "is_listed": self.is_listed,
            "files": self.files,
            "bytes": self.size,
            "done_files": self.done_files,
            "done_bytes": self.done,
            "fetched_bytes": self.fetched,
            "left_out_files": self.left_out_files,
            "left_out_bytes": self.left_out,
            "limit_bytes": limit,
            "failed_files": self.failed_files,
            "failed": self.failed,
            "why": self.error,
            "eta_s": self._eta_s(),
        }

    def _state(self) -> str:
        if not self.has_ended:
            return "under way" if self.files or self.is_listed else "listing"
        return "cancelled" if self.scope.cancelled_caught else "ended"

    def _eta_s(self) -> float | None:
        """Seconds until the end at the recent speed; None if that is not known."""
        began, fetched = self._samples[0]
        passed_s = time.monotonic() - began
        if self.has_ended or not self.is_listed or self.fetched == fetched or passed_s <= 0:
            return None
        remaining = self.size - self.done - self.left_out
        return max(0, remaining) * passed_s / (self.fetched - fetched)


class CacheWarmer:
    """The jobs of one mount. Belongs to the event loop."""

    def __init__(
        self, store: Store, cache: FileCache, fetcher: Fetcher, settings: MountSettings
    ) -> None:
        self._store = store
        self._cache = cache
        self._fetcher = fetcher
        self._prefix = settings.source.prefix
        self._record = state_directory(settings) / "warming.json"
        self._recording = trio.Lock()
        self._jobs: dict[str, WarmJob] = {}
        self._nursery: trio.Nursery
        self._head_cache: HeadCache
        self._has_begun = trio.Event()
        connections = store.counters()["connections"]
        self._slots = trio.Semaphore(max(1, min(MOST_REQUESTS, connections * 3 // 4)))
        self._listing = trio.CapacityLimiter(LISTINGS)

    async def run(self, handover: Handover | None, head_cache: HeadCache) -> None:
        """Do the jobs until cancelled; after a takeover, those of the last daemon first."""
        self._head_cache = head_cache
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if handover is not None and not handover.is_fresh:
                for path, since in await trio.to_thread.run_sync(self._read):
                    self._begin(WarmJob(path, since))
            await self._write()
            self._has_begun.set()
            await trio.sleep_forever()

    async def start(self, path: str) -> WarmJob:
        """Start the job of a path ("" is the mount's root), or join it if it is under way.

        It is on record when this returns.
        """
        await self._has_begun.wait()
        job = self._jobs.get(path)
        if job is None or job.is_ending:
            job = WarmJob(path, time.time())
            self._begin(job)
        await self._write()
        return job

    def cancel(self, path: str) -> bool:
        """End the jobs at and below a path; what has been fetched stays."""
        jobs = [job for job in self._jobs.values() if not job.is_ending and job.is_within(path)]
        for job in jobs:
            job.scope.cancel()
        return bool(jobs)

    def describe(self) -> list[dict[str, Any]]:
        """The jobs as JSON can hold them, the latest last."""
        return [job.describe(self._cache.quota.limit) for job in self._jobs.values()]

    def _begin(self, job: WarmJob) -> None:
        self._jobs.pop(job.path, None)
        ended = [path for path, other in self._jobs.items() if other.has_ended]
        for path in ended[: -MOST_ENDED or None]:
            del self._jobs[path]
        self._jobs[job.path] = job
        self._nursery.start_soon(self._run, job)

    # The record

    def _read(self) -> list[tuple[str, float]]:
        try:
            return [
                (str(path), float(since)) for path, since in json.loads(self._record.read_text())
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            logger.warning("the jobs of the cache warmer can't be read: %s", error)
            return []

    async def _write(self) -> None:
        """Put the jobs that are under way on record."""

        def write(content: str) -> None:
            try:
                self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                unfinished = self._record.with_suffix(".new")
                unfinished.write_text(content)
                unfinished.replace(self._record)
            except OSError as error:
                logger.warning("the jobs of the cache warmer can't be put on record: %s", error)

        async with self._recording:
            jobs = [(job.path, job.since) for job in self._jobs.values() if not job.has_ended]
            await trio.to_thread.run_sync(write, json.dumps(jobs))

    # One job

    async def _run(self, job: WarmJob) -> None:
        logger.info("warming %r", job.path)
        with job.scope:
            send, receive = trio.open_memory_channel[list[ObjectInfo]](PAGES_AHEAD)
            async with trio.open_nursery() as nursery, receive:
                nursery.start_soon(self._list, job, send)
                async for page in receive:
                    for info in page:
                        await self._bring(job, nursery, info)
        job.end()
        logger.info("warmed %r: %s", job.path, job.describe(self._cache.quota.limit))
        await self._write()

    async def _list(self, job: WarmJob, send: trio.MemorySendChannel[list[ObjectInfo]]) -> None:
        """Send the job's files page by page."""
        key = self._prefix + job.path
        after = ""
        async with send:
            while not job.is_listed:
                try:
                    page = await self._page(key, key + "/" if job.path else key, after)
                except NotFoundError:
                    job.error = "there is no such file or directory in the bucket"
                    return
                except StoreError as error:
                    job.error = str(error)
                    return
                infos = [info for info in page.objects if self._is_shown(info.key)]
                job.found(infos, is_last=page.next_token is None)
                after = page.last
                await send.send(infos)

    async def _page(self, key: str, prefix: str, after: str) -> ListPage:
        """A page of what is below `prefix`, or of the file `key` if nothing is."""
        async with self._listing:
            page = await self._store.list_page(prefix, delimiter="", start_after=after)
            if page.objects or after or prefix == key:
                return page
            return ListPage([await self._store.head(key)], [], None, key)

    def _is_shown(self, key: str) -> bool:
        """Whether the mount shows a file for this key."""
        path = key[len(self._prefix) :].split("/")
        is_private = names.is_private(self._prefix, path[0])
        is_private = is_private or any(names.is_private("/", name) for name in path[1:])
        return not is_private and all(names.is_expressible(name) for name in path)

    async def _bring(
        self, job: WarmJob, nursery: trio.Nursery, info: ObjectInfo, *, is_again: bool = False
    ) -> None:
        """Begin the requests for one file, as slots get free."""
        if self._head_cache.lacks_version(info):
            await self._slots.acquire()
            nursery.start_soon(self._learn, info)
        known = self._cache.find(info.version)
        if not info.size or (known is not None and known.is_complete):
            self._cache.unpin(self._cache.pin(info.version))  # counts as a use
            job.has(info.size)
            if job.done_files % TURN == 0:
                await trio.lowlevel.checkpoint()
            return
        if job.is_full or info.size > self._cache.quota.limit:
            job.leave_out(info.size)
            return
        work = _Work(job, info, self._cache.pin(info.version))
        if not is_again:
            work.again = lambda: nursery.start_soon(self._bring_again, job, nursery, info.key)
        try:
            for start in range(0, info.size, PART):
                await self._slots.acquire()
                if work.is_over:
                    self._slots.release()
                    break
                work.under_way += 1
                stop = min(start + PART, info.size)
                nursery.start_soon(self._part, work, start, stop)
        finally:
            self._let_go(work)

    async def _learn(self, info: ObjectInfo) -> None:
        try:
            await self._head_cache.learn_version(info)
        finally:
            self._slots.release()

    async def _part(self, work: _Work, start: int, stop: int) -> None:
        job, file = work.job, work.file
        try:
            missing = await self._fetcher.fill(file, start, stop, job.since)
            work.arrived += stop - start
            job.arrived(stop - start, missing)
        except NotKeptError:
            if file.is_kept:
                job.is_full = True
            elif not file.is_ours:
                work.error = StaleVersionError("the cached copy was damaged, and was dropped")
            else:
                work.error = StoreError(self._cache.warning or "the cache does not take it")
        except StoreError as error:
            work.error = work.error or error
        finally:
            self._slots.release()
            self._let_go(work)

    def _let_go(self, work: _Work) -> None:
        work.under_way -= 1
        if not work.under_way:
            self._cache.unpin(work.file)
            work.end(self._prefix)

    async def _bring_again(self, job: WarmJob, nursery: trio.Nursery, key: str) -> None:
        """Bring the version that an object has by now."""
        try:
            info = await self._store.head(key)
        except NotFoundError:
            return  # it was removed
        except StoreError as error:
            job.fail(key[len(self._prefix) :], error)
            return
        job.found([info], is_last=job.is_listed)
        await self._bring(job, nursery, info, is_again=True)


class _Work:
    """One file of a job. `under_way` counts its parts that are, and the task that begins them.

    `again`, if not None, is called for an object that has changed since it was listed.
    """

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
        """Whether no further part is worth beginning."""
        return self.error is not None or self.job.is_full

    def end(self, prefix: str) -> None:
        """Count the file in its job."""
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
