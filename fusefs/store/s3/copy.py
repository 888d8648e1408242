"""Copies on the server: with one request where that is enough, in parts where it takes long.

A rename of a directory is a copy of each of its objects, so nothing is asked
that is known: a source that was listed is copied as it is. A HEAD comes first
where the copy gets other metadata (S3 then keeps nothing of the rest), and
where it is made of parts.

A copy whose answer was lost may have taken effect. Repeating it does no harm,
except onto itself, or where there was to be no object: then the object that is
there tells whether it is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from fusefs.store.errors import (
    ConflictError,
    NotFoundError,
    StaleVersionError,
    UnsupportedError,
    from_body,
)
from fusefs.store.fencing import CHANGE_SIZE, METADATA_LIMIT, ChangeToken, stamped
from fusefs.store.http.exchange import Answer
from fusefs.store.interface import Condition, Expect, IfMatch, ObjectInfo, ObjectVersion, Strict
from fusefs.store.s3 import head, list_parser, parts
from fusefs.store.s3.get import AttemptError

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients
    from fusefs.store.s3.store import S3Store

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
    token: ChangeToken,
    *,
    keeps_mtime: bool = False,
    condition: Condition = None,
    is_own: bool = False,
) -> ObjectInfo:
    """As `Store.copy`."""
    if metadata is not None:
        head.check(metadata)
        metadata = stamped(metadata, token)

    async def send(strict: Strict) -> ObjectInfo:
        try:
            if is_own and metadata is not None and isinstance(source, ObjectInfo):
                return await _copy_own(store, source, key, metadata, strict)
            return await _copy(store, source, key, metadata, token, keeps_mtime, strict)
        except NotFoundError as error:
            # S3 does not tell which of the two objects is gone.
            if isinstance(strict, IfMatch) and await store.fence.look(key) is None:
                raise ConflictError("the object to be replaced is gone") from error
            raise

    if isinstance(condition, Expect):
        return await store.fence.over(key, condition, token, "copy", send)
    try:
        return await send(condition)
    except UnsupportedError:
        if condition is None:
            raise
        return await send(None)


async def _copy(
    store: S3Store, source: ObjectInfo | ObjectVersion, key: str,
    metadata: Mapping[str, str] | None, token: ChangeToken, keeps_mtime: bool, condition: Strict,
) -> ObjectInfo:  # fmt: skip
    is_small = source.size <= COPY_LIMIT
    if isinstance(source, ObjectInfo) and is_small and metadata is None and not keeps_mtime:
        return await _copy_whole(store, _Copy(source, key, None, condition))
    info, headers = await head.asked(store, source.key, head.writing)
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None and keeps_mtime:
        dated = _dated(info)
        metadata = dated if dated is None or not _has_room(dated) else stamped(dated, token)
    if metadata is None and is_small:
        return await _copy_whole(store, _Copy(info, key, None, condition))
    copied = info if metadata is None else replace(info, metadata=dict(metadata))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    if is_small:
        return await _copy_whole(store, _Copy(copied, key, kept, condition))
    described = _as_boto_takes_it(copied, kept)
    if int(headers.get("x-amz-tagging-count", "0")):
        described["Tagging"] = await _tagging(store, source.key)
    return await parts.copy(store, version, key, described, condition)


async def _copy_own(
    store: S3Store, source: ObjectInfo, key: str, metadata: Mapping[str, str], condition: Strict
) -> ObjectInfo:
    """Copy an object that fits into one request and that has a content type alone."""
    kept = {} if source.content_type is None else {"content-type": source.content_type}
    return await _copy_whole(
        store, _Copy(replace(source, metadata=dict(metadata)), key, kept, condition)
    )


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
        head.check(dated)
    except ValueError:
        return None  # what is there can't be sent again
    return None if "mtime" in said else dated


def _has_room(metadata: Mapping[str, str]) -> bool:
    """Whether S3 takes a token beside this, which somebody else may have filled."""
    size = sum(len(head.META) + len(name) + len(value) for name, value in metadata.items())
    return size + len(head.META) + CHANGE_SIZE <= METADATA_LIMIT


async def _tagging(store: S3Store, key: str) -> str:
    """An object's tags as S3 takes them; a multipart upload gets none by itself."""

    def work(clients: Clients) -> str:
        answer = clients.s3.get_object_tagging(**clients.request, Key=key)
        return urlencode({tag["Key"]: tag["Value"] for tag in answer["TagSet"]})

    return await store.retried("HEAD", key, work, head.writing)


async def _copy_whole(store: S3Store, one: _Copy) -> ObjectInfo:
    bucket = store.settings.bucket
    if one.is_repeatable and not bucket.startswith("arn:"):
        headers = one.headers(bucket)
        try:
            answer = await store.at_once(
                "COPY", one.key, headers=headers, priority=head.writing,
                condition=one.condition,
            )  # fmt: skip
        except ConflictError:
            pass  # of which object it failed is found out in the patient way
        else:
            if answer is not None:
                with suppress(AttemptError):
                    return one.understood(answer)
            one.may_be_done = True
    return await store.retried("COPY", one.key, one.run, head.writing)


class _Copy:
    """One copy with one request, over several attempts.

    `kept` are the headers that go with the metadata of `source`; None if the
    server is to keep everything.
    """

    def __init__(
        self, source: ObjectInfo, key: str, kept: Mapping[str, str] | None,
        condition: Strict,
    ) -> None:  # fmt: skip
        self.key = key
        self._source = source
        self._kept = kept
        self.condition = condition
        self.may_be_done = False

    @property
    def is_repeatable(self) -> bool:
        """Whether it does no harm that it may have been done."""
        return self.key != self._source.key or self._has_token

    @property
    def _has_token(self) -> bool:
        """Whether the copy is known by a token of its own."""
        return self._kept is not None and self._source.token is not None

    def run(self, clients: Clients) -> ObjectInfo:
        """Send it. Blocks.

        Raises:
            AttemptError: S3 did not copy.
        """
        try:
            return self._directly(clients) or self._through_boto(clients)
        except Exception as error:
            failure = head.judged(error, None)
            if failure.kind is StaleVersionError:
                return self._after_all(clients, error)
            self.may_be_done |= failure.is_retryable
            raise AttemptError(failure) from error

    def _directly(self, clients: Clients) -> ObjectInfo | None:
        """Copy through `Direct`; None if that is boto3's to do."""
        bucket = clients.request["Bucket"]
        if bucket.startswith("arn:"):
            return None
        answer = clients.direct.send("PUT", self.key, headers=self.headers(bucket))
        return self.understood(answer) if answer is not None else None

    def headers(self, bucket: str) -> dict[str, str]:
        """What asks for it."""
        source = self._source
        headers = {
            "x-amz-copy-source": quote(f"{bucket}/{source.key}", safe="/~"),
            "x-amz-copy-source-if-match": source.etag,
            "x-amz-metadata-directive": "COPY" if self._kept is None else "REPLACE",
            "x-amz-storage-class": source.storage_class,
        }
        headers |= head.condition_headers(self.condition)
        if self._kept is not None:
            headers |= self._kept
            headers |= {f"{head.META}{k}": v for k, v in (source.metadata or {}).items()}
        return headers

    def understood(self, answer: Answer) -> ObjectInfo:
        """The copy, if it was made.

        Raises:
            AttemptError: the answer does not say so.
        """
        text = answer.content.decode(errors="replace")
        if "<Error>" in text:  # with status 200
            raise AttemptError(from_body(500, text))
        etag, moment = _ETAG.search(text), _LAST_MODIFIED.search(text)
        if etag is None or moment is None:
            raise head.no_etag()
        mtime_ns = list_parser.nanoseconds(moment[1]) // _SECOND * _SECOND
        return self._told(unescape(etag[1]), mtime_ns, answer.headers.get("x-amz-version-id"))

    def _through_boto(self, clients: Clients) -> ObjectInfo:
        source = self._source
        described: dict[str, Any] = {"StorageClass": source.storage_class}
        if self._kept is not None:
            described = _as_boto_takes_it(source, self._kept)
        answer = clients.s3.copy_object(
            **clients.request,
            **described,
            **head.conditions(self.condition),
            MetadataDirective="COPY" if self._kept is None else "REPLACE",
            Key=self.key,
            CopySource={"Bucket": clients.request["Bucket"], "Key": source.key},
            CopySourceIfMatch=source.etag,
        )
        result = answer.get("CopyObjectResult", {})
        if not result.get("ETag"):
            raise head.no_etag()
        mtime_ns = int(result["LastModified"].timestamp()) * _SECOND
        return self._told(result["ETag"], mtime_ns, answer.get("VersionId"))

    def _told(self, etag: str, mtime_ns: int, version_id: str | None) -> ObjectInfo:
        return replace(
            self._source, key=self.key, etag=list_parser.quoted(etag), mtime_ns=mtime_ns,
            version_id=version_id,
        )  # fmt: skip

    def _after_all(self, clients: Clients, error: Exception) -> ObjectInfo:
        """The copy, if a condition fails because it was made before.

        S3 does not tell of which of the two objects a condition failed.

        Raises:
            AttemptError: it was not; `error` says why.
        """
        is_onto_itself = self.key == self._source.key
        failed = head.judged(error, None)
        if self.condition is None and not (is_onto_itself and self.may_be_done):
            raise AttemptError(failed) from error
        try:
            there = head.look(clients, self.key)
        except Exception as missing:
            if head.judged(missing, None).kind is not NotFoundError:
                raise
            if isinstance(self.condition, IfMatch):  # what was to be replaced is gone
                failed = head.judged(error, self.condition)
            raise AttemptError(failed) from error
        if self.may_be_done and self._is_copy(there):
            return there
        if self.condition == IfMatch(there.etag):
            raise AttemptError(failed) from error  # the source is another one
        raise AttemptError(head.judged(error, self.condition)) from error

    def _is_copy(self, there: ObjectInfo) -> bool:
        source = self._source
        if self._kept is None:
            return (there.size, there.etag) == (source.size, source.etag)
        if self._has_token:
            return there.token == source.token
        # What was made of parts has another ETag now.
        return (there.size, there.metadata) == (source.size, dict(source.metadata or {}))
