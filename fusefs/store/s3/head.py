"""What requests have in common: their parameters in boto3's words, and their answers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from fusefs.store.errors import (
    ConflictError,
    ExistsError,
    Failure,
    NotFoundError,
    UnreachableError,
    translate,
)
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import IF_ABSENT, IfMatch, ObjectInfo, Strict
from fusefs.store.priority import Priority, Urgency
from fusefs.store.s3 import list_parser
from fusefs.store.s3.get import AttemptError

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients
    from fusefs.store.s3.store import S3Store

META = "x-amz-meta-"
_KEY = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def writing() -> Priority:
    """The urgency of uploads."""
    return Priority.WRITE


def check(metadata: Mapping[str, str], content_type: str | None = None) -> None:
    """Refuse what can't be HTTP headers.

    Raises:
        ValueError: they can't.
    """
    for name, value in (*metadata.items(), ("content-type", content_type or "none")):
        if not _KEY.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"no metadata: {name!r}: {value!r}")


def headers(metadata: Mapping[str, str], content_type: str | None) -> dict[str, Any]:
    """boto3's parameters for them."""
    typed = {} if content_type is None else {"ContentType": content_type}
    return {"Metadata": dict(metadata), **typed}


def conditions(condition: Strict) -> dict[str, str]:
    """boto3's parameters for a condition."""
    if isinstance(condition, IfMatch):
        return {"IfMatch": condition.etag}
    return {"IfNoneMatch": "*"} if condition == IF_ABSENT else {}


def condition_headers(condition: Strict) -> dict[str, str]:
    """The headers for a condition, with names in lower case."""
    if isinstance(condition, IfMatch):
        return {"if-match": condition.etag}
    return {"if-none-match": "*"} if condition == IF_ABSENT else {}


def judged(error: Exception, condition: Strict) -> Failure:
    """What an exception means, if it is of a request with this condition."""
    failure = error.failure if isinstance(error, AttemptError) else translate(error)
    return under(failure, condition)


def under(failure: Failure, condition: Strict) -> Failure:
    """What a failure means to a request with this condition."""
    is_gone = isinstance(condition, IfMatch) and failure.code == "NoSuchKey"
    if condition is None or not (failure.status == 412 or is_gone):
        return failure
    if condition == IF_ABSENT:
        return replace(failure, kind=ExistsError, sentence="there is an object already")
    return replace(failure, kind=ConflictError, sentence="the object has been replaced")


def now_ns() -> int:
    """The time, in whole seconds as S3 tells it."""
    return int(time.time()) * 1_000_000_000


def no_etag() -> AttemptError:
    """An answer says 200, and no more."""
    return AttemptError(Failure(UnreachableError, "S3 did not say what it did", is_retryable=True))


def find(
    clients: Clients,
    key: str,
    size: int,
    metadata: Mapping[str, str],
    checksum: Mapping[str, str],
) -> ObjectInfo | None:
    """The object `key` if it is this very one, else None. Blocks.

    The token in its metadata tells. Without one in `metadata`, all of these and the
    checksum do, which is as HEAD tells it.
    """
    try:
        answer = head(clients, key, ChecksumMode="ENABLED")
    except Exception as error:
        if translate(error).kind is NotFoundError:
            return None
        raise
    info = told(key, answer)
    token = ChangeToken.parse(metadata)
    if token is not None:
        return info if info.token == token and info.size == size else None
    is_same = all(answer.get(name) == value for name, value in checksum.items())
    return info if is_same and (info.size, info.metadata) == (size, dict(metadata)) else None


def head(clients: Clients, key: str, **options: Any) -> dict[str, Any]:
    """What HEAD tells, as boto3 puts it. Blocks."""
    answer: dict[str, Any] = clients.s3.head_object(**clients.request, **options, Key=key)
    return answer


async def asked(
    store: S3Store, key: str, priority: Urgency
) -> tuple[ObjectInfo, Mapping[str, str]]:
    """What a HEAD tells, and all its headers, with names in lower case.

    Raises:
        NotFoundError: there is no such object.
    """
    answer = await store.at_once("HEAD", key, headers={}, priority=priority)
    if answer is not None:
        with suppress(AttemptError):
            return _read(key, answer.headers), answer.headers
    return await store.retried("HEAD", key, lambda clients: _look(clients, key), priority)


def look(clients: Clients, key: str) -> ObjectInfo:
    """What a HEAD tells. Blocks."""
    return _look(clients, key)[0]


def _look(clients: Clients, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
    answer = clients.direct.send("HEAD", key)
    if answer is not None:
        headers = answer.headers
    else:
        headers = head(clients, key)["ResponseMetadata"]["HTTPHeaders"]
    return _read(key, headers), headers


def _read(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    try:
        modified = parsedate_to_datetime(headers["last-modified"])
        return ObjectInfo(
            key,
            int(headers["content-length"]),
            list_parser.quoted(headers["etag"]),
            int(modified.timestamp()) * 1_000_000_000,
            headers.get("x-amz-storage-class", "STANDARD"),
            headers.get("content-type", "binary/octet-stream"),
            headers.get("x-amz-version-id"),
            {
                name.removeprefix(META): value
                for name, value in headers.items()
                if name.startswith(META)
            },
        )
    except (KeyError, ValueError) as error:
        sentence = "S3 did not say what there is"
        raise AttemptError(Failure(UnreachableError, sentence, is_retryable=True)) from error


def told(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    """What a HEAD tells."""
    return ObjectInfo(
        key,
        answer["ContentLength"],
        list_parser.quoted(answer["ETag"]),
        int(answer["LastModified"].timestamp()) * 1_000_000_000,
        answer.get("StorageClass", "STANDARD"),
        answer.get("ContentType", "binary/octet-stream"),
        answer.get("VersionId"),
        {name.lower(): value for name, value in answer.get("Metadata", {}).items()},
    )
