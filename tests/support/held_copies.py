"""A bucket in memory whose copies are other versions, and whose answers may be long in coming."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import trio

from fusefs.store.interface import ObjectInfo
from tests.support.memory_store import MemoryStore


class HeldCopies:
    """Has the copies of a store have ETags of their own, as those of objects in parts do.

    With `holds` a copy that has been made is answered once `answer` is set; then `is_made` is set.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._objects = store.objects
        self._copy = store.copy
        self._numbers = itertools.count(1)
        self.holds = True
        self.is_made = trio.Event()
        self.answer = trio.Event()
        store.copy = self.copy  # type: ignore[method-assign]

    async def copy(self, source: ObjectInfo, key: str, *write: Any) -> ObjectInfo:
        made = await self._copy(source, key, *write)
        made = replace(made, etag=f'"{next(self._numbers):032x}-2"')
        self._objects[key].info = made
        if self.holds:
            self.is_made.set()
            await self.answer.wait()
        return made
