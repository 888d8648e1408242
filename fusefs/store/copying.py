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
from email.utils import parsedate_to_datetime
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
# What HEAD tells and a copy with other metadata would lose, and boto3's names for it.
_KEPT = {
    "content-type": "ContentType",
    "cache-control": "CacheControl",
    "content-disposition": "ContentDisposition",
    "content-encoding": "ContentEncoding",
    "content-language": "ContentLanguage",
    "expires": "Expires",
    "x-amz-website-redirect-location": "WebsiteRedirectLocation",
}
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
    is_small = source.size <= COPY_LIMIT
    if isinstance(source, ObjectInfo) and is_small and metadata is None and not keeps_mtime:
        return await _copy_as_it_is(store, source, key)
    info, headers = await store.retried(
        "HEAD", source.key, lambda clients: requests.look_closely(clients, source.key),
        requests.writing,
    )  # fmt: skip
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None and keeps_mtime:
        metadata = _dated(info)
    if metadata is None and is_small:
        return await _copy_as_it_is(store, info, key)
    copied = info if metadata is None else replace(info, metadata=dict(metadata))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    if is_small:
        return await _copy_described(store, copied, key, kept)
    described = _as_boto_takes_it(copied, kept)
    if int(headers.get("x-amz-tagging-count", "0")):
        described["Tagging"] = await _tagging(store, source.key)
    return await multipart.copy(store, version, key, described)


def _as_boto_takes_it(copied: ObjectInfo, kept: Mapping[str, str]) -> dict[str, Any]:
    """What a copy has, as boto3's parameters."""
    described: dict[str, Any] = {_KEPT[name]: value for name, value in kept.items()}
    try:
        described["Expires"] = parsedate_to_datetime(kept["expires"])
    except (KeyError, ValueError):
        described.pop("Expires", None)  # boto3 takes no text for it
    return {
        **described, "StorageClass": copied.storage_class, "Metadata": dict(copied.metadata or {})
    }  # fmt: skip


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

    def work(clients: Clients) -> ObjectInfo:
        told = _copied_directly(clients, source, key, {"x-amz-metadata-directive": "COPY"})
        if told is not None:
            return told
        kept = {"MetadataDirective": "COPY", "StorageClass": source.storage_class}
        return _copied(clients, source, key, kept)

    return await store.retried("COPY", key, work, requests.writing)


async def _copy_described(
    store: S3Store, copied: ObjectInfo, key: str, kept: Mapping[str, str]
) -> ObjectInfo:
    """Copy with one request, with `kept` and the metadata of `copied`."""
    may_be_done = False
    metadata = copied.metadata or {}
    headers = {
        **kept,
        "x-amz-metadata-directive": "REPLACE",
        **{f"{requests.META}{name}": value for name, value in metadata.items()},
    }

    def work(clients: Clients) -> ObjectInfo:
        nonlocal may_be_done
        try:
            told = _copied_directly(clients, copied, key, headers)
            if told is not None:
                return told
            described = _as_boto_takes_it(copied, kept)
            return _copied(clients, copied, key, {**described, "MetadataDirective": "REPLACE"})
        except Exception as error:
            failure = requests.judged(error, None)
            # Copied onto itself, a version made of parts gets another ETag.
            if may_be_done and failure.kind is StaleVersionError and key == copied.key:
                info = requests.find(clients, key, copied.size, metadata, {})
                if info is not None:
                    return info
            may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    return await store.retried("COPY", key, work, requests.writing)


def _copied_directly(
    clients: Clients, source: ObjectInfo, key: str, headers: Mapping[str, str]
) -> ObjectInfo | None:
    """Copy through `Direct`; None if that is boto3's to do. Blocks."""
    bucket = clients.request["Bucket"]
    if bucket.startswith("arn:"):
        return None
    headers = {
        **headers,
        "x-amz-copy-source": quote(f"{bucket}/{source.key}", safe="/~"),
        "x-amz-copy-source-if-match": source.etag,
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
