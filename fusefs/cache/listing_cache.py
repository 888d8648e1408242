"""Listings that the next daemon reuses, in the catalog of the cache.

Each LIST page is stored under its prefix and the key that it starts behind, for
the metadata TTL. A new daemon finds there what the old one knew and spares the
requests. Nothing depends on it: pages are written when there is time, dropped
when there is none, and the oldest are removed when there are too many.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from typing import Any

import trio

from fusefs.cache.catalog import Catalog
from fusefs.cache.catalog_writer import CatalogWriter
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.telemetry.stalls import WaitCause, stage

logger = logging.getLogger("fusefs.cache")

# Of all mounts that share the catalog; one of a thousand objects takes 50 KB.
MOST_PAGES = 5000
# Pages on their way to the disk, of 0.5 MB each; more are not worth their memory.
QUEUE = 16


class NoListingCache:
    """Stores no pages, for a writable mount: its own changes make earlier listings wrong."""

    async def load(self, prefix: str, start_after: str) -> tuple[ListPage, float] | None:
        return None

    def save(self, prefix: str, start_after: str, page: ListPage) -> None: ...

    async def run(self) -> None: ...


class ListingCache:
    """The stored pages of one bucket, in a catalog that other mounts may share.

    `identity` tells buckets apart; `ttl_s` is for how many seconds a page is used.
    """

    def __init__(
        self, catalog: Catalog, writer: CatalogWriter, identity: str, ttl_s: float
    ) -> None:
        """Blocks.

        Raises:
            sqlite3.Error: the catalog can't be read.
        """
        self._catalog = catalog
        self._in_catalog = writer.in_catalog
        self._identity = identity
        self._ttl_s = ttl_s
        with catalog.transaction() as db:
            oldest = time.time() - ttl_s
            db.execute("DELETE FROM pages WHERE identity = ? AND at < ?", (identity, oldest))
            found = db.execute("SELECT place FROM pages WHERE identity = ?", (identity,))
            # What an earlier daemon left: nothing else is ever read.
            self._left = {place for (place,) in found}
        self._send, self._receive = trio.open_memory_channel[tuple[str, ListPage, float]](QUEUE)

    async def load(self, prefix: str, start_after: str) -> tuple[ListPage, float] | None:
        """A page that an earlier daemon stored, and its age in seconds; each page once."""
        place = _place(prefix, start_after)
        if place not in self._left:
            return None
        self._left.discard(place)
        with stage(WaitCause.CACHE_DISK):
            packed = await self._in_catalog(self._read, place)
        try:
            page, age_s = _parse(packed, place)
        except (ValueError, TypeError, KeyError, zlib.error) as error:  # a damaged row
            logger.info("a remembered listing can't be read: %s", error)
            return None
        if age_s < 0 and not math.isinf(self._ttl_s):
            return None  # the clock was set back since: how old it is, is not known
        return page, max(0.0, age_s)

    def save(self, prefix: str, start_after: str, page: ListPage) -> None:
        """Queue a page to be stored; it is dropped if the queue is full."""
        try:
            self._send.send_nowait((_place(prefix, start_after), page, time.time()))
        except trio.WouldBlock:
            logger.debug("too many listings at once, one is not stored")

    async def run(self) -> None:
        """Write queued pages, until cancelled."""
        async for place, page, fetched_at in self._receive:
            await self._in_catalog(self._write, place, page, fetched_at)

    def _read(self, place: str) -> object:
        with self._catalog.reading() as db:
            row = db.execute(
                "SELECT page FROM pages WHERE identity = ? AND place = ?", (self._identity, place)
            ).fetchone()
        return row[0] if row is not None else None

    def _write(self, place: str, page: ListPage, fetched_at: float) -> None:
        row = self._identity, place, fetched_at, _packed(page, place, fetched_at)
        with self._catalog.transaction() as db:
            # In place of an older one, and as the latest of all.
            db.execute(
                "INSERT OR REPLACE INTO pages (identity, place, at, page) VALUES (?, ?, ?, ?)", row
            )
            db.execute(
                "DELETE FROM pages WHERE number <= (SELECT max(number) FROM pages) - ?",
                (MOST_PAGES,),
            )


def _place(prefix: str, start_after: str) -> str:
    return f"{prefix}\0{start_after}"


def _packed(page: ListPage, place: str, fetched_at: float) -> bytes:
    """A page as JSON, compressed; `fetched_at` is in seconds since the epoch."""
    plain = {
        "place": place,
        "fetched_at": fetched_at,
        "objects": [
            [info.key, info.size, info.etag, info.mtime_ns, info.storage_class]
            for info in page.objects
        ],
        "prefixes": page.prefixes,
        "is_last": page.next_token is None,
        "last": page.last,
    }
    return zlib.compress(json.dumps(plain).encode(), 1)


def _parse(packed: Any, place: str) -> tuple[ListPage, float]:
    # The value has a checksum (zlib's), the place under which it was found has none.
    value = json.loads(zlib.decompress(packed))
    if value["place"] != place:
        raise ValueError("it belongs to another directory")
    objects = [ObjectInfo(*fields) for fields in value["objects"]]
    token = None if value["is_last"] else ""
    page = ListPage(objects, value["prefixes"], token, value["last"])
    return page, time.time() - value["fetched_at"]
