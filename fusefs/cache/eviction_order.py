"""The order in which cached files are evicted.

Training reads a data set again and again. If the data set is larger than the cache, LRU evicts each
file just before its next use; it is better to keep any fixed part of it and let the rest pass
through. When a program moves to other files, the files that it has left must be evicted.

*Kept* files are ordered by last use. A file becomes kept if the cache has room for it when it is
closed; otherwise it is *passing*, and is evicted before all kept files. A kept file is *stale*, and
is evicted first, if it was unused for longer than files usually take to be used again. This time is
measured in bytes fetched and taken from the latest intervals between two uses of a file, including
evicted files, of which a bounded sample is remembered (Waldspurger et al., "Efficient MRC
construction with SHARDS", FAST 2015). In a loop, and with a new random order each epoch, nearly no
file gets stale. If no file is stale or passing, the file that became kept last is evicted, so that
a large file that passes through does not evict the files after it in a fixed order.

Files *ahead* were fetched before their first use. They get a small share of a full cache, evict
only stale kept files, and stay until as many bytes were fetched as the cache may hold.

For *planned* files a `Forecast` (planning/) knows the next use. A file that is fetched for a
planned use may evict files whose next use is later, and files unused since the first plan began.
A file that was in a plan and will not be used again is passing.

Only open or recent files are in memory; the evictor reads the oldest others from the catalog.
bench/README.md compares this order with published ones (`python -m bench.eviction`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain, count, islice
from typing import Protocol

from fusefs.cache.cached_file import CacheFile, Rank
from fusefs.cache.quota import Quota

# The share of the cache that is reserved for passing files.
PASSING_SHARE = 1 / 64
# The share of a full cache for files that were fetched ahead.
AHEAD_SHARE = 1 / 64
# Two uses of a file count as one if less than this share of the cache was fetched in between.
ONE_USE = 1 / 64

# At most this many intervals count, and only those that ended while the last RECENT
# of the cache's size was fetched; with fewer than FEWEST_INTERVALS no file is stale.
INTERVALS = 128
FEWEST_INTERVALS = 6
RECENT = 1 / 2
# The *long* interval is this quantile of the intervals. The longest one would be useless:
# one file that is used once in a while would keep all others from getting stale.
LONG = 0.98
# A kept file is stale after this many long intervals: in a random order some files
# have to wait longer than others.
STALE = 1.25
# If more than this share of the cache is unused for one long interval, the program reads
# other files now, and one interval makes a file stale. In epochs a twentieth is unused so long.
MOVED_SHARE = 1 / 2

# The most files for which the order in which they became kept is known.
MOST_LATEST = 16384
# The most points in time for which the number of bytes fetched until then is known.
MOST_TIMES = 4096
# The most evicted files whose last use is remembered, until REMEMBERED cache sizes were fetched.
MOST_REMEMBERED = 16384
REMEMBERED = 16


class Forecast(Protocol):
    """The known future uses of files. Times are comparable numbers in the forecast's own unit.

    `since` is the time (epoch seconds) at which the first plan began to be followed, or -inf.
    """

    since: float

    @property
    def frontier(self) -> float:
        """The time of the next planned use to prefetch for; files used later may be evicted."""

    def next_use(self, file: CacheFile) -> float | None:
        """The time of a file's next use; inf if it will not be used again, None if unknown."""

    def opening(self, file: CacheFile) -> bool:
        """Note that a program begins to open a file; return True if a plan expects this."""

    def used(self, file: CacheFile) -> None:
        """Note that a program has opened a file."""


class EvictionOrder:
    """The eviction order of one mount's files. Belongs to the event loop.

    A file has a place in the order while it is not pinned and has bytes. Except for
    `restore`, no call takes longer when there are more files.
    """

    def __init__(self, room: Quota, most_latest: int = MOST_LATEST) -> None:
        self._room = room
        # Not plain dicts, which get slow when their first entries are removed.
        self._ranks = {rank: OrderedDict[CacheFile, None]() for rank in Rank}
        self._kept, self._planned = self._ranks[Rank.KEPT], self._ranks[Rank.PLANNED]
        # A new forecast takes effect for a file with its next `insert`.
        self.forecast: Forecast | None = None
        # A heap of planned files, latest next use first; some are no longer planned.
        self._uses: list[tuple[float, int, CacheFile]] = []
        self._numbers = count()
        # Files in the order in which they became kept; some may be pinned or evicted by now.
        self._latest: deque[CacheFile] = deque(maxlen=most_latest)
        self._passing_bytes = 0
        # The sum of the sizes of files fetched ahead and not used yet, pinned or not.
        self._ahead_bytes = 0
        self.fetched = 0  # the number of bytes that were fetched and written to the cache's disk
        # For each reuse of a file: its time, and the interval since the last use, in bytes fetched.
        self._intervals: deque[tuple[int, int]] = deque(maxlen=INTERVALS)
        self._has_moved = False
        self._look_at = 0  # the time, in bytes fetched, to compute `_has_moved` again
        self._evicted = EvictedFiles()
        # Times in seconds since the epoch, and the number of bytes fetched until each.
        self._times: list[float] = []
        self._fetched_at: list[int] = []

    def note_time(self, now: float) -> None:
        """Note how many bytes were fetched until `now` (epoch seconds), for `keep` to look up."""
        if self._times and (self.fetched == self._fetched_at[-1] or now <= self._times[-1]):
            return
        self._times.append(now)
        self._fetched_at.append(self.fetched)
        if len(self._times) > MOST_TIMES:
            del self._times[::2], self._fetched_at[::2]

    def restore(self, files: Iterable[CacheFile]) -> None:
        """Give `files`, least recently used first, the rank `KEPT`, before all that have it."""
        for file in reversed(list(files)):
            self.keep(file, file.used_at)
            self._kept[file] = None
            self._kept.move_to_end(file, last=False)

    def keep(self, file: CacheFile, used_at: float) -> None:
        """Give a file the rank `KEPT`; `used_at` is its last use, in seconds since the epoch."""
        self._end_ahead(file)
        file.rank = Rank.KEPT
        if file.last_use is None and (at := bisect_right(self._times, used_at)):
            # For a use before this process began `last_use` stays None.
            file.last_use = self._fetched_at[at - 1]

    def least_recent(self, most: int) -> list[CacheFile]:
        """At most `most` files to unload, least recent first; none that became kept lately."""
        latest = set(self._latest)
        ranked = chain.from_iterable(self._ranks.values())
        return list(islice((file for file in ranked if file not in latest), most))

    def use(self, file: CacheFile) -> None:
        """Count a program's open of a pinned file as a use."""
        if self.forecast is not None:
            self.forecast.used(file)
        self._end_ahead(file)
        last_use = file.last_use
        if last_use is None:
            last_use = self._evicted.pop(file.name)
        if last_use is not None:
            interval = self.fetched - last_use
            if interval > ONE_USE * self._room.limit:
                self._intervals.append((self.fetched, interval))
        file.last_use = self.fetched

    def fetch_ahead(self, file: CacheFile) -> bool:
        """Mark a pinned file as fetched ahead of its use; False if the cache has no room for it."""
        if file.last_use is not None or file.rank is not None:
            return True
        room = self._room
        is_full = room.used + file.size > (1 - PASSING_SHARE) * room.limit
        if is_full and self._ahead_bytes + file.size > AHEAD_SHARE * room.limit:
            return False
        file.rank = Rank.AHEAD
        self._ahead_bytes += file.size
        return True

    def leave(self, file: CacheFile) -> None:
        """Remove a file from the order, because it gets pinned or is being evicted."""
        if file.rank is None or file not in self._ranks[file.rank]:
            return
        del self._ranks[file.rank][file]
        if file.rank is Rank.PASSING:
            self._passing_bytes -= file.present.total

    def insert(self, file: CacheFile) -> None:
        """Put a file into the order; it must be unpinned and have bytes."""
        self.leave(file)
        next_use = self.forecast.next_use(file) if self.forecast is not None else None
        if next_use is not None:
            self._end_ahead(file)
            file.rank = Rank.PASSING if next_use == math.inf else Rank.PLANNED
        elif file.rank in (None, Rank.PASSING, Rank.PLANNED):
            stays = self._room.used - self._passing_bytes
            is_kept = stays <= (1 - PASSING_SHARE) * self._room.limit
            file.rank = Rank.KEPT if is_kept else Rank.PASSING
            if is_kept:
                self._latest.append(file)
        if file.rank is Rank.AHEAD:
            file.ahead_since = file.ahead_since or self.fetched
        elif file.last_use is None and next_use is None:
            file.last_use = self.fetched  # no program opened it: it was written, or warmed
        self._ranks[file.rank][file] = None
        if file.rank is Rank.PASSING:
            self._passing_bytes += file.present.total
        elif next_use is not None:
            if len(self._uses) > 2 * len(self._planned) + 1024:
                self._uses = [use for use in self._uses if use[2] in self._planned]
                heapq.heapify(self._uses)
            heapq.heappush(self._uses, (-next_use, next(self._numbers), file))

    def is_planned(self, file: CacheFile) -> bool:
        """Note that a program begins to open a file; return True if a plan expects this open."""
        return self.forecast is not None and self.forecast.opening(file)

    def _farthest(self) -> tuple[float, CacheFile | None]:
        """Find the planned file with the latest next use; return (time, file) or (-inf, None)."""
        assert self.forecast is not None
        while self._uses:
            use, number, file = self._uses[0]
            if file not in self._planned:
                heapq.heappop(self._uses)
                continue
            next_use = self.forecast.next_use(file)
            if next_use is None or next_use in (-use, math.inf):
                return math.inf if next_use is None else next_use, file
            heapq.heapreplace(self._uses, (-next_use, number, file))
        return -math.inf, None

    def unload(self, file: CacheFile) -> None:
        """Remove from the order a file that stays in the cache but leaves memory."""
        self.leave(file)
        self._end_ahead(file)

    def forget(self, file: CacheFile) -> None:
        """Remove from the order a file that has left the cache, and remember its last use."""
        self.unload(file)
        if file.last_use is not None:
            oldest = self.fetched - REMEMBERED * self._room.limit
            self._evicted.add(file.name, file.last_use, oldest)
        file.rank = file.last_use = None

    def next(self, *, is_ahead: bool = False, used_before: float = math.inf) -> CacheFile | None:
        """The file to evict next, or None.

        With `is_ahead` the room is for a file that is fetched ahead: only files of less value are
        returned. Files used at or after `used_before` (epoch seconds) are never returned.
        """
        kept, passing, ahead = map(self.first, (Rank.KEPT, Rank.PASSING, Rank.AHEAD))
        if used_before < math.inf:
            files = (file for file in (passing, kept, ahead) if file is not None)
            return next((file for file in files if file.used_at < used_before), None)
        if kept is not None and self._is_stale(kept):
            return kept
        if passing is not None:
            return passing
        last_use, planned = -math.inf, None
        if self.forecast is not None:
            if kept is not None and kept.used_at < self.forecast.since:
                return kept
            last_use, planned = self._farthest()
            if last_use >= self.forecast.frontier:
                return planned
        limit = self._room.limit
        if ahead is not None and self.fetched - ahead.ahead_since > limit:
            return ahead
        if is_ahead:
            return None
        if ahead is not None and (not self._kept or self._ahead_bytes > AHEAD_SHARE * limit):
            return ahead
        return self._kept_last() or kept or planned

    def _kept_last(self) -> CacheFile | None:
        """The file that got the rank `KEPT` last and still has it, or None if unknown."""
        in_use = []
        while self._latest and self._latest[-1] not in self._kept:
            file = self._latest.pop()
            if file.pins:
                in_use.append(file)
        found = self._latest[-1] if self._latest else None
        self._latest.extend(reversed(in_use))
        return found

    def first(self, rank: Rank) -> CacheFile | None:
        """The file of a rank that was put into the order first, or None."""
        return next(iter(self._ranks[rank]), None)

    def _end_ahead(self, file: CacheFile) -> None:
        if file.rank is Rank.AHEAD:
            self.leave(file)
            self._ahead_bytes -= file.size
            file.rank = None

    def _age(self, file: CacheFile) -> int:
        """The number of bytes that were fetched since a file's last use."""
        return self.fetched - (file.last_use or 0)

    def _is_stale(self, oldest: CacheFile) -> bool:
        """True if `oldest`, the least recently used file of rank `KEPT`, is stale."""
        since = self.fetched - RECENT * self._room.limit
        while self._intervals and self._intervals[0][0] < since:
            self._intervals.popleft()
        if len(self._intervals) < FEWEST_INTERVALS:
            return False
        intervals = sorted(interval for _, interval in self._intervals)
        long = intervals[int(LONG * len(intervals))]
        if self._age(oldest) <= long:
            self._has_moved = False
        elif not self._has_moved and self.fetched >= self._look_at:
            # Computed rarely, as the time it takes may grow with the number of files.
            self._look_at = self.fetched + int(ONE_USE * self._room.limit)
            self._has_moved = self._is_mostly_older(long)
        return self._age(oldest) > (long if self._has_moved else STALE * long)

    def _is_mostly_older(self, interval: int) -> bool:
        """True if files unused for `interval` fetched bytes fill `MOVED_SHARE` of the cache."""
        size = 0
        for file in self._kept:
            size += file.present.total
            if self._age(file) <= interval:
                return False
            if size > MOVED_SHARE * self._room.limit:
                return True
        return False


class EvictedFiles:
    """The last uses of evicted files: of all files, or of a random sample if there are many."""

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._mask = 0

    def add(self, name: str, last_use: int, oldest: int) -> None:
        """Remember a file's last use, in bytes fetched; uses before `oldest` may be forgotten."""
        key = hash(name)
        if key & self._mask:
            return
        self._last_use[key] = last_use
        if len(self._last_use) > MOST_REMEMBERED:
            recent = {key: at for key, at in self._last_use.items() if at >= oldest}
            if len(recent) > MOST_REMEMBERED // 2:
                self._mask = 2 * self._mask + 1
            elif len(recent) < MOST_REMEMBERED // 8:
                self._mask //= 2
            self._last_use = {key: at for key, at in recent.items() if not key & self._mask}

    def pop(self, name: str) -> int | None:
        return self._last_use.pop(hash(name), None)
