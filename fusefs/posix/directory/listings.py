"""Listings: what is known of the names in a directory, and how long it is relied on.

A lookup in a directory of which nothing is known asks for the page that starts
at that name, and thus learns of up to a thousand neighbours for the price of
one; a directory stream reads page after page. Pages are kept as segments,
which segment.py explains. freshness.py has for how long each is relied on; what was
relied on for its time is requested again by the same page, which answers for all its names.

Two things are fetched ahead: the page behind the one that a stream is reading,
and whole folders when a program walks from one to the next (walk.py).

Segments are kept until they are out of date, and dropped when all of them
together hold too many entries, those first that were not used for longest; a
directory is known as long as it has segments or is in use. While a directory stream is open
it goes on believing what was current when it was opened.

Everything here belongs to the event loop.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from contextlib import suppress
from weakref import WeakValueDictionary

import trio

from fusefs.posix.directory.directory import Directory
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
    just_before,
    segment_from,
    start_after,
)
from fusefs.posix.directory.walk import Expect, Walk, Walks, run_ahead
from fusefs.posix.nodes import names
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.posix.nodes.temporary_names import is_temporary
from fusefs.settings.patterns import PathRules
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.telemetry.stalls import WaitCause, stage

__all__ = ["ABSENT", "Absent", "Directories", "Directory", "Entry", "Segment"]

# About 560 bytes each: 110 MB when full, a hundred times a usual data set's folder. Less
# memory holds fewer (settings/memory.py).
MAX_ENTRIES = 200_000


# Names of a segment that is requested again as it was; a page has no more.
_MOST_AGAIN = 1000

# For how long what is out of date may be carried on: also with a TTL of 0 the pages of a stream
# follow each other.
CARRIED_S = 10.0
# What a segment and its directory take is that of so many entries.
_SEGMENT_SIZE = 2


def _size_of(segment: Segment) -> int:
    return len(segment.entries) + len(segment.hidden) + _SEGMENT_SIZE


class Directories:
    """The known part of all directories; see the module's text.

    `ttl` is for how many seconds the listings of a path are relied on at most (`math.inf`: for
    ever); what is fetched ahead runs in `nursery`. `inodes` are what was told of them: they are
    doubted where something was changed, and names were relied on. `most_entries` are kept of all
    listings together.
    Whoever waits for the bucket gets a StoreError where it could not tell.
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
        # Until then an earlier process' requests may take effect; in monotonic seconds.
        self._certain_from = time.monotonic() + store.unanswered.unsettled_s
        self.head_policy = head_policy or HeadPolicy()
        self.hidden = HiddenKeys()
        self.pending_changes = PendingChanges()
        self._creations = Creations()
        self._store = store
        self.nursery = nursery
        self._walks = Walks(store, nursery, self.pending_changes, self._fill, inodes.prefix)
        # A bucket may have millions: those in use, and those of segments below.
        self._known: WeakValueDictionary[str, Directory] = WeakValueDictionary()
        # All segments, those looked up or listed last at the end, for dropping the first.
        self._by_use: OrderedDict[int, tuple[Directory, Segment]] = OrderedDict()
        self._entries = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, prefix: str) -> Directory:
        directory = self._known.get(prefix)
        if directory is None:
            most_s = self._ttl.of(prefix[len(self._inodes.prefix) : -1])
            directory = self._known[prefix] = Directory(prefix, most_s)
        return directory

    def lookup_now(self, directory: Directory, name: str) -> tuple[Entry | Absent, float] | None:
        """The entry known of a name, with its time; None if that takes a request (freshness.py)."""
        here = self.pending_changes.get(directory.prefix, name)
        if here is not None:
            return here, math.inf
        segment, now = directory.holding(name), time.monotonic()
        if segment is None or segment.expires <= now:
            return None
        self._by_use.move_to_end(id(segment))
        known = segment.answer(name)
        if known is None or known[1] > now or not isinstance(known[0], Absent):
            return known
        is_young = now < segment.fetched + min(FIRST_S, directory.most_s)
        is_made = is_temporary(name, is_exclusive=False) or self._creations.are_many(now)
        return known if is_young and is_made else None

    def sure_now(self, directory: Directory, name: str) -> tuple[Entry | Absent, float] | None:
        """As `lookup_now`, of what is relied on alone."""
        known = self.lookup_now(directory, name)
        return known if known is not None and known[1] > time.monotonic() else None

    async def lookup(
        self, directory: Directory, name: str, *, is_opened: bool = False
    ) -> tuple[Entry | Absent, float]:
        """The entry of a name, and until when that is relied on.

        An answer of the bucket that came for this lookup is relied on until after its beginning
        at least. A name that `is_opened` is told from nothing older that is merely shown.
        """
        began = time.monotonic()
        for _ in range(3):
            known = (self.sure_now if is_opened else self.lookup_now)(directory, name)
            if known is not None:
                return known
            await self._load_around(directory, name)
            segment = directory.holding(name)
            # It may be out of date at once, but is newer than the question.
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
        self,
        directory: Directory,
        position: str,
        valid_since: float,
        expect: Expect = lambda _prefix, _segment: None,
    ) -> Segment:
        """The segment that tells what comes behind a position of a directory stream.

        Segments that were still relied on at `valid_since` will do. `expect` is called with the
        directories that a program is about to walk through.
        """
        while True:
            segment = self.segment_now(directory, position, valid_since, expect)
            if segment is not None:
                return segment
            if not position:
                known_before = directory.additions
                await self._walks.step(directory.prefix, expect)
                if directory.additions != known_before:
                    continue  # a walk that leads there had something of it
            event = directory.loading.get(position)
            if event is not None:
                with stage(WaitCause.METADATA):
                    await event.wait()
                continue
            known = directory.behind(position)
            if known is not None and known.doubtful and _valid_until(known) > valid_since:
                await self._look_up_doubtful(directory, known)
                continue
            return await self._load(directory, position, resolve_doubts=True)

    def segment_now(
        self, directory: Directory, position: str, valid_since: float, expect: Expect
    ) -> Segment | None:
        """As `segment_behind`, if it is there already."""
        segment = directory.behind(position)
        if segment is None or segment.doubtful or _valid_until(segment) <= valid_since:
            return None
        if (stop := segment.stop) is not None:
            following = directory.behind(stop)
            is_known = following is not None and _valid_until(following) > valid_since
            if not is_known and stop not in directory.loading:
                directory.loading[stop] = trio.Event()
                self.nursery.start_soon(run_ahead, self._load, directory, stop)
        elif directory.walk is not None:
            walk, directory.walk = directory.walk, None
            self._walks.go_on(walk, expect)
        return segment

    async def look_again(self, directory: Directory) -> Segment:
        """The first segment of a directory as the bucket has it now."""
        return await self._load(directory, "", resolve_doubts=True)

    def correct(self, directory: Directory, name: str, info: ObjectInfo | None) -> None:
        """A newer answer than the listing's: a HEAD of one file."""
        directory.doubt_carried(name)
        self._note_change(directory, is_ours=False)
        segment = directory.holding(name)
        if segment is None:
            return
        directory.generation += 1
        if info is not None and name in segment.entries:
            segment.entries[name] = info
        else:
            # Whether something else is there now, only a listing can tell.
            segment.distrust()

    def changed(
        self, prefix: str, name: str, entry: Entry | Absent, *, lasting: bool = False
    ) -> None:
        """This mount has changed what there is under a name; `lasting` if the bucket lacks it."""
        directory = self.get(prefix)
        if not isinstance(entry, Absent):
            self.head_policy.changed(prefix)
        self.pending_changes.set(prefix, name, entry, lasting=lasting)
        segment = directory.holding(name)
        is_new = isinstance(entry, ObjectInfo) and not entry.etag  # the bucket does not have it
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
        """Rely on no page that is here: the directory was changed, by this mount or another."""
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
        """The bucket is without an object that this mount has removed before."""
        self.pending_changes.leaving.discard(key)
        prefix, name = names.split_key(key)
        if isinstance(self.pending_changes.get(prefix, name), Absent):
            self.changed(prefix, name, ABSENT)

    def has_other(self, prefix: str, name: str) -> bool:
        """True if the bucket is known to have something in a directory beside one name."""
        directory = self._known.get(prefix)
        if directory is not None and directory.has_other(name, time.monotonic()):
            return True
        return self.pending_changes.has_replacements(prefix, without=name)

    def made(self, prefix: str) -> None:
        """This mount has made a directory: nothing is in it."""
        directory = self.get(prefix)
        segment = Segment("", None, {})
        self._put(directory, segment, time.monotonic())

    def moved(self, old: str, new: str) -> None:
        """This mount has renamed a directory: nothing that listings had of it holds."""
        self.head_policy.moved(old, new)
        self.pending_changes.move(old, new)
        for directory in list(self._known.values()):
            if directory.prefix.startswith((old, new)):
                for segment in directory.segments:
                    segment.distrust()
                directory.generation += 1

    def _fill(
        self, walk: Walk, prefix: str, page: ListPage, fetched: float, has_own_key: bool
    ) -> Segment:
        directory = self.get(prefix)
        segment = self._absorb(directory, "", page, fetched)
        segment.has_hidden = segment.has_hidden or not has_own_key
        directory.walk = walk
        return segment

    async def _load_around(self, directory: Directory, name: str) -> None:
        """Load the page that held a name, or else starts at it; or wait for one that may hold it.

        Of a directory that nothing is known of, that is the first page, which
        mostly is all; otherwise names that come in shuffled order would cost
        a page for each that is before all earlier ones.
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
                    # The folder's own marker and no more: a listing from there on would not get
                    # further.
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
        """Make a segment of a page and put it in its place."""
        carried = None
        for before in directory.segments:
            if before.stop == start and fetched < max(before.expires, before.fetched + CARRIED_S):
                carried = before.pending  # what the segment in front has left over, of late
        segment = segment_from(page, directory.prefix, start, carried, self.hidden)
        self._put(directory, segment, fetched)
        return segment

    def _put(self, directory: Directory, segment: Segment, fetched: float) -> None:
        """Put a new segment, which was requested at `fetched`, in its place."""
        segment.fetched, segment.expires = fetched, math.inf
        self.pending_changes.apply(directory.prefix, segment)
        self._doubt_undone(directory.prefix, segment)
        if segment.expires:  # nothing speaks against it
            self._date(directory, segment)
        self._add(directory, segment)

    def _doubt_undone(self, prefix: str, segment: Segment) -> None:
        """Have names asked for alone whose objects a late request may have undone."""
        for expected in self._store.unanswered.expected_below(prefix):
            name = expected.key[len(prefix) :]
            listed = segment.entries.get(name, ABSENT)
            if not name or "/" in name or listed is None:
                continue
            if self.pending_changes.get(prefix, name) is not None:
                continue
            is_here = isinstance(listed, ObjectInfo) and listed.etag == expected.etag
            if not is_here and put(segment, name, ABSENT):
                segment.doubtful.add(name)

    def _date(self, directory: Directory, segment: Segment) -> None:
        """Set until when a new segment is relied on, and shown."""
        fetched = segment.fetched
        older = [known for known in directory.segments if known.overlaps(segment)]
        before = 0.0
        if not older:
            # Seen for the first time: as old as its files say.
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

    def _add(self, directory: Directory, segment: Segment) -> None:
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

    async def _look_up_doubtful(self, directory: Directory, segment: Segment) -> None:
        """Ask for the names that a segment can't answer for."""
        files = {}
        for name in sorted(segment.doubtful):
            found, _ = await self.lookup_by_name(directory, name)
            if isinstance(found, ObjectInfo):
                files[name] = found
        before = len(segment.entries)
        segment.resolve_doubts(files)
        if id(segment) in self._by_use:  # it may have been dropped meanwhile
            self._entries += len(segment.entries) - before

    async def lookup_by_name(self, directory: Directory, name: str) -> tuple[Entry | Absent, float]:
        """Ask for one name alone: as a directory and, if it is none, as a file."""
        expires = self._until(time.monotonic(), belief_s(QUIET_S, 0.0, directory.most_s))
        key = directory.prefix + name
        inside = await self._store.list_page(key + "/", delimiter="", max_keys=1)
        if inside.objects:
            return None, expires
        found: ObjectInfo | None = None
        with suppress(NotFoundError):
            found = await self._store.head(key)
        if self._store.unanswered.has_undone(key, found):
            # It is put back soon, and shown meanwhile.
            expected = self._store.unanswered.expected_below(key)
            found = next((info for info in expected if info.key == key), None)
        return found or ABSENT, expires


def _valid_until(segment: Segment) -> float:
    """Until when a directory stream that begins may have a segment."""
    return min(segment.expires, segment.sure_until)
