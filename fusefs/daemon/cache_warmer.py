"""Files fetched into the cache before anybody reads them: `fusefs warm`, the daemon's side.

A *job* is a path of the mount: a file, or all below a directory. It is listed by flat
pages, a thousand keys each, however many directories they are in, and works on the
versions that listings tell: no node is made for the kernel, and an open finds what was
fetched because it asks for the same version. What is in the cache is passed over, so a job
that is asked for again goes on where it was. On a writable mount, whose lookups want each
object's metadata, that is asked for as well.

All jobs share one bounded number of requests; downloads go after what programs wait for.
Small files are one download each; a large one is cut into parts, which are begun in order.

A job stops fetching when there is no room left but by evicting what it has fetched itself,
or what was used since it began. It goes on counting, to tell what does not fit.

Jobs under way are on record in the mount's state directory: the daemon that takes a mount
over goes on with them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.downloader import PART, Fetcher, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.daemon.takeover import Handover, state_directory
from fusefs.daemon.warming_job import Job
from fusefs.posix.metadata.head_cache import Learner
from fusefs.posix.nodes import names
from fusefs.settings.mount import MountSettings
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ListPage, ObjectInfo, Store

logger = logging.getLogger("fusefs.daemon.cache_warmer")

# Requests at a time, of all jobs; three quarters of the connections at most.
MOST_REQUESTS = 24
# Pages that were listed and not looked at: 20 MB.
PAGES_AHEAD = 50
# Listings at a time: they do not queue behind what programs wait for.
LISTINGS = 2
# Files passed over before others have their turn.
TURN = 100
# Jobs that have ended and are still told of.
MOST_ENDED = 2000


class Warming:
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
        self._jobs: dict[str, Job] = {}
        self._nursery: trio.Nursery
        self._learner: Learner
        self._has_begun = trio.Event()
        connections = store.counters()["connections"]
        self._slots = trio.Semaphore(max(1, min(MOST_REQUESTS, connections * 3 // 4)))
        self._listing = trio.CapacityLimiter(LISTINGS)

    async def run(self, handover: Handover | None, learner: Learner) -> None:
        """Do the jobs until cancelled; where a mount was taken over, its jobs first."""
        self._learner = learner
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if handover is not None and not handover.is_fresh:
                for path, since in await trio.to_thread.run_sync(self._read):
                    self._begin(Job(path, since))
            await self._write()
            self._has_begun.set()
            await trio.sleep_forever()

    async def start(self, path: str) -> Job:
        """The job of a path ("" is the mount's root), on record when this returns.

        One that is under way is joined.
        """
        await self._has_begun.wait()
        job = self._jobs.get(path)
        if job is None or job.is_ending:
            job = Job(path, time.time())
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
        """What is to be told of the jobs, the latest last."""
        return [job.describe(self._cache.quota.limit) for job in self._jobs.values()]

    def _begin(self, job: Job) -> None:
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
            logger.warning("what was being warmed can't be read: %s", error)
            return []

    async def _write(self) -> None:
        """Put the jobs that are under way on record."""

        def write(told: str) -> None:
            try:
                self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                unfinished = self._record.with_suffix(".new")
                unfinished.write_text(told)
                unfinished.replace(self._record)
            except OSError as error:
                logger.warning("what is being warmed can't be put on record: %s", error)

        async with self._recording:
            jobs = [(job.path, job.since) for job in self._jobs.values() if not job.has_ended]
            await trio.to_thread.run_sync(write, json.dumps(jobs))

    # One job

    async def _run(self, job: Job) -> None:
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

    async def _list(self, job: Job, send: trio.MemorySendChannel[list[ObjectInfo]]) -> None:
        """Tell the job's files page by page."""
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
        """A page of what is below `prefix`; of the file `key`, if there is nothing."""
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
        self, job: Job, nursery: trio.Nursery, info: ObjectInfo, *, is_again: bool = False
    ) -> None:
        """Begin the requests for one file, as slots get free."""
        if self._learner.lacks_version(info):
            await self._slots.acquire()
            nursery.start_soon(self._learn, info)
        known = self._cache.find(info.version)
        if not info.size or (known is not None and known.is_complete):
            self._cache.unpin(self._cache.pin(info.version))  # used, and so not evicted soon
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
            await self._learner.learn_version(info)
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

    async def _bring_again(self, job: Job, nursery: trio.Nursery, key: str) -> None:
        """Bring the version that an object has by now."""
        try:
            info = await self._store.head(key)
        except NotFoundError:
            return  # nothing to be missed
        except StoreError as error:
            job.fail(key[len(self._prefix) :], error)
            return
        job.found([info], is_last=job.is_listed)
        await self._bring(job, nursery, info, is_again=True)


class _Work:
    """One file of a job while parts of it are `under_way`, whose beginner counts as one.

    `again`, if there is one, is called for an object that has changed since it was listed.
    """

    def __init__(self, job: Job, info: ObjectInfo, file: CacheFile) -> None:
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
        """Tell the job how it went."""
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
