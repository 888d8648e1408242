"""Listings that come in no order, listed whole and sorted here.

All that reads listings relies on S3's order, that of the keys' bytes: a page goes on behind
the last key of the one before. Some stores have no order (Storj, S3's directory buckets),
SeaweedFS has that of path segments, and some know no key to start after. So a page that
others follow, or that should follow another, is looked at. If it is in no order, its folder
is listed to its end by continuation tokens, into a temporary SQLite database, which holds a
few MiB in memory and the rest in a file without a name. Pages are read from there for a
while; they tell when they were listed.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import pairwise

import trio

from fusefs.store.errors import StoreError, UnsupportedError
from fusefs.store.interface import ListPage, ObjectInfo

logger = logging.getLogger("fusefs.store")

# For so long, in seconds, a listing's later pages are read from what was listed whole.
KEPT_S = 60.0
MOST_KEPT = 4
_MEMORY_KIB = 2048
# Folders that are known to be in no order; another one takes a page more.
MOST_NOTED = 4096
_LAST = "\U0010ffff"

# Lists one page of a prefix, with a delimiter, from a continuation token on ("": the first).
Fetch = Callable[[str, str, str], Awaitable[ListPage]]


def is_in_order(page: ListPage, delimiter: str, start_after: str) -> bool:
    """True if a listing can go on behind this page's last key, and went on behind `start_after`.

    Without a delimiter the order of path segments is as good: a folder's keys follow each other.
    """
    if page.next_token is None and not start_after:
        return True
    return all(
        _ascend(names) or (not delimiter and _ascend([name.replace("/", "\0") for name in names]))
        for keys in ([info.key for info in page.objects], page.prefixes)
        for names in [[start_after, *keys]]
    )


def _ascend(names: list[str]) -> bool:
    return all(one < other for one, other in pairwise(names))


class _WholeListing:
    """One folder's entries, sorted. `listed_at` is when it was begun, in monotonic seconds."""

    def __init__(self) -> None:
        self.listed_at = time.monotonic()
        self._unnamed = 0
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(f"PRAGMA cache_size = -{_MEMORY_KIB}")
        self._database.execute(
            "CREATE TABLE entries (key TEXT PRIMARY KEY, size INTEGER, etag TEXT,"
            " mtime_ns INTEGER, storage_class TEXT) WITHOUT ROWID"
        )

    def add(self, page: ListPage) -> bool:
        """Take a page in; False if it has nothing new. Blocks."""
        rows: list[tuple[object, ...]] = [
            (info.key, info.size, info.etag, info.mtime_ns, info.storage_class)
            for info in page.objects
        ]
        rows += [(prefix, None, None, None, None) for prefix in page.prefixes]
        self._database.execute("BEGIN")
        before = self._database.total_changes
        self._database.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        self._database.execute("COMMIT")
        self._unnamed += page.unnamed
        return self._database.total_changes > before

    def page(self, prefix: str, start_after: str, most: int) -> ListPage:
        """As `Store.list_page`. Blocks."""
        rows = self._database.execute(
            "SELECT * FROM entries WHERE key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
            (start_after, prefix, prefix + _LAST, most + 1),
        ).fetchall()
        more = len(rows) > most
        del rows[most:]
        return ListPage(
            [ObjectInfo(*row) for row in rows if row[1] is not None],
            [row[0] for row in rows if row[1] is None],
            rows[-1][0] if more else None,
            rows[-1][0] if rows else "",
            self._unnamed,
            self.listed_at,
        )


class SortedListings:
    """The folders of one bucket that its store lists in no order. Belongs to the event loop."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._kept: OrderedDict[tuple[str, str], _WholeListing] = OrderedDict()
        self._noted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = trio.Lock()
        # How many folders were listed whole, each time counted.
        self.count = 0

    def has(self, prefix: str, delimiter: str) -> bool:
        """True if a folder is known to be listed in no order."""
        return (_folder(prefix), delimiter) in self._noted

    async def page(self, prefix: str, delimiter: str, start_after: str, most: int) -> ListPage:
        """As `Store.list_page`; the first page is always new.

        Raises:
            StoreError: the bucket could not tell, or the local disk does not take the listing.
        """
        which = _folder(prefix), delimiter
        found = self._kept.get(which)
        if not start_after or found is None or time.monotonic() > found.listed_at + KEPT_S:
            found = await self._list(*which)
        try:
            return await trio.to_thread.run_sync(found.page, prefix, start_after, most)
        except sqlite3.Error as error:
            raise StoreError(f"a sorted listing can't be read: {error}") from error

    async def _list(self, folder: str, delimiter: str) -> _WholeListing:
        if not self._noted:
            logger.warning(
                "this store lists in no order: %r and other folders of more than a page are listed"
                " whole, and sorted here",
                folder,
            )
        self._noted[folder, delimiter] = None
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)
        try:
            async with self._lock:  # one after the other: each takes memory
                listing = await self._listed_whole(folder, delimiter)
        except sqlite3.Error as error:
            raise StoreError(f"a listing can't be sorted on the local disk: {error}") from error
        self.count += 1
        self._kept.pop((folder, delimiter), None)
        self._kept[folder, delimiter] = listing
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return listing

    async def _listed_whole(self, folder: str, delimiter: str) -> _WholeListing:
        listing = _WholeListing()
        token: str | None = ""
        while token is not None:
            page = await self._fetch(folder, delimiter, token)
            is_new = await trio.to_thread.run_sync(listing.add, page)
            if page.next_token is not None and not is_new:
                raise UnsupportedError("this server's listings come to no end")
            token = page.next_token
        return listing


def _folder(prefix: str) -> str:
    """The prefix to list for another one: directory buckets list folders' prefixes alone."""
    return prefix[: prefix.rfind("/") + 1]
