"""Copies on the server: of small objects in one request, of large ones in parts.

A rename of a directory copies each of its objects, so a listing's description of the source is
trusted. A HEAD comes first only if the copy gets other metadata (S3 then drops the other headers),
or if the copy is made in parts.

A copy whose answer was lost may have taken effect. Repeating it does no harm, except if source and
target are the same, or if the key had to be free: then the object there shows if this copy made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlencode

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import ConflictError, ExistsError, NotFoundError, StaleVersionError
from fusefs.store.fencing import has_room, without_token
from fusefs.store.interface import (
    IF_ABSENT,
    PLAIN,
    UNRECORDED,
    Expect,
    IfMatch,
    ObjectInfo,
    ObjectVersion,
    Strict,
    UploadLog,
    Write,
    writing,
)
from fusefs.store.s3 import documents, head, multipart
from fusefs.store.s3.address import Call
from fusefs.store.s3.conditions import Fence, condition_headers
from fusefs.store.s3.list import nanoseconds, text_of
from fusefs.store.s3.requester import Requester

OPERATION = "CopyObject"
# S3 copies up to 5 GiB at once, but takes its time, and not every store sends bytes meanwhile to
# prevent a time-out of the connection.
COPY_LIMIT = 256 << 20
LARGEST_COPY = 5 << 30
# Headers of HEAD that a copy with other metadata would lose.
_KEPT = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
    "x-amz-website-redirect-location",
)


async def copy(
    fence: Fence,
    source: ObjectInfo | ObjectVersion,
    key: str,
    write: Write = PLAIN,
    log: UploadLog = UNRECORDED,
) -> ObjectInfo:
    """Copy exactly `source` to `key` on the server (`Store.copy`); `log` records an upload."""
    write = write.with_token(fence.tokens)
    condition = write.condition
    if write.metadata is not None:
        head.check(write.metadata)
        write = write._replace(metadata=write.stamped())

    async def send(strict: Strict) -> ObjectInfo:
        try:
            return await _copy(fence, source, key, write, strict, log)
        except NotFoundError as error:
            # S3 does not say which of the two objects is missing.
            if strict not in (None, IF_ABSENT) and await fence.find(key) is None:
                raise ConflictError("the object to be replaced is gone") from error
            raise

    if isinstance(condition, Expect):
        return await fence.over(key, condition, write.token, OPERATION, send)
    # Not every store that honours conditions of PUT honours those of copies.
    if condition == IF_ABSENT and await fence.find(key) is not None:
        raise ExistsError(f"{key}: there is an object already")
    return await fence.send(OPERATION, condition, send)


async def _copy(
    fence: Fence,
    source: ObjectInfo | ObjectVersion,
    key: str,
    write: Write,
    condition: Strict,
    log: UploadLog,
) -> ObjectInfo:
    requester, metadata = fence.requester, write.metadata
    if write.is_own and isinstance(source, ObjectInfo):  # no headers but a content type
        kept = {} if source.content_type is None else {"content-type": source.content_type}
        copied = replace(source, metadata=metadata)
        return await _copy_whole(fence, copied, key, kept, condition)
    limit = LARGEST_COPY if multipart.is_mistakable(source.key) else COPY_LIMIT
    is_small = source.size <= limit
    if isinstance(source, ObjectInfo) and is_small and metadata is None and write.revise is None:
        return await _copy_whole(fence, source, key, None, condition)
    info, headers = await head.head(requester, source.key, writing)
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None:
        revised = write.revise(info) if write.revise is not None else None
        if revised is None and is_small:
            return await _copy_whole(fence, info, key, None, condition)
        # Other objects may have the source's token, by which an upload would take them for its own.
        metadata = without_token(revised or info.metadata or {})
        if has_room(metadata):
            metadata = write._replace(metadata=metadata).stamped()
    copied = replace(info, metadata=dict(metadata))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    if is_small:
        return await _copy_whole(fence, copied, key, kept, condition)
    kept["x-amz-storage-class"] = copied.storage_class
    if headers.get("x-amz-tagging-count", "0") != "0":
        kept["x-amz-tagging"] = await _tagging(requester, source.key)
    return await multipart.copy(fence, version, key, kept, dict(metadata), condition, log)


async def _tagging(requester: Requester, key: str) -> str:
    """Return an object's tags as a header's value, because copies in parts do not copy tags."""
    call = Call("HEAD", "GET", key, {"tagging": ""})
    return urlencode(await requester.send(call, documents.tags, priority=writing))


async def _copy_whole(
    fence: Fence,
    source: ObjectInfo,
    key: str,
    kept: Mapping[str, str] | None,
    condition: Strict,
) -> ObjectInfo:
    """Copy `source` to `key` in one request; return the new object.

    The copy has the headers `kept` and the metadata of `source`; if `kept` is None, S3 copies both.
    """
    headers = {
        "x-amz-copy-source": head.copy_source(fence.requester.settings.bucket, source.key),
        "x-amz-copy-source-if-match": source.etag,
        "x-amz-metadata-directive": "COPY" if kept is None else "REPLACE",
        "x-amz-storage-class": source.storage_class,
        **condition_headers(condition),
    }
    if kept is not None:
        headers |= {**kept, **head.metadata_headers(source.metadata or {}, None)}

    def accept(answer: Completion) -> ObjectInfo:
        result = documents.read(answer, "CopyObjectResult")
        etag = documents.etag_in(text_of(result, "ETag"))
        try:
            mtime_ns = nanoseconds(text_of(result, "LastModified"))
        except ValueError:  # the copy is done, whatever time the server says
            mtime_ns = head.now_ns()
        version_id = answer.headers.get("x-amz-version-id")
        return replace(source, key=key, etag=etag, mtime_ns=mtime_ns, version_id=version_id)

    def has_made(there: ObjectInfo) -> bool:
        if kept is None:
            return (there.size, there.etag) == (source.size, source.etag)
        if source.token is not None:
            return there.token == source.token
        # A copy of an object that was made of parts has another ETag.
        return (there.size, there.metadata) == (source.size, dict(source.metadata or {}))

    try:
        call = Call("COPY", "PUT", key, headers=headers)
        return await fence.requester.send(call, accept, priority=writing)
    except StaleVersionError as error:
        # S3 does not say for which of the two objects a condition failed.
        if condition is None and not (key == source.key and error.may_be_done):
            raise
        there = await fence.find(key)
        if there is not None and error.may_be_done and has_made(there):
            return there
        if condition in (None, IfMatch(there.etag if there is not None else None)):
            raise  # the source has been replaced
        if condition == IF_ABSENT:
            raise ExistsError(f"{key}: there is an object already") from error
        raise ConflictError("the object is another one, or gone") from error
