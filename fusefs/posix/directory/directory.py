"""The cached listing of one directory: segments (segment.py) without overlaps, in order."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import count

import trio

from fusefs.posix.directory.segment import Segment, is_stored
from fusefs.posix.directory.walk import Walk
from fusefs.posix.nodes import names

# The first generations of new directories, far apart: no two directories ever share one.
_GENERATIONS = count(0, 1 << 32)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Directory:
    """The cached listing of one directory: its segments, without overlaps and in order.

    `generation` grows with each change that a directory stream may show. `most_s` is the metadata
    TTL of the pages. `changed` is the time of the last known change. `doubted` is the time of this
    mount's last change, or of the last sign of another client's change: pages requested before that
    time are not relied on (freshness.py). Times are seconds of the monotonic clock.
    """

    prefix: str
    most_s: float = math.inf
    changed: float = -math.inf
    doubted: float = -math.inf
    # The latest time until which names of the directory are relied on.
    relied_until: float = math.inf
    segments: list[Segment] = field(default_factory=list)
    # The pages under way, by their start positions.
    loading: dict[str, trio.Event] = field(default_factory=dict)
    generation: int = field(default_factory=lambda: next(_GENERATIONS))
    # The number of segments that were ever added.
    additions: int = 0
    # The walk that filled the directory; the next read of the directory loads its next page.
    walk: Walk | None = None

    def behind(self, position: str) -> Segment | None:
        """The segment with the entries right behind a position; None if they are not cached."""
        index = bisect_right(self.segments, position, key=lambda segment: segment.start) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if segment.stop is None or position < segment.stop else None

    def holding(self, name: str) -> Segment | None:
        """The segment that tells whether a name exists; None if no segment covers the name."""
        position = names.position(name)
        # A segment that starts exactly at the position does not hold it.
        index = bisect_left(self.segments, position, key=lambda segment: segment.start) - 1
        return self.segments[index] if index >= 0 and self.segments[index].holds(position) else None

    def doubt_carried(self, name: str) -> None:
        """Set file `name` to None (it may exist) in the `pending` of segments that can carry it."""
        position = names.position(name)
        for segment in self.segments:
            if segment.pending is None or segment.stop is None:
                continue
            if name <= segment.stop < position:
                segment.pending[name] = None

    def add(self, new: Segment) -> tuple[list[Segment], list[Segment]]:
        """Add `new` in place of what it overlaps; return the removed and the added segments."""
        gone = [old for old in self.segments if old.overlaps(new)]
        shown = [(old.start, old.stop, old.entries) for old in gone]
        if gone and shown != [(new.start, new.stop, new.entries)]:
            self.generation += 1
        come = []
        for old in gone:
            self.segments.remove(old)
            if old.start < new.start:
                come.append(old.part(old.start, new.start))
            if new.stop is not None and (old.stop is None or new.stop < old.stop):
                come.append(old.part(new.stop, old.stop))
        come.append(new)
        for segment in come:
            insort(self.segments, segment)
        self.additions += 1
        return gone, come

    def is_complete(self, now: float) -> bool:
        """True if all names of the directory are known, and relied on at `now`."""
        at: str | None = ""
        for segment in self.segments:
            is_whole = at is not None and segment.start <= at and not segment.doubtful
            if not is_whole or segment.sure_until <= now:
                return False
            at = segment.stop
        return at is None

    def has_other(self, name: str, now: float) -> bool:
        """True if a valid segment has an entry, other than `name`, that the bucket has."""
        return any(
            other != name and is_stored(entry)
            for segment in self.segments
            if segment.expires > now and len(segment.entries) > (name in segment.entries)
            for other, entry in segment.entries.items()
        )
