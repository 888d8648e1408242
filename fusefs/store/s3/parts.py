"""Multipart uploads from begin to end: of files, of copies, of what another process began."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import trio

from fusefs.store.errors import StoreError
from fusefs.store.interface import Condition, ObjectInfo, ObjectVersion, PendingUpload, UploadState
from fusefs.store.s3 import head
from fusefs.store.s3.multipart import S3Upload

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients
    from fusefs.store.s3.store import S3Store

# S3 copies parts of up to 5 GiB; smaller ones are copied side by side.
COPY_PART = 128 << 20
ABORT_TIME_S = 5.0


async def put(
    store: S3Store,
    key: str,
    fd: int,
    size: int,
    metadata: Mapping[str, str],
    content_type: str | None,
    condition: Condition,
) -> ObjectInfo:
    """As `Store.put_file`, with a multipart upload."""
    async with _aborted_on_failure(await begin(store, key, metadata, content_type)) as upload:
        await upload.send(fd, upload.missing(size), size)
        return await upload.complete(size, condition)


async def copy(
    store: S3Store,
    source: ObjectVersion,
    key: str,
    kept: Mapping[str, Any],
    condition: Condition,
) -> ObjectInfo:
    """Copy what is too large for one copy; `kept` are boto3's parameters for what it has."""
    async with _aborted_on_failure(await _begin(store, key, COPY_PART, kept)) as upload:
        await upload.copy_all(source)
        return await upload.complete(source.size, condition)


@asynccontextmanager
async def _aborted_on_failure(upload: S3Upload) -> AsyncIterator[S3Upload]:
    try:
        yield upload
    except BaseException:
        with trio.move_on_after(ABORT_TIME_S, shield=True), suppress(StoreError):
            await upload.abort()
        raise


async def begin(
    store: S3Store, key: str, metadata: Mapping[str, str], content_type: str | None
) -> S3Upload:
    """As `Store.begin_upload`."""
    head.check(metadata, content_type)
    kept = head.headers(metadata, content_type)
    return await _begin(store, key, store.settings.part_size, kept)


async def _begin(store: S3Store, key: str, part_size: int, kept: Mapping[str, Any]) -> S3Upload:
    def work(clients: Clients) -> str:
        answer = clients.s3.create_multipart_upload(
            **clients.request, **kept, Key=key, ChecksumAlgorithm="CRC32"
        )
        upload_id: str = answer["UploadId"]
        return upload_id

    upload_id = await store.retried("BEGIN UPLOAD", key, work)
    return S3Upload(store, UploadState(key, upload_id, part_size, kept["Metadata"]))


async def resume(store: S3Store, state: UploadState) -> S3Upload:
    """As `Store.resume_upload`."""
    upload = S3Upload(store, state, is_resumed=True)
    await upload.look()
    return upload


async def pending(store: S3Store, prefix: str) -> list[PendingUpload]:
    """As `Store.list_uploads`."""
    found: list[PendingUpload] = []
    start: dict[str, str] = {}

    def work(clients: Clients) -> Any:
        return clients.s3.list_multipart_uploads(**clients.request, **start, Prefix=prefix)

    while True:
        answer = await store.retried("LIST UPLOADS", prefix, work)
        for upload in answer.get("Uploads", []):
            begun_ns = int(upload["Initiated"].timestamp()) * 1_000_000_000
            found.append(PendingUpload(upload["Key"], upload["UploadId"], begun_ns))
        if not answer.get("IsTruncated"):
            return found
        start = {
            "KeyMarker": answer["NextKeyMarker"],
            "UploadIdMarker": answer["NextUploadIdMarker"],
        }
