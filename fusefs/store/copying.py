"""Copies on the server: with one request where that is enough, in parts where it takes long.

A rename of a directory is a copy of each of its objects, so nothing is asked
that is known: a source that was listed is copied as it is. A HEAD comes first
where the copy gets other metadata (S3 then keeps nothing of the rest), and
where it is made of parts.

A copy whose answer was lost may have taken effect. Repeating it does no harm,
except onto itself: then the object tells whether it is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from fusefs.store import listing, multipart, requests
from fusefs.store.base import ObjectInfo, ObjectVersion
from fusefs.store.errors import StaleVersionError, from_body
from fusefs.store.stream import AttemptError

if TYPE_CHECKING:
    from fusefs.store.clients import Clients
    from fusefs.store.s3 import S3Store

# S3 copies up to 5 GiB at once, but takes its time, and not every store sends
# something meanwhile to keep the connection from its time-out.
COPY_LIMIT = 256 << 20
# What HEAD tells and a copy with other metadata would lose.
_KEPT = (
    "ContentType", "CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage",
    "Expires", "WebsiteRedirectLocation",
)  # fmt: skip
_SECOND = 1_000_000_000
_ETAG = re.compile(r"<ETag>([^<]+)</ETag>")
_LAST_MODIFIED = re.compile(r"<LastModified>([^<]+)</LastModified>")


async def copy(
    store: S3Store,
    source: ObjectInfo | ObjectVersion,
    key: str,
    metadata: Mapping[str, str] | None,
    *,
    keeps_mtime: bool = False,
) -> ObjectInfo:
    """As `Store.copy`."""
    if metadata is not None:
        requests.check(metadata)
    is_plain = metadata is None and not keeps_mtime and source.size <= COPY_LIMIT
    if isinstance(source, ObjectInfo) and is_plain:
        return await _copy_as_it_is(store, source, key)
    answer = await store.retried(
        "HEAD", source.key, lambda clients: requests.head(clients, source.key), requests.writing
    )
    info = requests.told(source.key, answer)
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None and keeps_mtime:
        metadata = _dated(info)
    if metadata is None and source.size <= COPY_LIMIT:
        return await _copy_as_it_is(store, info, key)
    kept: dict[str, Any] = {name: answer[name] for name in _KEPT if name in answer}
    kept["StorageClass"] = info.storage_class
    kept["Metadata"] = dict(metadata if metadata is not None else info.metadata or {})
    if source.size > COPY_LIMIT:
        if answer.get("TagCount"):
            kept["Tagging"] = await _tagging(store, source.key)
        return await multipart.copy(store, version, key, kept)
    return await _copy_described(store, replace(info, metadata=kept["Metadata"]), key, kept)


def _dated(info: ObjectInfo) -> dict[str, str] | None:
    """An object's metadata with its time, as s3fs and rclone write that; None if it is to stay."""
    said = info.metadata or {}
    seconds, rest = divmod(info.mtime_ns, _SECOND)
    dated = {**said, "mtime": f"{seconds}.{rest:09}"}
    try:
        requests.check(dated)
    except ValueError:
        return None  # what is there can't be sent again
    return None if "mtime" in said else dated


async def _tagging(store: S3Store, key: str) -> str:
    """An object's tags as S3 takes them; a multipart upload gets none by itself."""

    def work(clients: Clients) -> str:
        answer = clients.s3.get_object_tagging(**clients.request, Key=key)
        return urlencode({tag["Key"]: tag["Value"] for tag in answer["TagSet"]})

    return await store.retried("HEAD", key, work, requests.writing)


async def _copy_as_it_is(store: S3Store, source: ObjectInfo, key: str) -> ObjectInfo:
    """Copy with one request, and everything but the key as it is."""
    kept = {"MetadataDirective": "COPY", "StorageClass": source.storage_class}

    def work(clients: Clients) -> ObjectInfo:
        return _copied_directly(clients, source, key) or _copied(clients, source, key, kept)

    return await store.retried("COPY", key, work, requests.writing)


async def _copy_described(
    store: S3Store, source: ObjectInfo, key: str, kept: Mapping[str, Any]
) -> ObjectInfo:
    """Copy with one request; `kept` are boto3's parameters for what the copy has."""
    may_be_done = False

    def work(clients: Clients) -> ObjectInfo:
        nonlocal may_be_done
        try:
            return _copied(clients, source, key, {**kept, "MetadataDirective": "REPLACE"})
        except Exception as error:
            failure = requests.judged(error, None)
            # Copied onto itself, a version made of parts gets another ETag.
            if may_be_done and failure.kind is StaleVersionError and key == source.key:
                info = requests.find(clients, key, source.size, kept["Metadata"], {})
                if info is not None:
                    return info
            may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    return await store.retried("COPY", key, work, requests.writing)


def _copied_directly(clients: Clients, source: ObjectInfo, key: str) -> ObjectInfo | None:
    """Copy an object as it is; None if that is boto3's to do. Blocks."""
    bucket = clients.request["Bucket"]
    if bucket.startswith("arn:"):
        return None
    headers = {
        "x-amz-copy-source": quote(f"{bucket}/{source.key}", safe="/~"),
        "x-amz-copy-source-if-match": source.etag,
        "x-amz-metadata-directive": "COPY",
        "x-amz-storage-class": source.storage_class,
    }
    answer = clients.direct.send("PUT", key, headers=headers)
    if answer is None:
        return None
    text = answer.content.decode(errors="replace")
    if "<Error>" in text:  # with status 200
        raise AttemptError(from_body(500, text))
    etag, moment = _ETAG.search(text), _LAST_MODIFIED.search(text)
    if etag is None or moment is None:
        raise requests.no_etag()
    mtime_ns = listing.nanoseconds(moment[1]) // _SECOND * _SECOND
    version_id = answer.headers.get("x-amz-version-id")
    return _told(source, key, unescape(etag[1]), mtime_ns, version_id)


def _copied(clients: Clients, source: ObjectInfo, key: str, kept: Mapping[str, Any]) -> ObjectInfo:
    """Copy through boto3. Blocks."""
    answer = clients.s3.copy_object(
        **clients.request,
        **kept,
        Key=key,
        CopySource={"Bucket": clients.request["Bucket"], "Key": source.key},
        CopySourceIfMatch=source.etag,
    )
    result = answer.get("CopyObjectResult", {})
    if not result.get("ETag"):
        raise requests.no_etag()
    mtime_ns = int(result["LastModified"].timestamp()) * _SECOND
    return _told(source, key, result["ETag"], mtime_ns, answer.get("VersionId"))


def _told(
    source: ObjectInfo, key: str, etag: str, mtime_ns: int, version_id: str | None
) -> ObjectInfo:
    etag = listing.quoted(etag)
    return replace(source, key=key, etag=etag, mtime_ns=mtime_ns, version_id=version_id)
