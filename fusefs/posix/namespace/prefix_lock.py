"""Changes of names that are under way, and directories that are just getting another name.

A change reads the prefix that it works below and then waits for the bucket.
If that prefix became another meanwhile, the change would land where no program
looks for it. So the moment in which a directory's nodes get their new keys
waits for the changes below it, and new ones wait for that moment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from fusefs.posix.nodes.inode_table import Inode


class PrefixLock:
    """One mount's locks; `key` tells a directory's prefix. Belongs to the event loop."""

    def __init__(self, key: Callable[[Inode], str]) -> None:
        self._key = key
        self._under_way: list[tuple[str, ...]] = []
        self._closed: list[tuple[str, ...]] = []
        self._changed = trio.Event()

    def is_open(self, directory: Inode) -> bool:
        """Whether `change` of a directory would not have to wait."""
        prefixes = (self._key(directory),)
        return not any(_is_below(prefixes, closed) for closed in self._closed)

    @asynccontextmanager
    async def change(self, *directories: Inode) -> AsyncIterator[None]:
        """Change something in these directories; their keys stay as they are meanwhile."""
        while True:
            prefixes = tuple(self._key(directory) for directory in directories)
            if not any(_is_below(prefixes, closed) for closed in self._closed):
                break
            await self._changed.wait()
        self._under_way.append(prefixes)
        try:
            yield
        finally:
            self._under_way.remove(prefixes)
            self._notify()

    @asynccontextmanager
    async def closed(self, *prefixes: str) -> AsyncIterator[None]:
        """Let nothing below these prefixes change; waits for what is under way."""
        self._closed.append(prefixes)
        try:
            while any(_is_below(changed, prefixes) for changed in self._under_way):
                await self._changed.wait()
            yield
        finally:
            self._closed.remove(prefixes)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _is_below(prefixes: tuple[str, ...], closed: tuple[str, ...]) -> bool:
    return any(prefix.startswith(closed) for prefix in prefixes)
