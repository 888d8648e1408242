"""A bucket in memory with uploads in parts, tokens and conditions: `MemoryStore` has none of them.

What an upload keeps and decides is the real one's; only its requests are answered here.
"""

from __future__ import annotations

import base64
import os
import time
import zlib
from types import SimpleNamespace
from typing import Any

from fusefs.store.errors import ConflictError, NotFoundError, StaleVersionError
from fusefs.store.interface import (
    PLAIN,
    Expect,
    ObjectInfo,
    ObjectVersion,
    Part,
    PendingUpload,
    Strict,
    UploadState,
    Write,
)
from fusefs.store.s3.conditions import Fence
from fusefs.store.s3.multipart import Upload
from tests.support.memory_store import MemoryStore

_REQUESTER: Any = SimpleNamespace(settings=SimpleNamespace(max_connections=4))


class MemoryFence(Fence):
    """As `Fence`, of an `UploadingStore`."""

    def __init__(self, store: UploadingStore) -> None:
        super().__init__(_REQUESTER)
        self._store = store

    async def find(self, key: str) -> ObjectInfo | None:
        try:
            return await self._store.head(key)
        except NotFoundError:
            return None


class UploadingStore(MemoryStore):
    """As `MemoryStore`; the first parts of an upload have `part_size` bytes."""

    def __init__(self, part_size: int) -> None:
        super().__init__()
        self.part_size = part_size
        self.fence = MemoryFence(self)
        # The parts of each upload that is under way, by its id.
        self.uploads: dict[str, dict[int, tuple[Part, bytes]]] = {}
        self._begun = 0

    def check(self, key: str, condition: Strict) -> None:
        """As a server does with the condition of a change.

        Raises:
            ConflictError: it does not hold.
        """
        etag = self.objects[key].info.etag if key in self.objects else None
        if condition is not None and etag != getattr(condition, "etag", None):
            raise ConflictError(key)

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        write = write.with_token(self.tokens)

        async def send(strict: Strict) -> ObjectInfo:
            async with self._request("PUT", key):
                self.check(key, strict)
                self.put(key, os.pread(fd, size, 0), **write.stamped())
            return self._info(key)

        if isinstance(write.condition, Expect):
            return await self.fence.over(key, write.condition, write.token, "PUT", send)
        return await send(write.condition)

    async def begin_upload(self, key: str, write: Write = PLAIN) -> MemoryUpload:
        async with self._request("BEGIN", key):
            self._begun += 1
            metadata = write.with_token(self.tokens).stamped()
            state = UploadState(key, str(self._begun), self.part_size, metadata)
            self.uploads[state.upload_id] = {}
        return MemoryUpload(self, state)

    async def resume_upload(self, state: UploadState) -> MemoryUpload:
        upload = MemoryUpload(self, state, is_resumed=True)
        await upload.discover()
        return upload

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        async with self._request("UPLOADS", prefix):
            return [PendingUpload(prefix, upload_id, time.time_ns()) for upload_id in self.uploads]

    async def abort_upload(self, key: str, upload_id: str) -> None:
        async with self._request("ABORT", key):
            self.uploads.pop(upload_id, None)


class MemoryUpload(Upload):
    """As `Upload`, with its requests answered by an `UploadingStore`."""

    def __init__(
        self, store: UploadingStore, state: UploadState, *, is_resumed: bool = False
    ) -> None:
        super().__init__(store.fence, state, is_resumed=is_resumed)
        self._store = store

    def _there(self) -> dict[int, tuple[Part, bytes]]:
        if self._state.upload_id not in self._store.uploads:
            raise NotFoundError(self._state.upload_id)
        return self._store.uploads[self._state.upload_id]

    def _keep(self, number: int, data: bytes) -> Part:
        checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        part = Part(number, len(data), f'"{number}"', checksum)
        self._there()[number] = part, data
        return part

    async def _copy_part(self, number: int, source: ObjectVersion, start: int, stop: int) -> None:
        async def copy() -> Part:
            async with self._store._request("PART COPY", source.key):
                found = self._store._get(source.key)
                if found.info.version != source:
                    raise StaleVersionError(source.key)
                return self._keep(number, found.data[start:stop])

        await self._obtain(number, copy, lambda: False)

    async def _send_part(self, fd: int, size: int, number: int) -> None:
        start, stop = self.part_range(number, size)

        async def send() -> Part:
            async with self._store._request("PART", self._state.key):
                return self._keep(number, os.pread(fd, stop - start, start))

        await self._obtain(number, send, lambda: self._fits(self._parts.get(number), size))

    async def _list_parts(self) -> list[Part]:
        async with self._store._request("PARTS", self._state.key):
            return [part for part, _ in self._there().values()]

    async def _complete(self, size: int, condition: Strict) -> ObjectInfo:
        if self._object is not None and self._object.size == size:
            return self._object
        key = self._state.key
        try:
            async with self._store._request("COMPLETE", key):
                parts = self._there()
                self._store.check(key, condition)
                data = b"".join(parts[n + 1][1] for n in range(self.part_count(size)))
                del self._store.uploads[self._state.upload_id]
                self._store.put(key, data, **self._state.metadata)
        except NotFoundError:
            self._object = await self._seen(size)
            if self._object is None:
                raise
            return self._object
        return await self._store.head(key)
