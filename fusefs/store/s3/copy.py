"""Copies on the server: with one request where that is enough, in parts where it takes long.

A rename of a directory is a copy of each of its objects, so nothing is requested
that is known: a source that was listed is copied as it is. A HEAD comes first
where the copy gets other metadata (S3 then keeps nothing of the rest), and
where it is made of parts.

A copy whose answer was lost may have taken effect. Repeating it does no harm,
except onto itself, or where there was to be no object: then the object that is
there shows whether it is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from fusefs.store.errors import (
    AttemptError,
    ConflictError,
    ExistsError,
    NotFoundError,
    StaleVersionError,
    UnsupportedError,
    from_body,
)
from fusefs.store.fencing import CHANGE_SIZE, METADATA_LIMIT
from fusefs.store.http.answers import Answer
from fusefs.store.interface import (
    IF_ABSENT,
    Expect,
    IfMatch,
    ObjectInfo,
    ObjectVersion,
    Strict,
    Write,
    writing,
)
from fusefs.store.s3 import head, multipart
from fusefs.store.s3.conditions import (
    Fence,
    condition_headers,
    condition_parameters,
    interpret,
)
from fusefs.store.s3.list_parser import nanoseconds, quoted, unescaped, whole_seconds
from fusefs.store.s3.requester import Requester

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

OPERATION = "CopyObject"
# S3 copies up to 5 GiB at once, but takes its time, and not every store sends
# something meanwhile to keep the connection from its time-out.
COPY_LIMIT = 256 << 20
LARGEST_COPY = 5 << 30
# What HEAD returns and a copy with other metadata would lose, and boto3's names for it.
_KEPT = {
    "content-type": "ContentType",
    "cache-control": "CacheControl",
    "content-disposition": "ContentDisposition",
    "content-encoding": "ContentEncoding",
    "content-language": "ContentLanguage",
    "expires": "Expires",
    "x-amz-website-redirect-location": "WebsiteRedirectLocation",
}
_ETAG = re.compile(r"<ETag>([^<]+)</ETag>")
_LAST_MODIFIED = re.compile(r"<LastModified>([^<]+)</LastModified>")


async def copy(
    requester: Requester,
    fence: Fence,
    source: ObjectInfo | ObjectVersion,
    key: str,
    write: Write,
) -> ObjectInfo:
    """As `Store.copy`."""
    condition = write.condition
    if write.metadata is not None:
        head.check(write.metadata)
        write = replace(write, metadata=write.stamped())

    async def send(strict: Strict) -> ObjectInfo:
        try:
            if write.is_own and isinstance(source, ObjectInfo):
                return await _copy_own(requester, source, key, write, strict)
            return await _copy(requester, fence, source, key, write, strict)
        except NotFoundError as error:
            # S3 does not say which of the two objects is gone.
            if isinstance(strict, IfMatch) and await fence.find(key) is None:
                raise ConflictError("the object to be replaced is gone") from error
            raise

    if isinstance(condition, Expect):
        return await fence.over(key, condition, write.token, OPERATION, send)
    while True:
        # Not every store that honours conditions of PUT honours those of copies.
        if condition == IF_ABSENT and await fence.find(key) is not None:
            raise ExistsError(f"{key}: there is an object already")
        strict = fence.sent(OPERATION, condition)
        try:
            return await send(strict)
        except UnsupportedError:
            if strict is None:
                raise
            fence.note_unsupported(OPERATION, strict)


async def _copy(
    requester: Requester,
    fence: Fence,
    source: ObjectInfo | ObjectVersion,
    key: str,
    write: Write,
    condition: Strict,
) -> ObjectInfo:
    metadata = write.metadata
    limit = LARGEST_COPY if multipart.is_mistakable(source.key) else COPY_LIMIT
    is_small = source.size <= limit
    if isinstance(source, ObjectInfo) and is_small and metadata is None and not write.keeps_mtime:
        return await _copy_whole(requester, _Copy(source, key, None, condition))
    info, headers = await head.head(requester, source.key, writing)
    version = source.version if isinstance(source, ObjectInfo) else source
    if info.version != version:
        raise StaleVersionError("the object has been replaced")
    if metadata is None and write.keeps_mtime:
        metadata = _dated(info, is_aws=requester.settings.write_options.is_aws_form)
        if metadata is not None and _has_room(metadata):
            metadata = replace(write, metadata=metadata).stamped()
    if metadata is None and is_small:
        return await _copy_whole(requester, _Copy(info, key, None, condition))
    copied = info if metadata is None else replace(info, metadata=dict(metadata))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    if is_small:
        return await _copy_whole(requester, _Copy(copied, key, kept, condition))
    described = _as_boto_takes_it(copied, kept)
    if int(headers.get("x-amz-tagging-count", "0")):
        described["Tagging"] = await _tagging(requester, source.key)
    return await multipart.copy(requester, fence, version, key, described, condition)


async def _copy_own(
    requester: Requester,
    source: ObjectInfo,
    key: str,
    write: Write,
    condition: Strict,
) -> ObjectInfo:
    """Copy an object that fits into one request and that has a content type alone."""
    kept = {} if source.content_type is None else {"content-type": source.content_type}
    copied = replace(source, metadata=write.metadata)
    return await _copy_whole(requester, _Copy(copied, key, kept, condition))


def _as_boto_takes_it(copied: ObjectInfo, kept: Mapping[str, str]) -> dict[str, Any]:
    """What a copy has, as boto3's parameters."""
    from email.utils import parsedate_to_datetime

    described: dict[str, Any] = {_KEPT[name]: value for name, value in kept.items()}
    try:
        described["Expires"] = parsedate_to_datetime(kept["expires"])
    except (KeyError, ValueError):
        described.pop("Expires", None)  # boto3 takes no text for it
    metadata = dict(copied.metadata or {})
    return {**described, "StorageClass": copied.storage_class, "Metadata": metadata}


def _dated(info: ObjectInfo, *, is_aws: bool) -> dict[str, str] | None:
    """An object's metadata with its time, None if it is to stay.

    The time is in the form of the object's other attributes; where it has none, as AWS's
    services write it if `is_aws`, else as s3fs and rclone do.
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
        return None  # what is there can't be sent again
    return dated


def _has_room(metadata: Mapping[str, str]) -> bool:
    """Whether S3 takes a token beside this, which another client may have filled."""
    size = sum(len(head.META) + len(name) + len(value) for name, value in metadata.items())
    return size + len(head.META) + CHANGE_SIZE <= METADATA_LIMIT


async def _tagging(requester: Requester, key: str) -> str:
    """An object's tags as S3 takes them; a multipart upload gets none by itself."""

    def work(clients: Clients) -> str:
        answer = clients.s3.get_object_tagging(**clients.request, Key=key)
        return urlencode({tag["Key"]: tag["Value"] for tag in answer["TagSet"]})

    return await requester.with_retries("HEAD", key, work, writing)


async def _copy_whole(requester: Requester, one: _Copy) -> ObjectInfo:
    bucket = requester.settings.bucket
    if one.is_repeatable and not bucket.startswith("arn:"):
        try:
            answer = await requester.send_now(
                "COPY",
                one.key,
                headers=one.headers(bucket),
                priority=writing,
                condition=one.condition,
            )
        except ConflictError:
            pass  # of which of the two objects it failed is found out in a thread
        else:
            if answer is not None:
                with suppress(AttemptError):
                    return one.parse(answer)
            one.may_be_done = True
    return await requester.with_retries("COPY", one.key, one.run, writing)


class _Copy:
    """One copy with one request, over several attempts.

    `kept` are the headers that go with the metadata of `source`; None if the
    server is to keep everything.
    """

    def __init__(
        self, source: ObjectInfo, key: str, kept: Mapping[str, str] | None, condition: Strict
    ) -> None:
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
        """Whether the copy can be recognized by a token of its own."""
        return self._kept is not None and self._source.token is not None

    def run(self, clients: Clients) -> ObjectInfo:
        """Send it. Blocks.

        Raises:
            AttemptError: S3 did not copy.
        """
        try:
            return self._directly(clients) or self._through_boto(clients)
        except Exception as error:
            failure = interpret(error)
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
        return self.parse(answer) if answer is not None else None

    def headers(self, bucket: str) -> dict[str, str]:
        """The headers of the request."""
        source = self._source
        headers = {
            "x-amz-copy-source": quote(f"{bucket}/{source.key}", safe="/~"),
            "x-amz-copy-source-if-match": source.etag,
            "x-amz-metadata-directive": "COPY" if self._kept is None else "REPLACE",
            "x-amz-storage-class": source.storage_class,
        }
        headers |= condition_headers(self.condition)
        if self._kept is not None:
            headers |= self._kept
            headers |= {f"{head.META}{k}": v for k, v in (source.metadata or {}).items()}
        return headers

    def parse(self, answer: Answer) -> ObjectInfo:
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
        try:
            mtime_ns = nanoseconds(moment[1])
        except ValueError:  # it is done, whatever the server takes for a time
            mtime_ns = head.now_ns()
        return self._info(unescaped(etag[1]), mtime_ns, answer.headers.get("x-amz-version-id"))

    def _through_boto(self, clients: Clients) -> ObjectInfo:
        source = self._source
        described: dict[str, Any] = {"StorageClass": source.storage_class}
        if self._kept is not None:
            described = _as_boto_takes_it(source, self._kept)
        answer = clients.s3.copy_object(
            **clients.request,
            **described,
            **condition_parameters(self.condition),
            MetadataDirective="COPY" if self._kept is None else "REPLACE",
            Key=self.key,
            CopySource={"Bucket": clients.request["Bucket"], "Key": source.key},
            CopySourceIfMatch=source.etag,
        )
        result = answer.get("CopyObjectResult", {})
        if not result.get("ETag"):
            raise head.no_etag()
        mtime_ns = whole_seconds(result["LastModified"])
        return self._info(result["ETag"], mtime_ns, answer.get("VersionId"))

    def _info(self, etag: str, mtime_ns: int, version_id: str | None) -> ObjectInfo:
        return replace(
            self._source,
            key=self.key,
            etag=quoted(etag),
            mtime_ns=mtime_ns,
            version_id=version_id,
        )

    def _after_all(self, clients: Clients, error: Exception) -> ObjectInfo:
        """The copy, if a condition fails because it was made before.

        S3 does not say of which of the two objects a condition failed.

        Raises:
            AttemptError: it was not; `error` says why.
        """
        is_onto_itself = self.key == self._source.key
        failed = interpret(error)
        if self.condition is None and not (is_onto_itself and self.may_be_done):
            raise AttemptError(failed) from error
        try:
            there = head.head_in_thread(clients, self.key)
        except Exception as missing:
            if interpret(missing).kind is not NotFoundError:
                raise
            if isinstance(self.condition, IfMatch):  # what was to be replaced is gone
                failed = interpret(error, self.condition)
            raise AttemptError(failed) from error
        if self.may_be_done and self._is_copy(there):
            return there
        if self.condition == IfMatch(there.etag):
            raise AttemptError(failed) from error  # the source is another one
        raise AttemptError(interpret(error, self.condition)) from error

    def _is_copy(self, there: ObjectInfo) -> bool:
        source = self._source
        if self._kept is None:
            return (there.size, there.etag) == (source.size, source.etag)
        if self._has_token:
            return there.token == source.token
        # What was made of parts has another ETag now.
        return (there.size, there.metadata) == (source.size, dict(source.metadata or {}))
