"""Files that were fetched ahead of their first open, and stay open for it for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from fusefs.cache.cached_file import CacheFile

LINGER_S = 10.0
MOST_LINGERING = 512


class Lingering:
    """The files of one cache that are pinned for nobody yet; `pin` and `unpin` are the cache's."""

    def __init__(
        self, pin: Callable[[CacheFile], None], unpin: Callable[[CacheFile], None]
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._until: dict[CacheFile, float] = {}  # in monotonic seconds, who is longest here first

    def keep(self, file: CacheFile) -> None:
        """Keep a pinned file open for a while longer."""
        if file not in self._until:
            self._pin(file)
            self._until[file] = time.monotonic() + LINGER_S
            if len(self._until) > MOST_LINGERING:
                self._let_go(1)

    def tend(self) -> None:
        """Close those that nobody came for."""
        now = time.monotonic()
        self._let_go(sum(until <= now for until in self._until.values()))

    def end(self) -> None:
        """Close all."""
        self._let_go(len(self._until))

    def _let_go(self, count: int) -> None:
        for file in list(islice(self._until, count)):
            del self._until[file]
            self._unpin(file)
