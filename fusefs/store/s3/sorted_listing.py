"""Listings of stores without an order: a folder is listed whole and sorted here.

All readers of listings rely on S3's order, that of the keys' bytes: a page continues after the last
key of the page before. Some stores have no order (Storj), SeaweedFS sorts by path segments, and
some stores ignore the key to start after. A folder with an unordered page is listed to its end by
continuation tokens, into a temporary SQLite database, which keeps a few MiB in memory and the rest
in an unnamed file. Pages are read from the database for `KEPT_S` seconds; `listed_at` is the time
of the listing.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

import trio

from fusefs.store.errors import StoreError, UnsupportedError
from fusefs.store.interface import ListPage, ObjectInfo

logger = logging.getLogger("fusefs.store")

# Seconds for which a listing's later pages are read from the database.
KEPT_S = 60.0
MOST_KEPT = 4
_MEMORY_KIB = 2048
# Most folders remembered as unordered; a forgotten folder costs one page more.
MOST_NOTED = 4096
_LAST = "\U0010ffff"

# A function that lists a page of a prefix, with a delimiter, from a continuation token ("": first).
Fetch = Callable[[str, str, str], Awaitable[ListPage]]


def is_in_order(page: ListPage, delimiter: str, start_after: str) -> bool:
    """True if a page is sorted and begins after `start_after`: the listing can continue after it.

    Without a delimiter the order of path segments is enough: a folder's keys are contiguous.
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
    """One folder's entries, sorted. `listed_at` is the listing's start, in monotonic seconds."""

    def __init__(self) -> None:
        self.listed_at = time.monotonic()
        self._unnamed = 0
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{_MEMORY_KIB};"
            "CREATE TABLE entries (key TEXT PRIMARY KEY, size INTEGER, etag TEXT,"
            " mtime_ns INTEGER, storage_class TEXT) WITHOUT ROWID;"
        )

    def add(self, page: ListPage) -> bool:
        """Add a page; return False if it has no new entries. Blocks."""
        rows: list[tuple[object, ...]] = [(prefix, *[None] * 4) for prefix in page.prefixes]
        rows += [(o.key, o.size, o.etag, o.mtime_ns, o.storage_class) for o in page.objects]
        before = self._database.total_changes
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        self._database.execute("COMMIT")
        self._unnamed += page.unnamed
        return self._database.total_changes > before

    def page(self, prefix: str, start_after: str, most: int) -> ListPage:
        """Return the first `most` entries after `start_after` that begin with `prefix`. Blocks."""
        rows = self._database.execute(
            "SELECT * FROM entries WHERE key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
            (start_after, prefix, prefix + _LAST, most + 1),
        ).fetchall()
        more = len(rows) > most
        del rows[most:]
        last = rows[-1][0] if rows else ""
        objects = [ObjectInfo(*row) for row in rows if row[1] is not None]
        prefixes = [row[0] for row in rows if row[1] is None]
        token = last if more else None
        return ListPage(objects, prefixes, token, last, self._unnamed, self.listed_at)


class SortedListings:
    """The folders of one bucket that its store lists without order. Belongs to the event loop."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        # By folder and delimiter, in the order of use: only the latest still have their listings.
        self._known: dict[tuple[str, str], _WholeListing | None] = {}
        self._lock = trio.Lock()
        # Number of complete listings of folders.
        self.count = 0

    def has(self, prefix: str, delimiter: str) -> bool:
        """True if the store is known to list the prefix's folder without order."""
        return (_folder(prefix), delimiter) in self._known

    async def page(self, prefix: str, delimiter: str, start_after: str, most: int) -> ListPage:
        """Return up to `most` sorted entries after `start_after` ("": list the folder anew).

        Raises:
            StoreError: the listing failed, or the local disk cannot hold it.
        """
        which = _folder(prefix), delimiter
        found = self._known.get(which)
        try:
            if not start_after or found is None or time.monotonic() > found.listed_at + KEPT_S:
                async with self._lock:  # one listing at a time: each takes memory
                    found = await self._listed_whole(*which)
            return await trio.to_thread.run_sync(found.page, prefix, start_after, most)
        except sqlite3.Error as error:
            raise StoreError(f"a listing can't be sorted on the local disk: {error}") from error

    async def _listed_whole(self, folder: str, delimiter: str) -> _WholeListing:
        if not self._known:
            logger.warning(
                "this store lists in no order: %r and other folders of more than a page are listed"
                " whole, and sorted here",
                folder,
            )
        self._remember((folder, delimiter), None)
        listing = _WholeListing()
        token: str | None = ""
        while token is not None:
            page = await self._fetch(folder, delimiter, token)
            is_new = await trio.to_thread.run_sync(listing.add, page)
            if page.next_token is not None and not is_new:
                raise UnsupportedError("this server's listings come to no end")
            token = page.next_token
        self.count += 1
        self._remember((folder, delimiter), listing)
        return listing

    def _remember(self, which: tuple[str, str], listing: _WholeListing | None) -> None:
        self._known.pop(which, None)
        self._known[which] = listing
        for other in list(self._known)[:-MOST_KEPT]:
            self._known[other] = None
        if len(self._known) > MOST_NOTED:
            del self._known[next(iter(self._known))]


def _folder(prefix: str) -> str:
    """Return the prefix up to its last slash."""
    return prefix[: prefix.rfind("/") + 1]
