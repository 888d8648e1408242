"""Walks: programs that go from folder to folder (`find`, a data loader's scan).

Listed one by one, each folder costs a request. Once a few folders of one
parent have been opened in a row, *flat* pages of that parent are listed
instead: keys without grouping, of which one page of a thousand fills many
small folders. The next page is fetched as soon as one of those is being read.
It begins right behind the last key: what a page tells of the folders that it
ends in is kept until the next one tells the rest, so no key is listed twice.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from fusefs.posix.directory.pending_changes import PendingChanges
from fusefs.posix.directory.segment import Segment
from fusefs.posix.nodes.names import parent_of, split_key
from fusefs.store.contract import Store
from fusefs.store.errors import AccessDeniedError, StoreError
from fusefs.store.interface import ListPage
from fusefs.telemetry.stalls import WaitCause, stage, unattended

logger = logging.getLogger("fusefs.directories")

# Folders opened in a row before a walk is taken for one.
WALK_AFTER = 2
MOST_WALKS = 64
# Names in folders that were begun: more than a page of them are not worth their memory.
MOST_BEGUN = 1000
# What two pages tell of a folder is put together if no more time than this lies between, and
# all of this mount's changes since the first are known by name (pending_changes.py).
MOST_APART_S = 60.0


# Called with the directories that a program is about to read, and what is in them.
Expect = Callable[[str, Segment], None]


@dataclass(frozen=True, slots=True)
class Start:
    """The place where a flat page is to begin: behind the key `after`.

    `begun` are the folders that the page before ended in, with what it had of
    them; `fetched` is when, in monotonic seconds.
    """

    after: str
    begun: dict[str, ListPage] = field(default_factory=dict)
    fetched: float = 0.0


@dataclass(slots=True, eq=False)
class Walk:
    """A program going through the folders of one directory, one after the other.

    `next` is where the next flat page begins, None at the end or while that
    page is `loading`.
    """

    prefix: str
    steps: int = 0
    pays: bool = True
    next: Start | None = None
    loading: trio.Event | None = None


class Walks:
    """The walks of late, below the mount's own prefix `top`.

    `fill(walk, prefix, page, fetched, has_own_key)` is called with each directory that a flat
    page tells all of, as a page of its own, and returns its segment; `has_own_key` if that would
    have its own key too.
    """

    def __init__(
        self,
        store: Store,
        nursery: trio.Nursery,
        local: PendingChanges,
        fill: Callable[..., Segment],
        top: str,
    ) -> None:
        self._store = store
        self._top = top
        self._nursery = nursery
        self._local = local
        self._fill = fill
        self._walks: OrderedDict[str, Walk] = OrderedDict()

    async def step(self, prefix: str, expect: Expect) -> None:
        """A directory of which nothing is known is to be read: fill it, if a walk leads there."""
        if len(prefix) <= len(self._top):
            return  # what is beside it may not be listed
        parent = parent_of(prefix)
        walk = self._walks.setdefault(parent, Walk(parent))
        self._walks.move_to_end(parent)
        if len(self._walks) > MOST_WALKS:
            self._walks.popitem(last=False)
        walk.steps += 1
        if walk.steps < WALK_AFTER or not walk.pays:
            return
        if walk.loading is not None:
            with stage(WaitCause.METADATA):
                await walk.loading.wait()
        else:
            # Behind its own key, which no name stands for, comes all that it holds.
            await self._load(walk, Start(prefix), expect)

    def go_on(self, walk: Walk, expect: Expect) -> None:
        """Have a walk's next flat page under way."""
        if walk.next is not None and walk.loading is None:
            start, walk.next = walk.next, None
            walk.loading = trio.Event()
            self._nursery.start_soon(run_ahead, self._load, walk, start, expect)

    async def _load(self, walk: Walk, start: Start, expect: Expect) -> None:
        """Fill the directories that a page from there on tells the rest of."""
        if walk.loading is None:
            walk.loading = trio.Event()
        event, walk.next = walk.loading, None
        try:
            with self._local.listing() as fetched:
                after = start.after
                page = await self._store.list_page(
                    walk.prefix, delimiter="", start_after=after, sorts=False
                )
                if not page.is_ordered:
                    walk.pays = False
                    return
                pages = _grouped(walk.prefix, page, start.begun)
                # The last folders of a page may go on with the next one.
                is_last = page.next_token is None
                cut = {} if is_last else pages
                begun = {one: cut[one] for one in cut if page.last.startswith(one)}
                for prefix, part in pages.items():
                    since = start.fetched if prefix in start.begun else fetched
                    is_apart = fetched - since > MOST_APART_S
                    is_known = not (is_apart or self._local.has_forgotten(prefix, since))
                    if is_known and prefix not in begun:
                        expect(prefix, self._fill(walk, prefix, part, since, prefix != after))
            # A folder that needs more than a page by itself is better listed alone.
            walk.pays = len(begun) < len(pages)
            count = sum(len(part.objects) + len(part.prefixes) for part in begun.values())
            if not is_last and walk.pays and count <= MOST_BEGUN:
                oldest = start.fetched if begun.keys() & start.begun.keys() else fetched
                walk.next = Start(page.last, begun, oldest)
        except AccessDeniedError as error:
            # A policy may allow to list each folder, and not all that is below their parent.
            logger.info("%s is not listed flat: %s", walk.prefix, error)
            walk.pays = False
        finally:
            walk.loading = None
            event.set()


async def run_ahead(load: Callable[..., Awaitable[object]], *args: object) -> None:
    """Fetch something that no request waits for yet; an error is left to the next request."""
    try:
        with unattended():
            await load(*args)
    except StoreError as error:
        logger.info("a listing was not fetched ahead: %s", error)


def _grouped(prefix: str, page: ListPage, begun: dict[str, ListPage]) -> dict[str, ListPage]:
    """The directories below `prefix` that a flat page shows; it goes on with those in `begun`."""
    pages = dict(begun)

    def page_of(folder: str) -> ListPage:
        found = pages.get(folder)
        if found is None:
            found = pages[folder] = ListPage([], [], None, "")
            above = parent_of(folder)
            if len(above) > len(prefix):
                page_of(above).prefixes.append(folder)
        return found

    for info in page.objects:
        folder, _ = split_key(info.key)
        if len(folder) > len(prefix):
            page_of(folder).objects.append(info)
    return pages
