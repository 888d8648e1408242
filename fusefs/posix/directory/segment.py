"""The part of a directory that one LIST page shows.

A *segment* lies between two positions of a directory and has all entries between them, so
it shows for each name there whether the name exists. posix/nodes/names.py defines the
positions and their order.

A page starts and ends at keys, a segment at positions, and the two differ for files: the file `a`
has the position `a/`, after `a-b`, as it has to be hidden if the prefix `a/` exists. Files whose
position lies behind the end of a page are carried into the next segment (`pending`). A segment that
was listed without its neighbour in front lacks the files carried from there: the few names that are
its start, or prefixes of it, are `doubtful`: they may exist. They have to be requested by name, or
are carried on as doubtful if they stand behind the segment's end.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace

from fusefs.posix.directory.freshness import FIRST_S
from fusefs.posix.nodes import names
from fusefs.store.capabilities import PROBE_NAME
from fusefs.store.interface import ListPage, ObjectInfo

logger = logging.getLogger("fusefs.directories")

# The most hidden keys that are counted.
MOST_HIDDEN = 100_000
# A key of at most this many characters is never too long in bytes.
SURELY_SHORT = names.LONGEST_KEY // 4
# Greater than any character that is likely in a key, and valid in XML.
LAST_CHARACTER = "\U0010fffd"

# An entry is a file's ObjectInfo, or None for a directory.
Entry = ObjectInfo | None
# Files with a key before the end of a page and a position behind it; None: such a file may exist.
Carried = dict[str, ObjectInfo | None]


class Absent:
    """The answer for a name that does not exist."""


ABSENT = Absent()
# The answer for a removed directory: only a file that it hid may exist under the name.
UNCOVERED = Absent()


def is_stored(entry: Entry | Absent) -> bool:
    """True if the bucket has this entry; False for a new file that only this mount has."""
    return entry is None or (isinstance(entry, ObjectInfo) and bool(entry.etag))


@dataclass(slots=True, eq=False)
class Segment:
    """All names of a directory at positions in (start, stop].

    `stop` None is the directory's end. Times are seconds of the monotonic clock: names are shown
    until `expires`; opens, missing names and streams rely on the segment until `sure_until`, which
    is not later: `belief` seconds after its request at `fetched` (freshness.py). `hidden` has the
    files hidden by directories of the same name, by this name (None: such a file may exist).
    `has_hidden`: some keys of the page are not shown, those of `hidden` or others.
    """

    start: str
    stop: str | None
    entries: dict[str, Entry]
    pending: Carried | None = field(default_factory=dict)  # None if unknown
    doubtful: set[str] = field(default_factory=set)
    hidden: dict[str, ObjectInfo | None] = field(default_factory=dict)
    has_hidden: bool = False
    fetched: float = 0.0
    expires: float = 0.0
    sure_until: float = 0.0
    belief: float = 0.0
    ordered: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.ordered = sorted(self.entries, key=names.position)

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start

    def holds(self, position: str) -> bool:
        """True if this position lies within the segment."""
        return self.start < position and (self.stop is None or position <= self.stop)

    def answer(self, name: str) -> tuple[Entry | Absent, float] | None:
        """Return a name's entry (or ABSENT) and expiry time; None if the segment can't tell."""
        found = self.entries.get(name, ABSENT)
        if found is ABSENT and name in self.doubtful:
            return None
        if found is not ABSENT or math.isinf(self.belief):
            return found, self.sure_until
        return ABSENT, min(self.sure_until, self.fetched + FIRST_S)

    def after(self, position: str) -> int:
        """The index in `ordered` of the first entry behind a position."""
        return bisect_right(self.ordered, position, key=names.position)

    def resolve_doubts(self, found: dict[str, ObjectInfo]) -> None:
        """Add `found`, the `doubtful` names that exist, to the entries; empty `doubtful`."""
        # A name that is not doubtful any more was changed meanwhile.
        self.entries |= {name: info for name, info in found.items() if name in self.doubtful}
        self.ordered = sorted(self.entries, key=names.position)
        self.doubtful = set()

    def overlaps(self, other: Segment) -> bool:
        return (other.stop is None or self.start < other.stop) and (
            self.stop is None or other.start < self.stop
        )

    def differs(self, older: Segment) -> bool:
        """True if a name, ETag or size differs between two segments, where both overlap."""
        new, old = self.entries, older.entries
        if (self.start, self.stop) != (older.start, older.stop):
            new = {name: new[name] for name in new if older.holds(names.position(name))}
            old = {name: old[name] for name in old if self.holds(names.position(name))}
        unknown = self.doubtful | older.doubtful
        return any(
            name not in unknown
            and (name not in new or name not in old or _content(new[name]) != _content(old[name]))
            for name in new.keys() | old.keys()
        )

    def has(self, name: str, entry: Entry | Absent) -> bool:
        known = self.entries.get(name, ABSENT)
        if isinstance(known, Absent) or isinstance(entry, Absent):
            return False
        return _content(known) == _content(entry)

    def distrust(self) -> None:
        """Make the segment expire now."""
        self.expires = self.sure_until = 0.0

    def part(self, start: str, stop: str | None) -> Segment:
        """The part of this segment between two positions."""
        low = self.after(start)
        high = len(self.ordered) if stop is None else self.after(stop)
        part = replace(
            self,
            start=start,
            stop=stop,
            entries={name: self.entries[name] for name in self.ordered[low:high]},
            pending=self.pending if stop == self.stop else None,
        )
        part.doubtful = {name for name in self.doubtful if part.holds(names.position(name))}
        part.hidden = {name: self.hidden[name] for name in self.hidden.keys() & part.entries}
        return part


def _content(entry: Entry) -> tuple[str, int] | None:
    return None if entry is None else (entry.etag, entry.size)


class HiddenKeys:
    """Counts the keys that no file name can express, each once, and logs the first one."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._seen)

    def note(self, key: str, why: str) -> None:
        """Count a hidden key; the first one is logged, with the reason `why`."""
        if not self._seen:
            logger.warning("hiding the key %r: %s (further ones are only counted)", key, why)
        if len(self._seen) < MOST_HIDDEN:
            self._seen.add(hash(key))


def segment_from(
    page: ListPage, prefix: str, start: str, carried: Carried | None, hidden: HiddenKeys
) -> Segment:
    """Make a segment of one listed page of the directory `prefix`, from position `start` on.

    `carried` is `pending` of the segment before, None if unknown. Keys that no file name can
    express, and entries with missing fields, are noted in `hidden`.
    """
    cut = len(prefix)
    stop = page.last[cut:] if page.next_token is not None else None
    if carried is None:
        # The page lacks these names, whose keys sort before its start, though their positions
        # lie behind it; also the file whose key is the start, unless `just_before` made that key.
        is_key = bool(start) and not start.endswith(("/", LAST_CHARACTER))
        unlisted = _sorting_before(start) | ({start} if is_key else set())
        carried = dict.fromkeys(name for name in unlisted if not _why_hidden(prefix, name))
    files = dict(carried)
    has_hidden = page.unnamed > 0
    if has_hidden:
        hidden.note(prefix, "an entry of its listing has no key that is below it")
    for info in page.objects:
        name = info.key[cut:]
        why = _why_hidden(prefix, name)
        if name and not why and not info.etag:
            why = "the store tells no ETag, size or time that can be used"
        if not why:
            files[name] = info
        elif name or info.size:
            has_hidden = True
            hidden.note(info.key, why if name else "it is also a directory")
    late = {*_sorting_before(stop), stop} & files.keys() if stop is not None else set()
    pending = {name: files.pop(name) for name in late}
    entries: dict[str, Entry] = {name: info for name, info in files.items() if info is not None}
    doubtful = files.keys() - entries.keys()
    covered: dict[str, ObjectInfo | None] = {}
    for key in page.prefixes:
        name = key[cut:-1]
        why = _why_hidden(prefix, name)
        if why:
            has_hidden = True
            if name != PROBE_NAME:
                hidden.note(key, why)
        elif names.position(name) > start:
            file = entries.get(name)
            if file is not None:
                has_hidden = True
                hidden.note(file.key, "it is also a directory")
            if name in files:
                covered[name] = file
            entries[name] = None
    return Segment(start, stop, entries, pending, doubtful - entries.keys(), covered, has_hidden)


def _why_hidden(prefix: str, name: str) -> str:
    """The reason why a name in a directory is hidden, "" if it is shown."""
    if names.is_private(prefix, name):
        return "the CSI driver keeps its records there"
    if len(prefix) + len(name) > SURELY_SHORT and len((prefix + name).encode()) > names.LONGEST_KEY:
        return "a key has 1,024 bytes at most"
    return "" if names.is_expressible(name) else "no file name can express it"


def _sorting_before(key: str) -> set[str]:
    """The names of files whose keys sort before a key, and whose positions lie behind it."""
    return {key[:length] for length in range(1, len(key)) if key[length] < "/"}


def just_before(name: str) -> str:
    """A position before a name, and behind nearly all names that sort before it."""
    last = ord(name[-1]) - 1
    if 0xD800 <= last <= 0xDFFF:  # surrogates are not characters
        last = 0xD7FF
    # Control characters do not travel well in a request.
    return name[:-1] + chr(last) + LAST_CHARACTER if last > 0x20 else name[:-1]


def start_after(prefix: str, position: str) -> str:
    """The `start_after` of a LIST request for the entries behind a position."""
    if not position:
        return ""
    # A position ending in "/" is a directory's: skip all keys in it.
    return prefix + position + (LAST_CHARACTER if position.endswith("/") else "")
