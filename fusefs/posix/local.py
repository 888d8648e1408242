"""Names that this mount has changed, laid over what listings tell.

A file that is being written is in no listing until it is uploaded, and a LIST
that was under way during a change does not know it yet. So each change is kept
for as long as a listing from before it may come in, or, for what is only here,
until it is settled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fusefs.posix import names
from fusefs.posix.segments import Absent, Entry, Segment

# No listing is under way for longer.
KEPT_S = 300.0


@dataclass(slots=True)
class Change:
    """What there is under a name since `at` (monotonic seconds); `lasting` if only here."""

    entry: Entry | Absent
    at: float
    lasting: bool


class LocalNames:
    """The changes of all directories, by prefix and name."""

    def __init__(self) -> None:
        self._changes: dict[str, dict[str, Change]] = {}

    def set(self, prefix: str, name: str, entry: Entry | Absent, *, lasting: bool) -> None:
        changes = self._changes.setdefault(prefix, {})
        now = time.monotonic()
        changes[name] = Change(entry, now, lasting)
        if len(changes) % 256 == 0:
            for old in [one for one, change in changes.items() if _is_over(change, now)]:
                del changes[old]

    def get(self, prefix: str, name: str) -> Entry | Absent | None:
        """What is only here under a name: ABSENT, or the entry, or None for nothing."""
        change = self._changes.get(prefix, {}).get(name)
        return change.entry if change is not None and change.lasting else None

    def has_lasting(self, prefix: str) -> bool:
        """Whether something below a prefix is only here."""
        return any(
            change.lasting and not isinstance(change.entry, Absent)
            for known, changes in self._changes.items()
            if known.startswith(prefix)
            for change in changes.values()
        )

    def apply(self, prefix: str, segment: Segment) -> None:
        """Bring a segment that was just listed up to date."""
        for name, change in self._changes.get(prefix, {}).items():
            if change.lasting or change.at >= segment.fetched:
                put(segment, name, change.entry)

    def move(self, old: str, new: str) -> None:
        """A directory was renamed; what is only here below it goes along."""
        for prefix in [known for known in self._changes if known.startswith(old)]:
            self._changes[new + prefix[len(old) :]] = self._changes.pop(prefix)


def put(segment: Segment, name: str, entry: Entry | Absent) -> bool:
    """Have a segment say what there is under a name; False if it does not hold it."""
    if not segment.holds(names.position(name)):
        return False
    if isinstance(entry, Absent):
        segment.entries.pop(name, None)
    else:
        segment.entries[name] = entry
    segment.doubtful.discard(name)
    segment.ordered = sorted(segment.entries, key=names.position)
    return True


def _is_over(change: Change, now: float) -> bool:
    return not change.lasting and now - change.at > KEPT_S
