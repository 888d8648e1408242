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
from fusefs.store.fencing import CHANGE_SIZE, METADATA_LIMIT
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
            if isinstance(strict, IfMatch) and await fence.find(key) is None:
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
        return await _copy_whole(requester, copied, key, kept, condition)
    limit = LARGEST_COPY if multipart.is_mistakable(source.key) else COPY_LIMIT
    is_small = source.size <= limit
    if isinstance(source, ObjectInfo) and is_small and metadata is None and not write.keeps_mtime:
        return await _copy_whole(requester, source, key, None, condition)
    info, headers = await head.head(requester, source.key, writing)
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None and write.keeps_mtime:
        metadata = _dated(info, is_aws=requester.settings.write_options.is_aws_form)
        if metadata is not None and _has_room(metadata):
            metadata = write._replace(metadata=metadata).stamped()
    if metadata is None and is_small:
        return await _copy_whole(requester, info, key, None, condition)
    copied = info if metadata is None else replace(info, metadata=dict(metadata))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    if is_small:
        return await _copy_whole(requester, copied, key, kept, condition)
    kept["x-amz-storage-class"] = copied.storage_class
    if headers.get("x-amz-tagging-count", "0") != "0":
        kept["x-amz-tagging"] = await _tagging(requester, source.key)
    described = dict(copied.metadata or {})
    return await multipart.copy(fence, version, key, kept, described, condition, log)


def _dated(info: ObjectInfo, *, is_aws: bool) -> dict[str, str] | None:
    """Return an object's metadata with its mtime added.

    None if the metadata has an mtime already, or an entry that can't be sent. The mtime has the
    form of the attributes in the metadata; without any, AWS's if `is_aws`, else s3fs's.
    """
    metadata = info.metadata or {}
    if "mtime" in metadata or "file-mtime" in metadata:
        return None
    if "file-permissions" in metadata or (is_aws and "mode" not in metadata):
        dated = {**metadata, "file-mtime": f"{info.mtime_ns}ns"}
    else:
        seconds, rest = divmod(info.mtime_ns, head.SECOND_NS)
        dated = {**metadata, "mtime": f"{seconds}.{rest:09}"}
    try:
        head.check(dated)
    except ValueError:
        return None  # the present metadata can't be sent again
    return dated


def _has_room(metadata: Mapping[str, str]) -> bool:
    """True if S3's limit leaves room for a token in `metadata`, which others may have filled."""
    size = sum(len(head.META) + len(name) + len(value) for name, value in metadata.items())
    return size + len(head.META) + CHANGE_SIZE <= METADATA_LIMIT


async def _tagging(requester: Requester, key: str) -> str:
    """Return an object's tags as a header's value, because copies in parts do not copy tags."""
    call = Call("HEAD", "GET", key, {"tagging": ""})
    return urlencode(await requester.send(call, documents.tags, priority=writing))


async def _copy_whole(
    requester: Requester,
    source: ObjectInfo,
    key: str,
    kept: Mapping[str, str] | None,
    condition: Strict,
) -> ObjectInfo:
    """Copy `source` to `key` in one request; return the new object.

    The copy has the headers `kept` and the metadata of `source`; if `kept` is None, S3 copies both.
    """
    headers = {
        "x-amz-copy-source": head.copy_source(requester.settings.bucket, source.key),
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
        return await requester.send(call, accept, priority=writing)
    except StaleVersionError as error:
        # S3 does not say for which of the two objects a condition failed.
        may_be_done = error.may_be_done
        if condition is None and not (key == source.key and may_be_done):
            raise
        try:
            there = (await head.head(requester, key, writing))[0]
        except NotFoundError:
            if isinstance(condition, IfMatch):
                raise ConflictError("the object to be replaced is gone") from error
            raise error from None
        if may_be_done and has_made(there):
            return there
        if condition in (None, IfMatch(there.etag)):
            raise  # the source has been replaced
        if condition == IF_ABSENT:
            raise ExistsError(f"{key}: there is an object already") from error
        raise ConflictError("the object has been replaced") from error
