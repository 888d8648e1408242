"""Listings: the known names of directories, from LIST pages, with their times of validity.

The first lookup in a directory requests its first page, a later one the page that starts at the
name, and so gets up to a thousand neighbours for the price of one; a directory stream reads page
after page. Pages are kept as segments (segment.py), and relied on for as long as freshness.py says;
then the same page is requested again, which answers for all its names.

Two things are fetched ahead: the page behind the one that a stream is reading, and whole folders
when a program walks from one to the next (walk.py).

If all segments together hold too many entries, the least recently used ones are dropped; a
directory is remembered while it has segments or is in use. An open directory stream uses pages that
were valid when the stream was opened. Everything here belongs to the event loop.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import trio

from fusefs.posix.directory.freshness import FIRST_S, QUIET_S, Creations, belief_s
from fusefs.posix.directory.head_policy import HeadPolicy
from fusefs.posix.directory.pending_changes import PendingChanges, put
from fusefs.posix.directory.segment import (
    ABSENT,
    UNCOVERED,
    Absent,
    Entry,
    HiddenKeys,
    Segment,
    is_stored,
    just_before,
    segment_from,
    start_after,
)
from fusefs.posix.directory.walk import Walk, Walks, run_ahead
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.posix.nodes.temporary_names import is_temporary
from fusefs.settings.patterns import PathRules
from fusefs.store.contract import Store, find
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.telemetry.stalls import WaitCause, stage

__all__ = ["ABSENT", "Absent", "Directories", "Directory", "Entry", "Segment"]

# An entry takes about 560 bytes, so this is 110 MB, a hundred times a usual data set's folder.
# With less memory the limit is lower (settings/memory.py).
MAX_ENTRIES = 200_000


# A segment with at most this many names is requested again as one page.
_MOST_AGAIN = 1000

# The time for which `Segment.pending` may be used for the next page, even if the segment has
# expired: with a TTL of 0, too, the pages of a stream follow each other.
CARRIED_S = 10.0
# The most names of a folder that are searched for the next folder.
_LOOKED_AT = 100
# A segment and its directory take as much memory as this many entries.
_SEGMENT_SIZE = 2
# The first generations of new directories, far apart: no two directories ever share one.
_GENERATIONS = count(0, 1 << 32)


def _size_of(segment: Segment) -> int:
    return len(segment.entries) + len(segment.hidden) + _SEGMENT_SIZE


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


class Directories:
    """The cached listings of all directories, as segments.

    `ttl` is the most seconds for which listings of a path are relied on (`math.inf`: for ever);
    pages are fetched ahead in `nursery`. When a directory turns out to have changed, its nodes in
    `inodes` are doubted: their next opens ask the bucket. All listings together have at most
    `most_entries`. Methods that request a listing raise StoreError if the request fails.
    """

    def __init__(
        self,
        store: Store,
        inodes: InodeTable,
        ttl: PathRules[float],
        nursery: trio.Nursery,
        head_policy: HeadPolicy | None = None,
        most_entries: int = MAX_ENTRIES,
    ) -> None:
        self._inodes = inodes
        self._ttl = ttl
        self._most_entries = min(most_entries, MAX_ENTRIES)
        # Until this time (monotonic s) requests of an earlier process may still take effect.
        self._certain_from = time.monotonic() + store.unanswered.unsettled_s
        self.head_policy = head_policy or HeadPolicy()
        self.hidden = HiddenKeys()
        self.pending_changes = PendingChanges()
        self._creations = Creations()
        self._store = store
        self.nursery = nursery
        self._walks = Walks(store, nursery, self.pending_changes, self._fill, inodes.prefix)
        # Only the directories in use, and those with segments: a bucket may have millions.
        self._known: WeakValueDictionary[str, Directory] = WeakValueDictionary()
        # All segments, the most recently used one last, for dropping the first.
        self._by_use: OrderedDict[int, tuple[Directory, Segment]] = OrderedDict()
        self._entries = 0
        # Called with each directory that a program will probably read soon, and its segment.
        self.expect: Callable[[str, Segment], None] = lambda _prefix, _segment: None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, prefix: str) -> Directory:
        directory = self._known.get(prefix)
        if directory is None:
            most_s = self._ttl.of(prefix[len(self._inodes.prefix) : -1])
            directory = self._known[prefix] = Directory(prefix, most_s)
        return directory

    def lookup_now(
        self, directory: Directory, name: str, *, is_opened: bool = False
    ) -> tuple[Entry | Absent, float] | None:
        """The cached entry of a name, with its expiry (monotonic s); None: a request is needed.

        An entry that is shown but not relied on is not enough for an open (`is_opened`).
        """
        if (here := self.pending_changes.get(directory.prefix, name)) is not None:
            return here, math.inf
        segment, now = directory.holding(name), time.monotonic()
        if segment is None or segment.expires <= now:
            return None
        self._by_use.move_to_end(id(segment))
        known = segment.answer(name)
        if known is None or known[1] > now:
            return known
        if is_opened:
            return None
        if not isinstance(known[0], Absent):
            return known
        is_young = now < segment.fetched + min(FIRST_S, directory.most_s)
        is_made = is_temporary(name, is_exclusive=False) or self._creations.are_many(now)
        return known if is_young and is_made else None

    async def lookup(
        self, directory: Directory, name: str, *, is_opened: bool = False
    ) -> tuple[Entry | Absent, float]:
        """Look up a name; return its entry, and the monotonic time until which it is relied on.

        An answer that the bucket gave to this call is returned even if it has expired. With
        `is_opened`, for an open, an entry that is shown but not relied on is requested again.
        """
        began = time.monotonic()
        for _ in range(3):
            known = self.lookup_now(directory, name, is_opened=is_opened)
            if known is not None:
                return known
            await self._load_around(directory, name)
            segment = directory.holding(name)
            # The answer may have expired already, but is newer than the question.
            if segment is not None and segment.fetched >= began:
                known = segment.answer(name)
                if known is not None:
                    return known
        with self.pending_changes.listing() as asked:
            found, until = await self.lookup_by_name(directory, name)
            changed = self.pending_changes.changed_since(directory.prefix, name, asked)
        if changed is None:
            return found, until
        if changed[0] is not UNCOVERED:
            return changed[0], until
        return (ABSENT, 0.0) if found is None else (found, until)

    async def segment_behind(
        self, directory: Directory, position: str, valid_since: float
    ) -> Segment:
        """Return the segment with the entries behind a position, for a directory stream.

        A segment is used if it was still relied on at `valid_since`.
        """
        while True:
            segment = self.segment_now(directory, position, valid_since)
            if segment is not None:
                return segment
            if not position:
                known_before = directory.additions
                await self._walks.step(directory.prefix)
                if directory.additions != known_before:
                    continue  # the walk has filled the directory
            if (event := directory.loading.get(position)) is not None:
                with stage(WaitCause.METADATA):
                    await event.wait()
                continue
            known = directory.behind(position)
            if known is not None and known.doubtful and known.sure_until > valid_since:
                await self._look_up_doubtful(directory, known)
                continue
            return await self._load(directory, position, resolve_doubts=True)

    def segment_now(
        self, directory: Directory, position: str, valid_since: float
    ) -> Segment | None:
        """Return the cached segment with the entries behind a position; None: request it first."""
        segment = directory.behind(position)
        if segment is None or segment.doubtful or segment.sure_until <= valid_since:
            return None
        if (stop := segment.stop) is not None:
            following = directory.behind(stop)
            is_known = following is not None and following.sure_until > valid_since
            if not is_known and stop not in directory.loading:
                directory.loading[stop] = trio.Event()
                self.nursery.start_soon(run_ahead, self._load, directory, stop)
        elif directory.walk is not None:
            walk, directory.walk = directory.walk, None
            self._walks.go_on(walk)
        return segment

    async def look_again(self, directory: Directory) -> Segment:
        """Request the first page of a directory again; return its segment."""
        return await self._load(directory, "", resolve_doubts=True)

    def correct(self, directory: Directory, name: str, info: ObjectInfo | None) -> None:
        """Correct a listing: a name's object is `info` by now; None: it is gone, or not known."""
        directory.doubt_carried(name)
        self._note_change(directory, is_ours=False)
        segment = directory.holding(name)
        if segment is None:
            return
        directory.generation += 1
        if info is not None and name in segment.entries:
            segment.entries[name] = info
        else:
            # Only a new listing can tell if the name has another entry now.
            segment.distrust()

    def changed(
        self, prefix: str, name: str, entry: Entry | Absent, *, lasting: bool = False
    ) -> None:
        """Note that this mount changed a name's entry; `lasting`: the bucket lacks the change."""
        directory = self.get(prefix)
        if not isinstance(entry, Absent):
            self.head_policy.changed(prefix)
        self.pending_changes.set(prefix, name, entry, lasting=lasting)
        segment = directory.holding(name)
        is_new = isinstance(entry, ObjectInfo) and not entry.etag  # the bucket lacks the file
        self._creations.note(time.monotonic(), is_new=is_new)
        is_known = segment is not None and segment.has(name, entry)
        if not is_new and not is_known and not isinstance(entry, Absent):
            self._note_change(directory, is_ours=True)
        directory.generation += 1
        directory.doubt_carried(name)
        if segment is not None:
            before = _size_of(segment)
            put(segment, name, entry)
            self._entries += _size_of(segment) - before

    def _note_change(self, directory: Directory, *, is_ours: bool) -> None:
        """Stop relying on a directory's pages, as this mount or another client has changed it."""
        if math.isinf(directory.most_s):
            return
        now = time.monotonic()
        was_relied_on, directory.relied_until = directory.relied_until > now, now
        directory.doubted = now
        directory.changed = max(directory.changed, now - QUIET_S if is_ours else now)
        for segment in directory.segments:
            segment.belief = 0.0
            segment.sure_until = min(segment.sure_until, now)
        if was_relied_on:
            self._inodes.doubt(directory.prefix)

    def left(self, key: str) -> None:
        """Note that an object which this mount removed is deleted in the bucket now."""
        self.pending_changes.leaving.discard(key)
        prefix, name = names.split_key(key)
        if isinstance(self.pending_changes.get(prefix, name), Absent):
            self.changed(prefix, name, ABSENT)

    def has_other(self, prefix: str, name: str) -> bool:
        """True if the bucket is known to have another entry than `name` in a directory."""
        directory = self._known.get(prefix)
        if directory is not None and directory.has_other(name, time.monotonic()):
            return True
        return self.pending_changes.has_replacements(prefix, without=name)

    def made(self, prefix: str) -> None:
        """Note that this mount has created a directory, which is empty."""
        self._put(self.get(prefix), Segment("", None, {}), time.monotonic())

    def moved(self, old: str, new: str) -> None:
        """Note that this mount has renamed a directory: its listings are not used any more."""
        self.head_policy.moved(old, new)
        self.pending_changes.move(old, new)
        for directory in list(self._known.values()):
            if directory.prefix.startswith((old, new)):
                for segment in directory.segments:
                    segment.distrust()
                directory.generation += 1

    # The known files, for readahead; nothing here sends a request.

    def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
        """Yield the known files of a folder: those behind the key `behind`, then the others."""
        name = behind.removeprefix(prefix)
        position = names.position(name) if name else ""
        yield from self._between(prefix, position, None)
        if position:
            yield from self._between(prefix, "", position)

    def next_folder(self, prefix: str) -> str | None:
        """The prefix of the next folder in the parent's listing; None if it is not known."""
        if not prefix:
            return None
        parent, name = names.split_entry(prefix)
        position = names.position(name)
        for segment in self.get(parent).segments:
            if segment.stop is None or segment.stop > position:
                first = segment.after(position)
                for other in segment.ordered[first : first + _LOOKED_AT]:
                    if segment.entries.get(other, True) is None:
                        return f"{parent}{other}/"
        return None

    def _between(self, prefix: str, start: str, stop: str | None) -> Iterator[ObjectInfo]:
        """Yield the files at positions in (start, stop], up to the first gap in the listings."""
        directory, at = self.get(prefix), start
        while segment := directory.behind(at):
            for name in segment.ordered[segment.after(at) :]:
                if stop is not None and names.position(name) > stop:
                    return
                if (entry := segment.entries.get(name)) is not None:
                    yield entry
            if segment.stop is None or (stop is not None and segment.stop >= stop):
                return
            at = segment.stop

    def _fill(
        self, walk: Walk, prefix: str, page: ListPage, fetched: float, has_own_key: bool
    ) -> None:
        directory = self.get(prefix)
        segment = self._absorb(directory, "", page, fetched)
        segment.has_hidden = segment.has_hidden or not has_own_key
        directory.walk = walk
        self.expect(prefix, segment)

    async def _load_around(self, directory: Directory, name: str) -> None:
        """Load the page known to cover a name, or one from the name on, or wait for one under way.

        In an unknown directory the first page is loaded, which mostly has all names: otherwise
        names in random order would cost a page for each name that sorts before all earlier ones.
        """
        known = directory.holding(name)
        if known is not None and name not in known.doubtful and len(known.entries) <= _MOST_AGAIN:
            start = known.start
        else:
            start = just_before(name) if directory.segments or directory.loading else ""
        under_way = [other for other in directory.loading if other <= start]
        if under_way:
            with stage(WaitCause.METADATA):
                await directory.loading[max(under_way)].wait()
        else:
            await self._load(directory, start)

    async def _load(
        self, directory: Directory, start: str, *, resolve_doubts: bool = False
    ) -> Segment:
        event = directory.loading.setdefault(start, trio.Event())
        try:
            with self.pending_changes.listing() as began:
                prefix, after = directory.prefix, start_after(directory.prefix, start)
                page = await self._store.list_page(prefix, start_after=after)
                if page.next_token is not None and page.last == prefix:
                    # The page has only the folder's own marker, and the next page would start
                    # at the same position again.
                    page = await self._store.list_page(prefix, start_after=prefix)
                segment = self._absorb(directory, start, page, min(page.listed_at, began))
            if resolve_doubts and segment.doubtful:
                await self._look_up_doubtful(directory, segment)
            return segment
        finally:
            if directory.loading.get(start) is event:
                del directory.loading[start]
            event.set()

    def _absorb(self, directory: Directory, start: str, page: ListPage, fetched: float) -> Segment:
        """Make a segment of the page from position `start` on, and add it to the directory."""
        carried = None
        for before in directory.segments:
            if before.stop == start and fetched < max(before.expires, before.fetched + CARRIED_S):
                carried = before.pending  # the files left over by the segment in front
        segment = segment_from(page, directory.prefix, start, carried, self.hidden)
        self._put(directory, segment, fetched)
        return segment

    def _put(self, directory: Directory, segment: Segment, fetched: float) -> None:
        """Add a new segment, requested at `fetched`, with this mount's changes merged in."""
        segment.fetched, segment.expires = fetched, math.inf
        self.pending_changes.apply(directory.prefix, segment)
        self._doubt_undone(directory.prefix, segment)
        if segment.expires:  # the segment was not distrusted
            self._date(directory, segment)
        gone, come = directory.add(segment)
        for old in gone:
            del self._by_use[id(old)]
            self._entries -= _size_of(old)
        for new in come:
            self._by_use[id(new)] = (directory, new)
            self._entries += _size_of(new)
        while self._entries > self._most_entries and len(self._by_use) > 1:
            _, (owner, oldest) = self._by_use.popitem(last=False)
            owner.segments.remove(oldest)
            owner.generation += 1
            self._entries -= _size_of(oldest)

    def _doubt_undone(self, prefix: str, segment: Segment) -> None:
        """Add to `segment.doubtful` the names whose objects a late request may have undone."""
        for key, expected in self._store.unanswered.expected_below(prefix).items():
            name = key[len(prefix) :]
            listed = segment.entries.get(name, ABSENT)
            if not name or "/" in name or listed is None:
                continue
            if self.pending_changes.get(prefix, name) is not None:
                continue
            etag = listed.etag if isinstance(listed, ObjectInfo) else None
            if etag != (expected and expected.etag) and put(segment, name, ABSENT):
                segment.doubtful.add(name)

    def _date(self, directory: Directory, segment: Segment) -> None:
        """Set the times until which a new segment is relied on, and shown."""
        fetched = segment.fetched
        older = [known for known in directory.segments if known.overlaps(segment)]
        before = 0.0
        if not older:
            # First seen now: the youngest file tells when the directory was changed.
            times = [entry.mtime_ns for entry in segment.entries.values() if entry is not None]
            still_s = QUIET_S
            if times:
                age_s = time.monotonic() - fetched
                still_s = max(0.0, time.time() - age_s - max(times) / 1e9)
            directory.changed = max(directory.changed, fetched - still_s)
        elif any(segment.differs(known) for known in older):
            self._note_change(directory, is_ours=False)
        else:
            before = min(known.belief for known in older)
        segment.belief = belief_s(fetched - directory.changed, before, directory.most_s)
        segment.expires = self._until(fetched, max(min(FIRST_S, directory.most_s), segment.belief))
        segment.sure_until = self._until(fetched, segment.belief)
        if fetched < directory.doubted:
            segment.sure_until = min(segment.sure_until, fetched)
        directory.relied_until = max(directory.relied_until, segment.sure_until)

    def _until(self, fetched: float, time_s: float) -> float:
        latest = self._certain_from if fetched < self._certain_from else math.inf
        return min(fetched + time_s, latest)

    async def _look_up_doubtful(self, directory: Directory, segment: Segment) -> None:
        """Ask the bucket for each of a segment's `doubtful` names, and add those that exist."""
        files = {}
        for name in sorted(segment.doubtful):
            found, _ = await self.lookup_by_name(directory, name)
            if isinstance(found, ObjectInfo):
                files[name] = found
        before = len(segment.entries)
        segment.resolve_doubts(files)
        if id(segment) in self._by_use:  # the segment may have been dropped meanwhile
            self._entries += len(segment.entries) - before

    async def lookup_by_name(self, directory: Directory, name: str) -> tuple[Entry | Absent, float]:
        """Request one name, as a directory (LIST), then as a file (HEAD): its entry and expiry."""
        expires = self._until(time.monotonic(), belief_s(QUIET_S, 0.0, directory.most_s))
        key = directory.prefix + name
        if (await self._store.list_page(key + "/", delimiter="", max_keys=1)).objects:
            return None, expires
        found = await find(self._store, key)
        if self._store.unanswered.has_undone(key, found):
            # What the mount expects will be put back soon, and is shown meanwhile.
            found = self._store.unanswered.expected_below(key).get(key)
        return found or ABSENT, expires
