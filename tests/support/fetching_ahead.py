"""What the tests of fetching ahead have in common: listings, and a bucket that waits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from fusefs.store.interface import ObjectInfo
from tests.support.local_cache import Parts, cache_in


class OneFolder:
    """A listing of one folder."""

    def __init__(self, files: list[ObjectInfo]) -> None:
        self._files = files

    def files(self, _prefix: str, behind: str) -> Iterator[ObjectInfo]:
        yield from (info for info in self._files if info.key > behind)
        yield from (info for info in self._files if info.key <= behind)

    def next_folder(self, _prefix: str) -> str | None:
        return None


@asynccontextmanager
async def held(tmp_path: Path) -> AsyncIterator[Parts]:
    """A cache whose bucket does not answer until `let_go`."""
    async with cache_in(tmp_path) as parts:
        parts.bucket.hold()
        yield parts
        parts.bucket.let_go()
        await parts.quiet()


def requested_keys(parts: Parts) -> set[str]:
    return {key for key, _, _ in parts.bucket.requested}
