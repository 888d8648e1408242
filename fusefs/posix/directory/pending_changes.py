"""This mount's own changes of names, which are merged into listings.

A file that is being written is in no listing until it is uploaded: its change
*lasts* until the upload has landed. A LIST that was under way during a change may lack
the change, so every change is kept by its name as long as such a LIST is under way.
The latest older changes are kept by name as well. For forgotten
changes only the directory and the time are kept: a listing from before that time is not
used, nor is a listing that was under way while the directory was renamed.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TypeVar

from fusefs.posix.directory.segment import ABSENT, UNCOVERED, Absent, Entry, Segment, is_stored
from fusefs.posix.nodes import names
from fusefs.store.interface import ObjectInfo

Kept = TypeVar("Kept")

# Older changes are forgotten even while a listing is under way.
KEPT_S = 300.0
# The most changes kept by name that no listing under way needs: 6 MB.
MOST_KEPT = 20_000
# The most prefixes for which the time of the last forgotten change is kept.
MOST_FORMER = 4096


class PendingChanges:
    """This mount's changes of names in all directories. Times are monotonic seconds."""

    def __init__(self) -> None:
        # By prefix and name: the changes that last, and the recent ones with their times.
        self._lasting: dict[str, dict[str, Entry | Absent]] = {}
        # The sorted positions of the lasting changes, by prefix.
        self._positions: dict[str, list[str]] = {}
        self._recent: dict[str, dict[str, tuple[Entry | Absent, float]]] = {}
        # Time, prefix, name, and whether the bucket has the change; the oldest first.
        self._order: deque[tuple[float, str, str, bool]] = deque()
        # The begin of each listing under way.
        self._listings: dict[int, float] = {}
        self._numbers = count()
        # The time of the last forgotten change by prefix, the latest at the end, and the time
        # of the last one in any prefix that is not in the table.
        self._former: OrderedDict[str, float] = OrderedDict()
        self._former_others = -math.inf
        # Old and new prefixes of renames, with their times.
        self._moves: deque[tuple[float, str]] = deque()
        # Keys of removed objects that the bucket still has (write/removals.py).
        self.leaving: set[str] = set()

    @contextmanager
    def listing(self) -> Iterator[float]:
        """Keep changes by name during the block, which requests a LIST; yield the start time."""
        number = next(self._numbers)
        self._listings[number] = time.monotonic()
        try:
            yield self._listings[number]
        finally:
            del self._listings[number]

    def set(self, prefix: str, name: str, entry: Entry | Absent, *, lasting: bool) -> None:
        """Keep a name's change: until `landed` if the bucket lacks it (`lasting`), else KEPT_S."""
        now = time.monotonic()
        self._forget_before(now - KEPT_S)
        if isinstance(entry, Absent) and prefix + name in self.leaving:
            lasting, entry = True, ABSENT
        self.landed(prefix, name)
        if lasting:
            self._lasting.setdefault(prefix, {})[name] = entry
            insort(self._positions.setdefault(prefix, []), names.position(name))
        self._recent.setdefault(prefix, {})[name] = entry, now
        is_only_begun = lasting and isinstance(entry, ObjectInfo) and not entry.etag
        self._order.append((now, prefix, name, not is_only_begun))
        if len(self._order) > MOST_KEPT:
            self._forget_before(min(self._listings.values(), default=now), MOST_KEPT)

    def landed(self, prefix: str, name: str) -> None:
        """Note that the bucket has a name's last change, which is no longer `lasting`."""
        if name in self._lasting.get(prefix, {}):
            _drop(self._lasting, prefix, name)
            positions = self._positions[prefix]
            del positions[bisect_left(positions, names.position(name))]
            if not positions:
                del self._positions[prefix]

    def _forget_before(self, oldest: float, most: int = 0) -> None:
        """Forget the changes before a time, except the latest `most` changes."""
        while len(self._order) > most and self._order[0][0] < oldest:
            at, prefix, name, is_in_bucket = self._order.popleft()
            if is_in_bucket:
                self._former.pop(prefix, None)
                self._former[prefix] = at
            found = self._recent.get(prefix, {}).get(name)
            if found is not None and found[1] == at:
                _drop(self._recent, prefix, name)
        while len(self._former) > MOST_FORMER:
            _, self._former_others = self._former.popitem(last=False)
        while not most and self._moves and self._moves[0][0] < oldest:
            self._moves.popleft()

    def has_forgotten(self, prefix: str, since: float) -> bool:
        """True if a change in a directory since this time may have been forgotten."""
        return self._former.get(prefix, self._former_others) >= since

    def get(self, prefix: str, name: str) -> Entry | Absent | None:
        """The change of a name that the bucket lacks: an entry, ABSENT if removed, None if none."""
        return self._lasting.get(prefix, {}).get(name)

    def changed_since(
        self, prefix: str, name: str, since: float
    ) -> tuple[Entry | Absent, float] | None:
        """The last change of a name since a listing's begin, with its time; None if unchanged."""
        found = self._recent.get(prefix, {}).get(name)
        return found if found is not None and found[1] >= since else None

    def removed(self, prefix: str) -> list[str]:
        """The names in a directory that this mount has removed recently."""
        recent = self._recent.get(prefix, {}).items()
        lasting = self._lasting.get(prefix, {}).items()
        return [name for name, (entry, _) in recent if isinstance(entry, Absent)] + [
            name for name, entry in lasting if isinstance(entry, Absent)
        ]

    def has_lasting(self, prefix: str) -> bool:
        """True if there are files below a prefix that the bucket does not have yet."""
        return any(not isinstance(entry, Absent) for _, _, entry in self._lasting_below(prefix))

    def has_replacements(self, prefix: str, *, without: str) -> bool:
        """True if an object below a prefix, not of the name `without`, waits to be replaced."""
        return any(
            is_stored(entry) and (known, name) != (prefix, without)
            for known, name, entry in self._lasting_below(prefix)
        )

    def _lasting_below(self, prefix: str) -> Iterator[tuple[str, str, Entry | Absent]]:
        for known, entries in self._lasting.items():
            if known.startswith(prefix):
                yield from ((known, name, entry) for name, entry in entries.items())

    def apply(self, prefix: str, segment: Segment) -> None:
        """Merge this mount's changes into a new segment; expire it if some are forgotten."""
        if self.has_forgotten(prefix, segment.fetched):
            segment.distrust()
        for at, moved in reversed(self._moves):
            if at < segment.fetched:
                break
            if prefix.startswith(moved):
                segment.distrust()
        for name, (entry, at) in self._recent.get(prefix, {}).items():
            if at >= segment.fetched:
                put(segment, name, entry)
        positions = self._positions.get(prefix, [])
        stop = len(positions) if segment.stop is None else bisect_right(positions, segment.stop)
        for position in positions[bisect_right(positions, segment.start) : stop]:
            name = position.removesuffix("/")
            put(segment, name, self._lasting[prefix][name])

    def move(self, old: str, new: str) -> None:
        """Note a directory's rename; changes that the bucket lacks get the new prefix."""
        now = time.monotonic()
        for moved in (old, new):
            self._moves.append((now, moved))
            for prefix in [known for known in self._recent if known.startswith(moved)]:
                del self._recent[prefix]
        for prefix in [known for known in self._lasting if known.startswith(old)]:
            target = new + prefix[len(old) :]
            along = {
                name: replace(entry, key=new + entry.key[len(old) :])
                if isinstance(entry, ObjectInfo)
                else entry
                for name, entry in self._lasting.pop(prefix).items()
            }
            self._lasting[target] = along | self._lasting.get(target, {})
            del self._positions[prefix]
            self._positions[target] = sorted(map(names.position, self._lasting[target]))


def _drop(changes: dict[str, dict[str, Kept]], prefix: str, name: str) -> None:
    entries = changes.get(prefix, {})
    if name in entries:
        del entries[name]
        if not entries:
            del changes[prefix]


def put(segment: Segment, name: str, entry: Entry | Absent) -> bool:
    """Set a name's entry in a segment; False if the name is outside the segment."""
    position = names.position(name)
    if not segment.holds(position):
        return False
    known = segment.entries.get(name, ABSENT)
    if entry is UNCOVERED and known is not None:
        return True  # the listing has no such directory, and may have the file
    is_listed = name in segment.entries
    segment.doubtful.discard(name)
    if entry is UNCOVERED:
        beneath = segment.hidden.pop(name, ABSENT)
        if beneath is None:
            segment.doubtful.add(name)
        else:
            entry = beneath
    elif entry is None and isinstance(known, ObjectInfo):
        segment.hidden[name] = known
    if not isinstance(entry, Absent):
        segment.entries[name] = entry
        if not is_listed:
            insort(segment.ordered, name, key=names.position)
    elif is_listed:
        del segment.entries[name]
        del segment.ordered[bisect_left(segment.ordered, position, key=names.position)]
    return True
