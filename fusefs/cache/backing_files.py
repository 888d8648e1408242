"""The cache files that the kernel reads by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import trio

from fusefs.cache.cached_file import CacheFile


class BackingFiles(Protocol):
    """The files that the kernel reads by itself; see fuse/passthrough.py."""

    @property
    def is_on(self) -> bool: ...

    @property
    def ids(self) -> OrderedDict[CacheFile, int]:
        """The registered files, least recently used first: always the same dict."""

    def find(self, file: CacheFile) -> int:
        """The id under which a file is registered, or 0."""

    async def register(self, file: CacheFile) -> int:
        """Register a pinned file whose descriptor is open; 0 if the kernel refuses."""

    def drop(self, file: CacheFile) -> trio.Event | None:
        """Give the id of a file back that no program has open; set when the kernel has it."""

    def register_ahead(self, file: CacheFile, done: Callable[[], None]) -> None:
        """The same without a wait, before anything opens it; `done` is called when it is over."""
