"""Walks: programs that go from folder to folder (`find`, a data loader's scan).

Listed one by one, each folder costs a request. Once a few folders of one
parent have been opened in a row, *flat* pages of that parent are listed
instead: keys without grouping, of which one page of a thousand fills many
small folders. The next page is fetched as soon as one of those is being read.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import trio

from fusefs.posix.segments import LAST_CHARACTER
from fusefs.store.base import ListPage, Store
from fusefs.store.errors import StoreError

logger = logging.getLogger("fusefs.directories")

# Folders opened in a row before a walk is believed to be one.
WALK_AFTER = 3
MOST_WALKS = 64


def _parent_of(prefix: str) -> str:
    return prefix[: prefix.rfind("/", 0, -1) + 1]


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


class Walks:
    """The walks of late.

    `fill(walk, prefix, page, fetched)` is told each directory that a flat page
    tells all of, as a page of its own.
    """

    def __init__(
        self,
        store: Store,
        nursery: trio.Nursery,
        fill: Callable[[Walk, str, ListPage, float], None],
    ) -> None:
        self._store = store
        self._nursery = nursery
        self._fill = fill
        self._walks: OrderedDict[str, Walk] = OrderedDict()

    async def step(self, prefix: str) -> None:
        """A directory of which nothing is known is to be read: fill it, if a walk leads there.

        Raises:
            StoreError: the bucket could not tell.
        """
        parent = _parent_of(prefix)
        if parent == prefix:
            return
        walk = self._walks.setdefault(parent, Walk(parent))
        self._walks.move_to_end(parent)
        if len(self._walks) > MOST_WALKS:
            self._walks.popitem(last=False)
        walk.steps += 1
        if walk.steps < WALK_AFTER or not walk.pays:
            return
        if walk.loading is not None:
            await walk.loading.wait()
        else:
            await self._load(walk, prefix)

    def go_on(self, walk: Walk) -> None:
        """Have a walk's next flat page under way."""
        if walk.next is not None and walk.loading is None:
            start, walk.next = walk.next, None
            walk.loading = trio.Event()
            self._nursery.start_soon(unasked, self._load, walk, start)

    async def _load(self, walk: Walk, first: str) -> None:
        """Fill the directories from `first` on, as many as one page of their parent tells of."""
        if walk.loading is None:
            walk.loading = trio.Event()
        event = walk.loading
        try:
            fetched = time.monotonic()
            # "." is the character before "/": all that `first` holds comes behind.
            start_after = first[:-1] + "." + LAST_CHARACTER
            page = await self._store.list_page(walk.prefix, delimiter="", start_after=start_after)
            pages = _grouped(walk.prefix, page)
            for prefix, part in pages.items():
                self._fill(walk, prefix, part, fetched)
            walk.next = _cut_off(walk.prefix, page)
            # A folder that needs more than a page by itself is better listed alone.
            walk.pays = bool(pages)
        finally:
            walk.loading = None
            event.set()


async def unasked(load: Callable[..., Awaitable[object]], *args: object) -> None:
    """Fetch something that nobody waits for yet; if it fails, who wants it will ask again."""
    try:
        await load(*args)
    except StoreError as error:
        logger.info("a listing was not fetched ahead: %s", error)


def _grouped(prefix: str, page: ListPage) -> dict[str, ListPage]:
    """The directories below `prefix` that a flat page tells all of, each as a page of its own."""
    pages: dict[str, ListPage] = {}

    def page_of(folder: str) -> ListPage:
        found = pages.get(folder)
        if found is None:
            found = pages[folder] = ListPage([], [], None, "")
            above = _parent_of(folder)
            if len(above) > len(prefix):
                page_of(above).prefixes.append(folder)
        return found

    for info in page.objects:
        folder = info.key[: info.key.rfind("/") + 1]
        if len(folder) > len(prefix):
            page_of(folder).objects.append(info)
    if page.next_token is None:
        return pages
    return {folder: found for folder, found in pages.items() if not page.last.startswith(folder)}


def _cut_off(prefix: str, page: ListPage) -> str | None:
    """The folder of `prefix` in which a flat page ends before its end."""
    if page.next_token is None:
        return None
    slash = page.last.find("/", len(prefix))
    return page.last[: slash + 1] if slash > 0 else None
