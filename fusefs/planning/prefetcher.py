"""Fetches the files that plans expect to be read next.

A task for each plan walks along its entries from the reader's position and starts the downloads of
each file's parts, in the order of need. As many downloads run in parallel as the path to S3 allows
besides the downloads that programs wait for, which go first (cache/readahead/). When an entry's
turn comes, its path is looked up in the listings of the mount, as the program will do. Ranges are
also fetched while the reader has the file open, or has opened no later file.

The walk goes on until the cache has no room. For a planned file the cache may evict files of no
further use and files not used since the first plan began; also files that are used later, as long
as the files fetched ahead are a small share of the cache. The longer before its use a file is
fetched, the fewer files are known to be useless, so going farther would fetch more in all (Cao et
al., "A study of integrated prefetching and caching strategies", SIGMETRICS 1995).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio

from fusefs.cache.cached_file import BLOCK, CacheFile
from fusefs.cache.downloader import PART, Downloader, NotKeptError
from fusefs.cache.file_cache import FileCache
from fusefs.cache.ranges import RangeMap
from fusefs.cache.readahead.siblings import FILES_PER_SECOND, LEAST_WIDTH, SMALL
from fusefs.planning.table import Plan, Ranges, Visit
from fusefs.posix.directory.listings import Directories
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.nodes import names
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import ObjectInfo

logger = logging.getLogger("fusefs.planning")

# Share of the cache for files ahead of a reader if they evict files used later, and for all files
# fetched for a plan that no open has confirmed.
AHEAD_SHARE = 1 / 8
# The most bytes being fetched for a plan: twice what the path to S3 can carry, but at most this
# share of the cache.
MOST_UNDER_WAY_SHARE = 1 / 4
# Most files ahead of a reader that are cached or being fetched.
MOST_AHEAD = 8192
# Files of a plan that are fetched at a time.
MOST_AT_ONCE = 256
# Seconds after which a walk that waits for a change looks again.
LOOK_AGAIN_S = 1.0
# Number of last opens over which a reader's pace is measured.
PACE_OPENS = 256
# Reasons why a planned file is late: the rate of S3, no room, or an unknown position.
LATE_FOR = ("rate", "room", "position")


@dataclass(slots=True, eq=False)
class Walk:
    """The prefetch of one plan. `at`: the next entry; `ahead`: sizes of begun files by position."""

    plan: Plan
    scope: trio.CancelScope
    at: int = 0
    jumps: int = 0
    ahead: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)  # files that are cached
    ahead_bytes: int = 0
    under_way: int = 0  # bytes of the files that are being fetched
    # The next entries: position, path and ranges, and the object found or None.
    next: deque[tuple[int, Visit, ObjectInfo | None]] = field(default_factory=deque)
    lacks_room: bool = False
    in_time: int = 0
    late: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LATE_FOR, 0))
    missing: int = 0
    first_missing: str = ""
    looked_up: int = 0
    fetched_bytes: int = 0
    turns: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(MOST_AT_ONCE))
    room: trio.Lock = field(default_factory=trio.Lock)  # held by the part that waits for room
    times: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_OPENS))

    def pass_by(self) -> None:
        """Drop entries that the reader passed (after a jump: all) from `ahead` and `ready`."""
        plan = self.plan
        if plan.jumps != self.jumps:
            self.jumps, self.at = plan.jumps, plan.low
            self.ahead, self.ready, self.ahead_bytes = {}, {}, 0
        self.at = max(self.at, plan.low - (plan.window if plan.has_ranges else 0))
        for position in plan.passed:
            self.ahead_bytes -= self.ahead.pop(position, 0)
            self.ready.pop(position, None)
        plan.passed.clear()

    def pace(self) -> float:
        """Return the recent opens per second; 0 if unknown."""
        if len(self.times) < 2:
            return 0.0
        return (len(self.times) - 1) / max(1e-6, time.monotonic() - self.times[0])


class Prefetcher:
    """Prefetches for all plans of one mount. Belongs to the event loop."""

    def __init__(
        self,
        prefix: str,
        directories: Directories,
        head_cache: HeadCache,
        cache: FileCache,
        downloader: Downloader,
    ) -> None:
        self._prefix = prefix
        self._directories = directories
        self._head_cache = head_cache
        self._cache = cache
        self._downloader = downloader
        self._walks: dict[Plan, Walk] = {}
        self._small = trio.CapacityLimiter(LEAST_WIDTH)
        self._parts = trio.CapacityLimiter(LEAST_WIDTH)
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Prefetch until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for walk in self._walks.values():
                nursery.start_soon(self._walk, walk)
            await trio.sleep_forever()

    def begin(self, plan: Plan) -> None:
        walk = self._walks[plan] = Walk(plan, trio.CancelScope())
        if self._nursery is not None:
            self._nursery.start_soon(self._walk, walk)

    def end(self, plan: Plan) -> None:
        """Stop prefetching for a plan."""
        self._walks.pop(plan).scope.cancel()

    def moved(self) -> None:
        """Wake the plans' tasks: a reader has moved on, a plan has changed, or there is room."""
        self._changed.set()
        self._changed = trio.Event()

    def opened(self, plan: Plan, *, is_late: bool) -> str:
        """Note the open of a planned file; return "in_time" or the reason why it `is_late`."""
        walk = self._walks[plan]
        walk.times.append(time.monotonic())
        outcome = "in_time"
        if is_late:
            outcome = "position" if plan.is_ignored else "room" if walk.lacks_room else "rate"
            walk.late[outcome] += 1
        else:
            walk.in_time += 1
            plan.late_since = None
        self.moved()
        return outcome

    def is_there(self, plan: Plan, mark: int, file: CacheFile) -> bool:
        """True if the file with the checksum `mark` has what its next or current visit needs."""
        needed = self._walks[plan].ready.get(plan.find(mark, plan.low), math.inf)
        return needed <= file.present.total or (plan.has_ranges and mark in plan.latest)

    def frontier(self, plan: Plan) -> float:
        """Return the number of entries from the reader to the next fetch; inf if none is due."""
        walk = self._walks[plan]
        most = max(self._most_under_way(), AHEAD_SHARE * self._downloader.room)
        return walk.at - plan.low if walk.ahead_bytes <= most else math.inf

    def _most_under_way(self) -> float:
        """Return the most bytes of a plan's files that may be downloading at a time."""
        wanted = 2 * self._downloader.path.width * PART
        return min(wanted, MOST_UNDER_WAY_SHARE * self._downloader.room)

    # One plan

    async def _walk(self, walk: Walk) -> None:
        with walk.scope:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        size = await self._due(walk)
                    except OSError as error:  # caught here: a nursery would raise it in a group
                        logger.warning("the plan of %r can't be read: %s", walk.plan.reader, error)
                        walk.plan.is_ignored = True
                        return
                    if size is not None:
                        await walk.turns.acquire()
                        nursery.start_soon(self._bring, walk, *walk.next.popleft(), size)
                        walk.at += 1

    async def _due(self, walk: Walk) -> int | None:
        """Return the size of the first of `walk.next` to fetch it now; on None, call again."""
        plan = walk.plan
        walk.pass_by()
        known = plan.size - (plan.has_ranges and not plan.has_all)  # more ranges may come
        is_far = len(walk.ahead) >= MOST_AHEAD or walk.under_way >= self._most_under_way()
        if not plan.is_confirmed:
            is_far |= walk.ahead_bytes >= AHEAD_SHARE * self._downloader.room
        if plan.is_ignored or walk.at >= known or is_far or walk.lacks_room:
            await self._change()
            return None
        while walk.next and walk.next[0][0] < walk.at:
            walk.next.popleft()
        if not walk.next or walk.next[0][0] != walk.at:
            await self._look_ahead(walk, known)
            return None
        position, (_, ranges), info = walk.next[0]
        is_new, was_opened = position not in walk.ahead, plan.was_opened(position)
        size = info.size if info else 0
        if ranges:
            size = sum(stop - start for start, stop in _pieces(ranges, size))
        if is_new and not was_opened:
            walk.ahead[position] = size
            walk.ahead_bytes += size
        if is_new and info is not None and (ranges or not was_opened):
            walk.under_way += size
            return size
        walk.at += 1
        return None

    async def _look_ahead(self, walk: Walk, known: int) -> None:
        """Fill `walk.next` with the next entries; their paths are looked up concurrently."""
        start, plan = walk.at, walk.plan
        visits = await trio.to_thread.run_sync(plan.visits, start, known)
        found: dict[int, ObjectInfo | None] = {}

        async def look_up(position: int, path: str) -> None:
            try:
                found[position] = await self._info(path)
            except StoreError as error:
                logger.debug("%s is not fetched ahead: %s", path, error)
                return
            walk.looked_up += 1
            if found[position] is None:
                walk.missing += 1
                walk.first_missing = walk.first_missing or path

        async with trio.open_nursery() as nursery:
            for position, (path, ranges) in enumerate(visits, start):
                if ranges or not plan.was_opened(position):
                    nursery.start_soon(look_up, position, path)
        await self._cache.look_up(info.version for info in found.values() if info is not None)
        walk.next = deque((at, visit, found.get(at)) for at, visit in enumerate(visits, start))

    async def _change(self) -> None:
        with trio.move_on_after(LOOK_AGAIN_S):
            await self._changed.wait()

    async def _bring(
        self, walk: Walk, at: int, visit: Visit, info: ObjectInfo | None, size: int
    ) -> None:
        """Fetch an entry's file, unless the reader opens the file first; release a turn."""
        path, ranges = visit
        try:
            for _ in range(2):
                if info is None or (walk.plan.was_opened(at) and not ranges):
                    return
                if self._head_cache.lacks_version(info):
                    await self._head_cache.learn_version(info)
                try:
                    await self._fetch(walk, at, ranges, info)
                    return
                except (NotFoundError, StaleVersionError):
                    info = await self._info(path, is_again=True)
        except StoreError as error:
            logger.debug("%s is not fetched ahead: %s", path, error)
        finally:
            walk.turns.release()
            walk.under_way -= size
            if walk.ahead.get(at, 0) and at not in walk.ready:
                walk.ahead_bytes -= walk.ahead[at]
                walk.ahead[at] = 0  # not fetched: the reader will do so
            self.moved()

    async def _info(self, path: str, *, is_again: bool = False) -> ObjectInfo | None:
        """Look up a path; None if it is no file. `is_again`: rely on no page that is only shown."""
        prefix, name = names.split_key(self._prefix + path)
        if not all(map(names.is_expressible, path.split("/"))) or names.is_private(prefix, name):
            return None
        directory = self._directories.get(prefix)
        entry, _ = await self._directories.lookup(directory, name, is_opened=is_again)
        return entry if isinstance(entry, ObjectInfo) else None

    async def _fetch(self, walk: Walk, position: int, ranges: Ranges, info: ObjectInfo) -> None:
        """Fetch the missing parts of a version; wait while there is no room."""
        await self._cache.look_up([info.version])
        file = self._cache.pin(info.version)
        try:
            job, pieces = _File(walk, position, file, bool(ranges)), _pieces(ranges, info.size)
            missing = [piece for piece in pieces if not file.present.covers(*piece)]
            following = iter(missing)
            if len(missing) == 1:
                await self._bring_parts(job, following)
            elif missing:
                async with trio.open_nursery() as nursery:
                    for _ in missing[:MOST_AT_ONCE]:
                        nursery.start_soon(self._bring_parts, job, following)
            if job.error is not None:
                raise job.error
            if position in walk.ahead and all(file.present.covers(*piece) for piece in pieces):
                walk.ready[position] = walk.ahead[position]
        finally:
            self._cache.unpin(file, was_used=False)

    async def _bring_parts(self, job: _File, parts: Iterator[tuple[int, int]]) -> None:
        walk, plan, at = job.walk, job.walk.plan, job.position
        for start, stop in parts:
            if job.is_over:
                return
            if not walk.lacks_room and await self._fill(job, start, stop):
                continue
            async with walk.room:  # only one waiting part tries at a time
                while not job.is_over and not await self._fill(job, start, stop):
                    # A file that stays open holds up no later one.
                    is_left = plan.was_opened(at) and at < plan.high
                    walk.lacks_room = job.file.is_kept and not is_left
                    if not walk.lacks_room:
                        return
                    await self._change()
                if walk.lacks_room:
                    walk.lacks_room = False
                    self.moved()

    async def _fill(self, job: _File, start: int, stop: int) -> bool:
        """Fetch a part into the cache; return False if there is no room for it."""
        path, demand = self._downloader.path, self._downloader.demand.count
        # Each limiter admits what the path to S3 allows now.
        if (stop - start if job.has_ranges else job.file.size) > SMALL:
            limiter, width = self._parts, path.width
        else:
            limiter = self._small
            width = min(self._downloader.most_small, round(FILES_PER_SECOND * path.latency_s))
        limiter.total_tokens = max(LEAST_WIDTH, width - demand)
        turn = object()
        await limiter.acquire_on_behalf_of(turn)
        try:
            if not job.is_over:
                fetched = await self._downloader.fill(job.file, start, stop, -math.inf)
                job.walk.fetched_bytes += fetched
        except NotKeptError:
            return False
        except StoreError as error:
            job.error = error
        finally:
            limiter.release_on_behalf_of(turn)
        return True

    # What is shown

    def state(self, plan: Plan) -> str:
        """Return the state of a plan in a few words."""
        walk = self._walks[plan]
        if plan.is_ignored:
            return "ignored: files are opened in another order, or by nobody"
        if plan.is_done:
            return "read to its end"
        if walk.looked_up and walk.missing == walk.looked_up:
            return "waiting: no path was found in the bucket"
        if not plan.is_confirmed:
            return "not confirmed: few of its files were opened"
        return "followed, as far as the cache has room" if walk.lacks_room else "followed"

    def describe(self, plan: Plan) -> dict[str, Any]:
        """Return a plan's progress as plain JSON data: entries, bytes and seconds."""
        walk = self._walks[plan]
        walk.pass_by()
        sizes, at = [], plan.low
        while at in walk.ready or (at < walk.at and plan.was_opened(at)):
            sizes += [walk.ready[at]] if at in walk.ready else []
            at += 1
        pace = walk.pace()
        return {
            "reader": plan.reader,
            "state": self.state(plan),
            "is_ignored": plan.is_ignored,
            "entries": plan.size,
            "has_all": plan.has_all,
            "position": plan.low,
            "left_out": plan.skipped,
            "ahead_files": len(sizes),
            "ahead_bytes": sum(sizes),
            "ahead_s": len(sizes) / pace if pace else None,
            "opens": walk.in_time + sum(walk.late.values()),
            "in_time": walk.in_time,
            "late": dict(walk.late),
            "late_since": None if sizes or plan.is_done or plan.is_ignored else plan.late_since,
            "looked_up": walk.looked_up,
            "missing": walk.missing,
            "first_missing": walk.first_missing,
            "fetched_bytes": walk.fetched_bytes,
        }


@dataclass(slots=True, eq=False)
class _File:
    """The file of an entry that is being fetched, and its error if fetching failed."""

    walk: Walk
    position: int
    file: CacheFile
    has_ranges: bool
    error: StoreError | None = None

    @property
    def is_over(self) -> bool:
        """True if no further part needs to be fetched."""
        plan, at = self.walk.plan, self.position
        is_read = self.has_ranges and (self.file.handles or at >= plan.high)
        return self.error is not None or plan.is_ignored or (plan.was_opened(at) and not is_read)


def _pieces(ranges: Ranges, size: int) -> Ranges:
    """Return the disjoint parts of a file to be fetched for `ranges` (none: for the whole file)."""
    parts, seen = list[tuple[int, int]](), RangeMap()
    # An open reads the first bytes, of a small file all bytes.
    for start, stop in [(0, 1), *ranges] if ranges and size > SMALL else [(0, size)]:
        start, stop = start // BLOCK * BLOCK, min(size, -(-stop // BLOCK) * BLOCK)
        while (gap := seen.first_missing(start, stop)) is not None:
            part = gap[0], min(gap[1], gap[0] - gap[0] % PART + PART)
            seen.add(*part)
            if parts and parts[-1][1] == part[0] and part[0] % PART:
                part = parts.pop()[0], part[1]
            parts.append(part)
    return parts
