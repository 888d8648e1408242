"""Walks: programs that go from folder to folder (`find`, a data loader's scan).

Listed one by one, each folder costs a request. Once a few folders of one parent have been opened in
a row, *flat* pages of that parent are listed instead: keys without grouping, so that one page of a
thousand keys fills many small folders. The next page is fetched as soon as one of these folders is
read. It begins right behind the last key: the keys of a folder that the page does not complete are
kept until the next page, so no key is listed twice.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from fusefs.posix.directory.pending_changes import PendingChanges
from fusefs.posix.nodes.names import parent_of, split_key
from fusefs.store.contract import Store
from fusefs.store.errors import AccessDeniedError, StoreError
from fusefs.store.interface import ListPage
from fusefs.telemetry.stalls import WaitCause, stage, unattended

logger = logging.getLogger("fusefs.directories")

# A program that opens this many folders of a parent in a row is taken to walk through it.
WALK_AFTER = 2
MOST_WALKS = 64
# The most names kept of incomplete folders, as many as a page has.
MOST_BEGUN = 1000
# Two pages are merged for a folder if at most this time lies between them, and all of this
# mount's changes since the first page are known by name (pending_changes.py).
MOST_APART_S = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """The place where a flat page begins: behind the key `after`.

    `begun` has the entries of the folders that the last page did not complete; that
    page was requested at `fetched`, in monotonic seconds.
    """

    after: str
    begun: dict[str, ListPage] = field(default_factory=dict)
    fetched: float = 0.0


@dataclass(slots=True, eq=False)
class Walk:
    """A walk of a program through the folders of one directory.

    `next` is the start of the next flat page, None at the end or while that page is
    `loading`. `pays` is False once flat pages have failed, or saved no requests.
    """

    prefix: str
    steps: int = 0
    pays: bool = True
    next: Start | None = None
    loading: trio.Event | None = None


class Walks:
    """Recognises programs that go from folder to folder below `top`, and lists folders ahead.

    `fill(walk, prefix, page, fetched, has_own_key)` takes the listing of one whole folder;
    `has_own_key`: the listing includes the folder's marker, if there is one.
    """

    def __init__(
        self,
        store: Store,
        nursery: trio.Nursery,
        local: PendingChanges,
        fill: Callable[[Walk, str, ListPage, float, bool], None],
        top: str,
    ) -> None:
        self._store = store
        self._top = top
        self._nursery = nursery
        self._local = local
        self._fill = fill
        self._walks: OrderedDict[str, Walk] = OrderedDict()

    async def step(self, prefix: str) -> None:
        """Note the read of an uncached directory; in a walk, return after a flat page is loaded."""
        if len(prefix) <= len(self._top):
            return  # the mount may not be allowed to list keys outside its prefix
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
            # All keys in the directory come behind its own key, which stands for no name.
            await self._load(walk, Start(prefix))

    def go_on(self, walk: Walk) -> None:
        """Start to load a walk's next flat page, unless that is under way."""
        if walk.next is not None and walk.loading is None:
            start, walk.next = walk.next, None
            walk.loading = trio.Event()
            self._nursery.start_soon(run_ahead, self._load, walk, start)

    async def _load(self, walk: Walk, start: Start) -> None:
        """Load a flat page from `start` on, and cache the listings that the page completes."""
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
                # The next page may have more entries of the folders that contain the last key.
                is_last = page.next_token is None
                cut = {} if is_last else pages
                begun = {one: cut[one] for one in cut if page.last.startswith(one)}
                for prefix, part in pages.items():
                    since = start.fetched if prefix in start.begun else fetched
                    is_apart = fetched - since > MOST_APART_S
                    is_known = not (is_apart or self._local.has_forgotten(prefix, since))
                    if is_known and prefix not in begun:
                        self._fill(walk, prefix, part, since, prefix != after)
            # A folder larger than a page is better listed alone.
            walk.pays = len(begun) < len(pages)
            count = sum(len(part.objects) + len(part.prefixes) for part in begun.values())
            if not is_last and walk.pays and count <= MOST_BEGUN:
                oldest = start.fetched if begun.keys() & start.begun.keys() else fetched
                walk.next = Start(page.last, begun, oldest)
        except AccessDeniedError as error:
            # A policy may allow listing each folder with a delimiter, but not flat listings.
            logger.info("%s is not listed flat: %s", walk.prefix, error)
            walk.pays = False
        finally:
            walk.loading = None
            event.set()


async def run_ahead(load: Callable[..., Awaitable[object]], *args: object) -> None:
    """Load a listing that no request waits for; a StoreError is only logged."""
    try:
        with unattended():
            await load(*args)
    except StoreError as error:
        logger.info("a listing was not fetched ahead: %s", error)


def _grouped(prefix: str, page: ListPage, begun: dict[str, ListPage]) -> dict[str, ListPage]:
    """Split a flat page into one page for each folder, added to the parts in `begun`."""
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
