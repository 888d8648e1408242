"""The known part of one directory: segments (segment.py), in order and disjoint."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import trio

from fusefs.posix.directory.freshness import QUIET_S
from fusefs.posix.directory.segment import Carried, Segment, is_stored
from fusefs.posix.nodes import names

if TYPE_CHECKING:
    from fusefs.posix.directory.walk import Walk


# Where the generations of each new one begin: no two directories ever have the same.
_GENERATIONS = count(0, 1 << 32)


# For how long what is out of date may be carried on: also with a TTL of 0 the pages of a stream
# follow each other.
CARRIED_S = 10.0


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

    def carried_to(self, position: str, now: float) -> Carried | None:
        """The remainder of the segment in front of a position; None if there is none of late."""
        for segment in self.segments:
            if segment.stop == position:
                is_of_late = now < max(segment.expires, segment.fetched + CARRIED_S)
                return segment.pending if is_of_late else None
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
        """Put a segment in; return those that went for it, and those that came.

        Of an older one that overlaps, the parts outside stay as segments of
        their own.
        """
        gone = [old for old in self.segments if old.overlaps(new)]
        if gone and (len(gone) > 1 or not gone[0].equals(new)):
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

    def note_change(self, now: float, *, is_ours: bool) -> bool:
        """Rely on no page that is here: the directory was changed, by this mount or another.

        Tells whether names may have been relied on until now.
        """
        if math.isinf(self.most_s):
            return False
        was_relied_on, self.relied_until = self.relied_until > now, now
        self.doubted = now
        self.changed = max(self.changed, now - QUIET_S if is_ours else now)
        for segment in self.segments:
            segment.belief = 0.0
            segment.sure_until = min(segment.sure_until, now)
        return was_relied_on

    def drop(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.generation += 1

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
