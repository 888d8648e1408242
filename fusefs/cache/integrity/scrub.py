"""Compares the files of a cache with their checksums in the background.

A small file is compared when it is first opened, but comparing a large file would
keep its reader waiting. So the scrub reads the large files once after each start,
and all files once a week, past the page cache.

To save processor time, the scrub rests after each part for several times as long
as the part took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio

from fusefs.cache.cached_file import CHECKED_AT_OPEN, CacheFile
from fusefs.cache.integrity.verify import Integrity

logger = logging.getLogger("fusefs.cache")

# The first reads after a start should not compete with the scrub.
START_AFTER_S = 30.0
EVERY_S = 7 * 86400.0
# The rest after each part, as a multiple of the time that the part took.
REST = 3.0


class Scrub:
    """The scrub of one cache; `pages(n)` yields files above n bytes. Belongs to the event loop."""

    def __init__(
        self, pages: Callable[[int], AsyncIterator[list[CacheFile]]], integrity: Integrity
    ) -> None:
        self._pages = pages
        self._integrity = integrity
        self._state = "waiting"
        self._done_files = self._done_bytes = 0
        self._ended: float | None = None

    def describe(self) -> dict[str, Any]:
        """The progress; `state` is waiting, under way or done, `ended` in epoch seconds or None."""
        return {
            "state": self._state,
            "done_files": self._done_files,
            "done_bytes": self._done_bytes,
            "ended": self._ended,
        }

    async def run(self) -> None:
        """Scrub after the start and then once a week, until cancelled."""
        await trio.sleep(START_AFTER_S)
        # A small file is compared when it is opened.
        await self.scrub(CHECKED_AT_OPEN, is_first=True)
        while True:
            await trio.sleep(EVERY_S)
            await self.scrub(0)

    async def scrub(self, larger_than: int, *, is_first: bool = False) -> None:
        """Compare files above `larger_than` bytes; if `is_first`, only files not compared yet."""
        self._done_files = self._done_bytes = 0
        self._state = "under way"
        async for files in self._pages(larger_than):
            for file in files:
                if not (is_first and file.is_checked):
                    await self._compare(file)
        self._state, self._ended = "done", time.time()
        if self._done_files:
            logger.info("compared %d cached files, %d bytes", self._done_files, self._done_bytes)

    async def _compare(self, file: CacheFile) -> None:
        size, is_whole = await self._integrity.examine(file, is_direct=True, rest=REST)
        self._done_files += 1
        self._done_bytes += size
        file.is_checked = file.is_checked or is_whole
