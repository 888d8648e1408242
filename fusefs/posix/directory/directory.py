"""The known part of one directory: segments (segment.py), in order and disjoint."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import trio

from fusefs.posix.directory.segment import Segment, is_stored
from fusefs.posix.nodes import names

if TYPE_CHECKING:
    from fusefs.posix.directory.walk import Walk


# Where the generations of each new one begin: no two directories ever have the same.
_GENERATIONS = count(0, 1 << 32)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Directory:
    """The segments of one directory, in order and disjoint.

    `generation` changes with everything that a stream might show differently. `most_s` is the
    metadata TTL of its pages. `changed` is when it changed last, as far as is known, and
    `doubted` when there was a sign of that, or a change of our own: what was requested before is
    not relied on (freshness.py). Times are seconds of the monotonic clock.
    """

    prefix: str
    most_s: float = math.inf
    changed: float = -math.inf
    doubted: float = -math.inf
    # Until when names of it have been relied on, as far as is known.
    relied_until: float = math.inf
    segments: list[Segment] = field(default_factory=list)
    # By the position where a page under way starts.
    loading: dict[str, trio.Event] = field(default_factory=dict)
    generation: int = field(default_factory=lambda: next(_GENERATIONS))
    # How many segments it ever got.
    additions: int = 0
    # The walk that filled it and goes on from here.
    walk: Walk | None = None

    def behind(self, position: str) -> Segment | None:
        """The segment that tells what comes next behind a position."""
        index = bisect_right(self.segments, position, key=lambda segment: segment.start) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if segment.stop is None or position < segment.stop else None

    def holding(self, name: str) -> Segment | None:
        """The segment that tells whether there is something under a name."""
        position = names.position(name)
        # A segment that starts exactly at the position does not hold it.
        index = bisect_left(self.segments, position, key=lambda segment: segment.start) - 1
        if index >= 0 and self.segments[index].holds(position):
            return self.segments[index]
        return None

    def doubt_carried(self, name: str) -> None:
        """Doubt a name in what a segment left over for the next one: that may be old."""
        position = names.position(name)
        for segment in self.segments:
            if segment.pending is None or segment.stop is None:
                continue
            if name <= segment.stop < position:
                segment.pending[name] = None

    def add(self, new: Segment) -> tuple[list[Segment], list[Segment]]:
        """Put a segment in; return those that it covers, and it with their parts outside it."""
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
        """True if every name of the directory is known and relied on."""
        at: str | None = ""
        for segment in self.segments:
            if at is None or segment.start > at or segment.doubtful:
                return False
            if min(segment.sure_until, segment.expires) <= now:
                return False
            at = segment.stop
        return at is None

    def has_other(self, name: str, now: float) -> bool:
        """True if the bucket has something beside one name, as far as is known and valid."""
        return any(
            other != name and is_stored(entry)
            for segment in self.segments
            if segment.expires > now and len(segment.entries) > (name in segment.entries)
            for other, entry in segment.entries.items()
        )
