"""Listings: what is known of the names in a directory, and how long it is believed.

What one LIST page tells is a *segment*: between two positions of a directory
it names everything there is, so it answers for the names in it and, just as
well, for the names that are not. A lookup in a directory of which nothing is
known asks for the page that starts at that name, and thus learns of up to a
thousand neighbours for the price of one; a directory stream reads segment
after segment. Positions and the order are those of names.py.

A page starts and ends at keys, a segment at positions, and the two differ for
files: the file `a` stands at position `a/`, after `a-b`, for it has to be
hidden if the prefix `a/` turns up. Files whose position lies behind the end
of a page are carried into the next segment (`pending`). A segment that was
not reached from its neighbour can't know what it would have been carried: its
`doubtful` names (prefixes of its start, at most a few) are asked for by name.

Two things are fetched ahead: the page behind the one that a stream is reading,
and, when a program walks from one folder to the next (`find`, a data loader's
scan), *flat* pages of their parent: keys without grouping, of which one page
of a thousand fills many small folders, where each would cost a request.

Segments are kept until they are out of date, and dropped, oldest first, when
all of them together hold too many entries. While a directory stream is open
it goes on believing what was current when it was opened.

Everything here belongs to the event loop.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from fusefs.posix import names
from fusefs.store.base import ListPage, ObjectInfo, Store
from fusefs.store.errors import NotFoundError, StoreError

logger = logging.getLogger("fusefs.directories")

# About 300 bytes each: 60 MB when full, a hundred times a usual data set's folder.
MAX_ENTRIES = 200_000
# Folders opened in a row before a walk is believed to be one.
WALK_AFTER = 3
MOST_WALKS = 64
# Beyond this many, hidden keys are not counted any more.
MOST_HIDDEN = 100_000
# Greater than any character that is likely in a key, and valid in XML.
LAST_CHARACTER = "\U0010fffd"

# An entry is a file's ObjectInfo, or None for a directory.
Entry = ObjectInfo | None


class Absent:
    """The answer for a name that does not exist."""


ABSENT = Absent()


class Segment:
    """All names of a directory at positions in (start, stop].

    `stop` None means up to the end. Times are seconds of the monotonic clock.
    """

    __slots__ = ("doubtful", "entries", "expires", "fetched", "ordered", "pending", "start", "stop")

    def __init__(self, start: str, stop: str | None, entries: dict[str, Entry]) -> None:
        self.start = start
        self.stop = stop
        self.entries = entries
        self.ordered = sorted(entries, key=names.position)
        # Files that belong behind `stop`; None if that is not known.
        self.pending: dict[str, ObjectInfo] | None = {}
        self.doubtful: set[str] = set()
        self.fetched = 0.0
        self.expires = 0.0

    def __lt__(self, other: Segment) -> bool:
        return self.start < other.start

    def holds(self, position: str) -> bool:
        """Whether an entry at this position would be in the segment."""
        return self.start < position and (self.stop is None or position <= self.stop)

    def after(self, position: str) -> int:
        """The index in `ordered` of the first entry behind a position."""
        return bisect_right(self.ordered, position, key=names.position)

    def overlaps(self, other: Segment) -> bool:
        return (other.stop is None or self.start < other.stop) and (
            self.stop is None or other.start < self.stop
        )

    def equals(self, other: Segment) -> bool:
        return (self.start, self.stop, self.entries) == (other.start, other.stop, other.entries)

    def part(self, start: str, stop: str | None) -> Segment:
        """What this segment tells of a smaller stretch."""
        low = self.after(start)
        high = len(self.ordered) if stop is None else self.after(stop)
        part = Segment(start, stop, {name: self.entries[name] for name in self.ordered[low:high]})
        part.doubtful = {name for name in self.doubtful if part.holds(names.position(name))}
        part.pending = self.pending if stop == self.stop else None
        part.fetched, part.expires = self.fetched, self.expires
        return part


class Directory:
    """The segments of one directory, in order and disjoint.

    `generation` changes with everything that a stream might show differently.
    """

    __slots__ = ("additions", "generation", "loading", "prefix", "segments", "walk")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.segments: list[Segment] = []
        self.loading: dict[str, trio.Event] = {}
        self.generation = 0
        self.additions = 0  # how many segments it ever got
        self.walk: Walk | None = None  # the walk that filled it and goes on from here

    def segment_behind(self, position: str) -> Segment | None:
        """The segment that tells what comes next behind a position."""
        index = bisect_right(self.segments, position, key=lambda segment: segment.start) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if segment.stop is None or position < segment.stop else None

    def add(self, new: Segment) -> list[Segment]:
        """Put a segment in; return those that went for it.

        Of an older one that overlaps, the parts outside stay as segments of
        their own, which the caller finds in `segments`.
        """
        replaced = [old for old in self.segments if old.overlaps(new)]
        if replaced and (len(replaced) > 1 or not replaced[0].equals(new)):
            self.generation += 1
        for old in replaced:
            self.segments.remove(old)
            if old.start < new.start:
                insort(self.segments, old.part(old.start, new.start))
            if new.stop is not None and (old.stop is None or new.stop < old.stop):
                insort(self.segments, old.part(new.stop, old.stop))
        insort(self.segments, new)
        self.additions += 1
        return replaced

    def is_complete(self, now: float) -> bool:
        """Whether every name of the directory is known and still believed."""
        at: str | None = ""
        for segment in self.segments:
            if at is None or segment.start > at or segment.expires <= now or segment.doubtful:
                return False
            at = segment.stop
        return at is None


class Walk:
    """A program going through the folders of one directory, one after the other.

    `next` is the folder at which the next flat page begins, None at the end
    or while that page is `loading`.
    """

    __slots__ = ("loading", "next", "pays", "prefix", "steps")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.steps = 0
        self.pays = True
        self.next: str | None = None
        self.loading: trio.Event | None = None


def grouped(prefix: str, page: ListPage) -> dict[str, ListPage]:
    """The directories below `prefix` that a flat page tells all of, each as a page of its own."""
    objects: dict[str, list[ObjectInfo]] = {}
    folders: dict[str, dict[str, None]] = {}
    at = len(prefix)
    for info in page.objects:
        slash = info.key.rfind("/")
        folder = info.key[: slash + 1]
        if folder not in objects and slash >= at:
            _add_folder(prefix, folder, objects, folders)
        if slash >= at:
            objects[folder].append(info)
    return {
        folder: ListPage(found, list(folders[folder]), None, "")
        for folder, found in objects.items()
        if page.next_token is None or not page.last.startswith(folder)
    }


def _add_folder(
    prefix: str,
    folder: str,
    objects: dict[str, list[ObjectInfo]],
    folders: dict[str, dict[str, None]],
) -> None:
    """Add a folder and those above it, each known to the one above."""
    objects[folder], folders[folder] = [], {}
    above = folder[: folder.rfind("/", 0, -1) + 1]
    if len(above) > len(prefix):
        if above not in objects:
            _add_folder(prefix, above, objects, folders)
        folders[above][folder] = None


def cut_off(prefix: str, page: ListPage) -> str | None:
    """The folder of `prefix` in which a flat page ends before its end."""
    if page.next_token is None:
        return None
    slash = page.last.find("/", len(prefix))
    return page.last[: slash + 1] if slash > 0 else None


class HiddenKeys:
    """Keys that no file name can express: each counted once, the first one told."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._seen)

    def note(self, key: str, why: str) -> None:
        if not self._seen:
            logger.warning("hiding the key %r: %s (further ones are only counted)", key, why)
        if len(self._seen) < MOST_HIDDEN:
            self._seen.add(hash(key))


class PageMemory(Protocol):
    """Pages that a restart may reuse; see cache/metadata.py."""

    async def load(self, prefix: str, start_after: str) -> tuple[ListPage, float] | None:
        """A remembered page and its age in seconds."""

    def save(self, prefix: str, start_after: str, page: ListPage) -> None:
        """Remember a page, some time soon."""


class Directories:
    """What is known of all directories; see the module's text.

    `ttl_s` is how long a listing is believed (`math.inf`: for ever).
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        memory: PageMemory | None = None,
        nursery: trio.Nursery | None = None,
    ) -> None:
        self._store = store
        self._nursery = nursery  # for what is fetched ahead; None: nothing is
        self._walks: OrderedDict[str, Walk] = OrderedDict()
        self.ttl_s = ttl_s
        self._memory = memory
        self._known: dict[str, Directory] = {}
        # All segments by age, for dropping the oldest.
        self._by_age: OrderedDict[int, tuple[Directory, Segment]] = OrderedDict()
        self._entries = 0
        self.hidden = HiddenKeys()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, prefix: str) -> Directory:
        directory = self._known.get(prefix)
        if directory is None:
            directory = self._known[prefix] = Directory(prefix)
        return directory

    def lookup_now(self, directory: Directory, name: str) -> tuple[Entry | Absent, float] | None:
        """What is known and believed of a name, and until when; None if it must be asked for."""
        segment = self._holding(directory, names.position(name))
        if segment is None or segment.expires <= time.monotonic():
            return None
        found = segment.entries.get(name, ABSENT)
        if found is ABSENT and name in segment.doubtful:
            return None
        return found, segment.expires

    async def lookup(self, directory: Directory, name: str) -> tuple[Entry | Absent, float]:
        """What there is under a name, and until when that is believed.

        Raises:
            StoreError: the bucket could not tell.
        """
        asked = time.monotonic()
        for _ in range(3):
            known = self.lookup_now(directory, name)
            if known is not None:
                return known
            await self._load_around(directory, name)
            segment = self._holding(directory, names.position(name))
            # With a TTL of 0 the answer is out of date at once, but newer than the question.
            if segment is not None and segment.fetched >= asked:
                found = segment.entries.get(name, ABSENT)
                if found is not ABSENT or name not in segment.doubtful:
                    return found, segment.expires
        return await self._ask_by_name(directory, name)

    async def segment_behind(
        self, directory: Directory, position: str, believed_since: float
    ) -> Segment:
        """The segment that tells what comes behind a position of a directory stream.

        Segments that were still believed at `believed_since` will do.
        """
        while True:
            segment = self.segment_now(directory, position, believed_since)
            if segment is not None:
                return segment
            if not position and await self._walk_to(directory):
                continue
            event = directory.loading.get(position)
            if event is not None:
                await event.wait()
                continue
            known = directory.segment_behind(position)
            if known is not None and known.doubtful and known.expires > believed_since:
                await self._settle_doubts(directory, known)
                continue
            return await self._load(directory, position, resolve_doubts=True)

    def segment_now(
        self, directory: Directory, position: str, believed_since: float
    ) -> Segment | None:
        """As `segment_behind`, if it is there already."""
        segment = directory.segment_behind(position)
        if segment is None or segment.doubtful or segment.expires <= believed_since:
            return None
        if segment.stop is not None:
            self._load_ahead(directory, segment.stop, believed_since)
        elif directory.walk is not None:
            self._walk_ahead(directory.walk, directory)
        return segment

    def _load_ahead(self, directory: Directory, stop: str, believed_since: float) -> None:
        """Have the page behind the one that is being read under way."""
        following = directory.segment_behind(stop)
        is_known = following is not None and following.expires > believed_since
        if self._nursery is None or is_known or stop in directory.loading:
            return
        directory.loading[stop] = trio.Event()
        self._nursery.start_soon(self._ahead, self._load, directory, stop)

    async def _ahead(self, load: Callable[..., Awaitable[object]], *args: object) -> None:
        """Fetch something that nobody waits for yet; if it fails, who wants it will ask again."""
        try:
            await load(*args)
        except StoreError as error:
            logger.info("a listing was not fetched ahead: %s", error)

    async def _walk_to(self, directory: Directory) -> bool:
        """Learn of a directory by the walk that leads to it; False if there is none."""
        parent = directory.prefix[: directory.prefix.rfind("/", 0, -1) + 1]
        if self._nursery is None or parent == directory.prefix:
            return False
        walk = self._walks.get(parent)
        if walk is None:
            walk = self._walks[parent] = Walk(parent)
            while len(self._walks) > MOST_WALKS:
                self._walks.popitem(last=False)
        self._walks.move_to_end(parent)
        walk.steps += 1
        if walk.steps < WALK_AFTER or not walk.pays:
            return False
        known = directory.additions
        if walk.loading is not None:
            await walk.loading.wait()
        else:
            await self._load_flat(walk, directory.prefix)
        return directory.additions != known

    def _walk_ahead(self, walk: Walk, directory: Directory) -> None:
        """Have the next flat page of a walk under way once its last one is being read."""
        directory.walk = None
        if self._nursery is not None and walk.next is not None and walk.loading is None:
            start, walk.next = walk.next, None
            walk.loading = trio.Event()
            self._nursery.start_soon(self._ahead, self._load_flat, walk, start)

    async def _load_flat(self, walk: Walk, first: str) -> None:
        """Fill the directories from `first` on, as many as one page of their parent tells of."""
        if walk.loading is None:
            walk.loading = trio.Event()
        event = walk.loading
        try:
            fetched = time.monotonic()
            # "." is the character before "/": all that `first` holds comes behind.
            start_after = first[:-1] + "." + LAST_CHARACTER
            page = await self._store.list_page(walk.prefix, delimiter="", start_after=start_after)
            pages = grouped(walk.prefix, page)
            for prefix, part in pages.items():
                segment = self.segment_of(prefix, "", part, {})
                segment.fetched = fetched
                segment.expires = fetched + self.ttl_s
                directory = self.get(prefix)
                self.add(directory, segment)
                directory.walk = walk
            walk.next = cut_off(walk.prefix, page)
            # A folder that needs more than a page by itself is better listed alone.
            walk.pays = bool(pages)
        finally:
            walk.loading = None
            event.set()

    def correct(self, directory: Directory, name: str, info: ObjectInfo | None) -> None:
        """A newer answer than the listing's: what a HEAD told about one file."""
        segment = self._holding(directory, names.position(name))
        if segment is None:
            return
        directory.generation += 1
        if info is not None and name in segment.entries:
            segment.entries[name] = info
        else:
            # Whether something else is there now, only a listing can tell.
            segment.expires = 0.0

    def _holding(self, directory: Directory, position: str) -> Segment | None:
        index = bisect_right(directory.segments, position, key=lambda segment: segment.start) - 1
        # A segment that starts exactly at the position does not hold it.
        while index >= 0 and directory.segments[index].start == position:
            index -= 1
        if index >= 0 and directory.segments[index].holds(position):
            return directory.segments[index]
        return None

    async def _load_around(self, directory: Directory, name: str) -> None:
        """Load the page that starts at a name, or wait for one that may hold it."""
        start = _just_before(name)
        under_way = [other for other in directory.loading if other <= start]
        if under_way:
            await directory.loading[max(under_way)].wait()
        else:
            await self._load(directory, start)

    async def _load(
        self, directory: Directory, start: str, *, resolve_doubts: bool = False
    ) -> Segment:
        event = directory.loading.setdefault(start, trio.Event())
        try:
            segment = await self._fetch(directory, start)
            if resolve_doubts and segment.doubtful:
                await self._settle_doubts(directory, segment)
            return segment
        finally:
            if directory.loading.get(start) is event:
                del directory.loading[start]
            event.set()

    async def _fetch(self, directory: Directory, start: str) -> Segment:
        """Get a page from memory or from the bucket and make a segment of it."""
        start_after = _start_after(directory.prefix, start)
        fetched = time.monotonic()
        remembered = (
            await self._memory.load(directory.prefix, start_after) if self._memory else None
        )
        if remembered is not None and remembered[1] < self.ttl_s:
            page = remembered[0]
            fetched -= remembered[1]
        else:
            page = await self._store.list_page(directory.prefix, start_after=start_after)
            if self._memory is not None:
                self._memory.save(directory.prefix, start_after, page)
        return self._absorb(directory, start, page, fetched)

    def _absorb(self, directory: Directory, start: str, page: ListPage, fetched: float) -> Segment:
        """Make a segment of a page and put it in its place."""
        previous = self._ending_at(directory, start)
        carried = previous.pending if previous is not None else None
        segment = self.segment_of(directory.prefix, start, page, carried or {})
        if carried is None and start:
            may_be_carried = _sorting_behind(start)
            segment.doubtful = {
                name for name in may_be_carried if segment.holds(names.position(name))
            } - segment.entries.keys()
        segment.fetched = fetched
        segment.expires = segment.fetched + self.ttl_s
        self.add(directory, segment)
        return segment

    def add(self, directory: Directory, segment: Segment) -> None:
        before = {id(old): old for old in directory.segments}
        for old in directory.add(segment):
            del self._by_age[id(old)]
            self._entries -= len(old.entries)
        for new in directory.segments:
            if id(new) not in before:
                self._by_age[id(new)] = (directory, new)
                self._entries += len(new.entries)
        while self._entries > MAX_ENTRIES and len(self._by_age) > 1:
            _, (owner, oldest) = self._by_age.popitem(last=False)
            owner.segments.remove(oldest)
            owner.generation += 1
            self._entries -= len(oldest.entries)

    def segment_of(
        self, prefix: str, start: str, page: ListPage, carried: dict[str, ObjectInfo]
    ) -> Segment:
        """What a page, and the files carried over from the one before, tell of a directory."""
        cut = len(prefix)
        stop = page.last[cut:] if page.next_token is not None else None
        entries: dict[str, Entry] = dict(carried)
        for info in page.objects:
            name = info.key[cut:]
            if names.is_expressible(name):
                entries[name] = info
            elif name:
                self.hidden.note(info.key, "no file name can express it")
        pending = {}
        if stop is not None:
            for name in [*_sorting_behind(stop), stop]:
                info_or_none = entries.pop(name, None)
                if info_or_none is not None:
                    pending[name] = info_or_none
        for key in page.prefixes:
            name = key[cut:-1]
            if not names.is_expressible(name):
                self.hidden.note(key, "no file name can express it")
            elif names.position(name) > start:
                hidden = entries.get(name)
                if hidden is not None:
                    self.hidden.note(hidden.key, "it is also a directory")
                entries[name] = None
        segment = Segment(start, stop, entries)
        segment.pending = pending
        return segment

    def _ending_at(self, directory: Directory, start: str) -> Segment | None:
        for segment in directory.segments:
            if segment.stop == start:
                return segment
        return None

    async def _settle_doubts(self, directory: Directory, segment: Segment) -> None:
        """Ask for the names that a segment can't answer for."""
        for name in sorted(segment.doubtful):
            found, _ = await self._ask_by_name(directory, name)
            if isinstance(found, ObjectInfo):
                segment.entries[name] = found
        segment.ordered = sorted(segment.entries, key=names.position)
        segment.doubtful = set()

    async def _ask_by_name(self, directory: Directory, name: str) -> tuple[Entry | Absent, float]:
        """Ask for one name alone: as a directory and, if it is none, as a file."""
        expires = time.monotonic() + self.ttl_s
        key = directory.prefix + name
        inside = await self._store.list_page(key + "/", delimiter="", max_keys=1)
        if inside.objects:
            return None, expires
        try:
            return await self._store.head(key), expires
        except NotFoundError:
            return ABSENT, expires


def _just_before(name: str) -> str:
    """A position that lies before a name and behind nearly all that sorts before it."""
    last = ord(name[-1]) - 1
    if 0xD800 <= last <= 0xDFFF:  # surrogates are not characters
        last = 0xD7FF
    # Control characters do not travel well in a request.
    return name[:-1] + chr(last) + LAST_CHARACTER if last > 0x20 else name[:-1]


def _start_after(prefix: str, start: str) -> str:
    """The key behind which to list for what comes behind a position."""
    if not start:
        return ""
    # Behind a directory means behind everything in it.
    return prefix + start + (LAST_CHARACTER if start.endswith("/") else "")


def _sorting_behind(key: str) -> list[str]:
    """The names of files that sort before a key, and whose position lies behind it."""
    return [key[:length] for length in range(1, len(key)) if key[length] < "/"]
