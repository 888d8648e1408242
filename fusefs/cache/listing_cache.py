"""Listings that the next daemon reuses: diskcache with JSON values.

Each LIST page is stored under its prefix and the key that it starts behind, for
the metadata TTL. A new daemon finds there what the old one knew and spares the
requests. Nothing depends on it: pages are written when there is time, dropped
when there is none, and diskcache removes the oldest when there are too many.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.telemetry.stalls import WaitCause, stage

if TYPE_CHECKING:
    import diskcache

logger = logging.getLogger("fusefs.cache")

SIZE_LIMIT = 256 << 20
# Pages on their way to the disk, of 0.5 MB each; more are not worth their memory.
QUEUE = 16
# For how long nothing is written to a new directory: to import diskcache and to make its database
# takes 50 ms, and programs wait for the first answers of a mount that is new. A queue that fills
# up meanwhile ends that.
OPEN_AFTER_S = 0.5
_DATABASE = "cache.db"  # as diskcache names it


class NoListingCache:
    """Stores no pages, for a writable mount: its own changes make earlier listings wrong."""

    async def load(self, prefix: str, start_after: str) -> tuple[ListPage, float] | None:
        return None

    def save(self, prefix: str, start_after: str, page: ListPage) -> None: ...

    async def run(self) -> None: ...

    def close(self) -> None: ...


class ListingCache:
    """The stored pages of one bucket, in a directory that other mounts may share.

    `identity` tells buckets apart; `ttl_s` is for how many seconds a page is used.
    """

    def __init__(self, directory: Path, identity: str, ttl_s: float) -> None:
        """Open the directory, unless it is new: then when there is a page to be stored. Blocks."""
        self._identity = identity
        self._ttl_s = ttl_s
        self._directory = directory
        self._cache: diskcache.Cache | None = None
        # The keys that an earlier daemon left: nothing else is ever read.
        self._left: set[str] = set()
        if (directory / _DATABASE).exists():
            try:
                self._open()
            except OSError:
                raise
            except Exception as error:  # a damaged key is whatever its bytes are taken for
                logger.info("the remembered listings are damaged, forgetting them: %r", error)
                shutil.rmtree(directory)
        self._is_filling = trio.Event()
        self._thread = trio.CapacityLimiter(1)
        self._send, self._receive = trio.open_memory_channel[tuple[str, ListPage, float]](QUEUE)

    def _open(self) -> diskcache.Cache:
        import diskcache  # a writable mount never needs it

        cache = diskcache.Cache(
            self._directory,
            disk=diskcache.JSONDisk,
            disk_compress_level=1,
            size_limit=SIZE_LIMIT,
            sqlite_mmap_size=0,  # 64 MiB of the daemon's memory otherwise
        )
        own = self._identity + "\0"
        self._left = {key for key in cache.iterkeys() if key.startswith(own)}
        self._cache = cache
        return cache

    async def load(self, prefix: str, start_after: str) -> tuple[ListPage, float] | None:
        """A page that an earlier daemon stored, and its age in seconds; each page once."""
        key = self._key(prefix, start_after)
        if key not in self._left or self._cache is None:
            return None
        self._left.discard(key)
        try:
            with stage(WaitCause.CACHE_DISK):
                value = await trio.to_thread.run_sync(self._cache.get, key, limiter=self._thread)
            if value is None:
                return None
            page, age_s = _parse(value, key)
            if age_s < 0 and not math.isinf(self._ttl_s):
                return None  # the clock was set back since: how old it is, is not known
            return page, max(0.0, age_s)
        except Exception as error:  # a damaged row may hold a pickle of anything
            logger.info("a remembered listing can't be read: %s", error)
            return None

    def save(self, prefix: str, start_after: str, page: ListPage) -> None:
        """Queue a page to be stored; it is dropped if the queue is full."""
        try:
            self._send.send_nowait((self._key(prefix, start_after), page, time.time()))
            if self._receive.statistics().current_buffer_used >= QUEUE // 2:
                self._is_filling.set()
        except trio.WouldBlock:
            logger.debug("too many listings at once, one is not stored")

    async def run(self) -> None:
        """Write queued pages, until cancelled."""
        if self._cache is None:
            with trio.move_on_after(OPEN_AFTER_S):
                await self._is_filling.wait()
        async for key, page, fetched_at in self._receive:
            try:
                await trio.to_thread.run_sync(
                    self._write, key, page, fetched_at, limiter=self._thread
                )
            except Exception as error:  # diskcache has errors of its own beside the database's
                logger.info("a listing can't be remembered: %r", error)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _key(self, prefix: str, start_after: str) -> str:
        return f"{self._identity}\0{prefix}\0{start_after}"

    def _write(self, key: str, page: ListPage, fetched_at: float) -> None:
        expire = None if math.isinf(self._ttl_s) else self._ttl_s
        cache = self._open() if self._cache is None else self._cache
        cache.set(key, {"key": key} | _plain(page, fetched_at), expire=expire)


def _plain(page: ListPage, fetched_at: float) -> dict[str, Any]:
    """A page as JSON can hold it; `fetched_at` is in seconds since the epoch."""
    return {
        "fetched_at": fetched_at,
        "objects": [
            [info.key, info.size, info.etag, info.mtime_ns, info.storage_class]
            for info in page.objects
        ],
        "prefixes": page.prefixes,
        "is_last": page.next_token is None,
        "last": page.last,
    }


def _parse(value: dict[str, Any], key: str) -> tuple[ListPage, float]:
    # The value has a checksum (zlib's), the key under which it was found has none.
    if value["key"] != key:
        raise ValueError("it belongs to another directory")
    objects = [ObjectInfo(*fields) for fields in value["objects"]]
    token = None if value["is_last"] else ""
    page = ListPage(objects, value["prefixes"], token, value["last"])
    return page, time.time() - value["fetched_at"]
