"""A store wrapper for writable mounts that treats waiting removals as done.

A change of a key waits until the key's removal (write/removals.py) is done, so that a late
removal can't delete a newer object. Listings hide the objects that wait to be deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fusefs.posix.write.removals import Removals
from fusefs.store.contract import Store
from fusefs.store.errors import StoreError
from fusefs.store.interface import (
    PLAIN,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    UploadState,
    Write,
)
from fusefs.store.s3.multipart import Upload


class StoreAfterRemovals:
    """A `Store` whose changes wait for removals of the same keys. Belongs to the event loop.

    A request that waits for a removal fails with the removal's error.
    """

    def __init__(self, store: Store, removals: Removals) -> None:
        self._store = store
        self._removals = removals
        self.tokens = store.tokens
        self.unanswered = store.unanswered
        # Requests about versions and multipart uploads need not wait for removals.
        self.download = store.download
        self.complete = store.complete
        self.abort_upload = store.abort_upload
        self.list_uploads = store.list_uploads
        self.hurry = store.hurry
        self.counters = store.counters

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
        sorts: bool = True,
    ) -> ListPage:
        """As `Store.list_page`; a page before the last may have fewer keys, or none."""
        leaving = self._removals.keys(prefix)
        page = await self._store.list_page(
            prefix,
            delimiter=delimiter,
            start_after=start_after,
            max_keys=max_keys,
            sorts=sorts,
        )
        leaving |= self._removals.keys(prefix)
        if not leaving:
            return page
        return replace(page, objects=[info for info in page.objects if info.key not in leaving])

    async def head(self, key: str) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.head(key)

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.put_file(key, fd, size, write)

    async def begin_upload(self, key: str, write: Write = PLAIN) -> Upload:
        """Call `Store.begin_upload` once the removals of `key` are finished."""
        await self._removals.flush_at(key)
        return await self._store.begin_upload(key, write)

    async def resume_upload(self, state: UploadState) -> Upload:
        await self._removals.flush_at(state.key)
        return await self._store.resume_upload(state)

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, write: Write = PLAIN
    ) -> ObjectInfo:
        await self._removals.flush_at(key)
        return await self._store.copy(source, key, write)

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        await self._removals.flush_at(key)
        await self._store.delete(key, etag, adopts=adopts)

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        wanted = list(keys)
        failures: list[DeleteFailure] = []
        for key in [key for key in wanted if key in self._removals]:
            try:
                await self._removals.flush_at(key)
            except (StoreError, OSError) as error:
                failures.append(DeleteFailure(key, error))
        failed = {failure.key for failure in failures}
        remaining = [key for key in wanted if key not in failed]
        return failures + await self._store.delete_many(remaining, etags)
