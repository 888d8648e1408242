"""HEAD requests, and what all requests say and learn about an object: its metadata."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from fusefs.store.errors import (
    AttemptError,
    Failure,
    NotFoundError,
    UnreachableError,
    translate,
)
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo, Urgency
from fusefs.store.s3.list_parser import check_size, quoted, usable, whole_seconds
from fusefs.store.s3.requester import Requester

if TYPE_CHECKING:
    from fusefs.store.s3.clients import Clients

META = "x-amz-meta-"
SECOND_NS = 1_000_000_000
# The content type of what is stored without one.
UNTYPED = "binary/octet-stream"
_KEY = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def check(metadata: Mapping[str, str], content_type: str | None = None) -> None:
    """Refuse what can't be HTTP headers.

    Raises:
        ValueError: they can't.
    """
    for name, value in (*metadata.items(), ("content-type", content_type or "none")):
        if not _is_sendable(name, value):
            raise ValueError(f"no metadata: {name!r}: {value!r}")


def sendable(metadata: Mapping[str, str]) -> dict[str, str]:
    """What can be sent again of an object's metadata: other clients write what can't."""
    return {name: value for name, value in metadata.items() if _is_sendable(name, value)}


def _is_sendable(name: str, value: str) -> bool:
    return bool(_KEY.fullmatch(name) and _VALUE.fullmatch(value))


def metadata_parameters(metadata: Mapping[str, str], content_type: str | None) -> dict[str, Any]:
    """boto3's parameters for metadata."""
    typed = {} if content_type is None else {"ContentType": content_type}
    return {"Metadata": dict(metadata), **typed}


def now_ns() -> int:
    """The time, in whole seconds as S3 has it."""
    return int(time.time()) * SECOND_NS


def no_etag() -> AttemptError:
    """An answer with status 200 lacks the ETag."""
    return AttemptError(Failure(UnreachableError, "S3 did not say what it did", is_retryable=True))


async def head(
    requester: Requester, key: str, priority: Urgency
) -> tuple[ObjectInfo, Mapping[str, str]]:
    """The object by a HEAD, and all headers of the answer, with names in lower case.

    Raises:
        NotFoundError: there is no such object.
    """
    answer = await requester.send_now("HEAD", key, headers={}, priority=priority)
    if answer is not None:
        with suppress(AttemptError):
            return parse_head(key, answer.headers), answer.headers
    return await requester.with_retries(
        "HEAD", key, lambda clients: _head_in_thread(clients, key), priority
    )


def head_in_thread(clients: Clients, key: str) -> ObjectInfo:
    """The object by a HEAD. Blocks."""
    return _head_in_thread(clients, key)[0]


def _head_in_thread(clients: Clients, key: str) -> tuple[ObjectInfo, Mapping[str, str]]:
    answer = clients.direct.send("HEAD", key)
    if answer is not None:
        headers = answer.headers
    else:
        headers = _head_by_boto(clients, key)["ResponseMetadata"]["HTTPHeaders"]
    return parse_head(key, headers), headers


def _head_by_boto(clients: Clients, key: str, **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = clients.s3.head_object(**clients.request, **options, Key=key)
    return answer


def find(
    clients: Clients,
    key: str,
    size: int,
    metadata: Mapping[str, str],
    checksum: Mapping[str, str],
) -> ObjectInfo | None:
    """The object `key` if it is this very one, else None. Blocks.

    The token in its metadata decides. Without one in `metadata`, the size, the
    metadata and `checksum` do, which is as boto3's HEAD has it.
    """
    try:
        answer = _head_by_boto(clients, key, ChecksumMode="ENABLED")
    except Exception as error:
        if translate(error).kind is NotFoundError:
            return None
        raise
    info = _parse_boto(key, answer)
    token = ChangeToken.parse(metadata)
    if token is not None:
        return info if info.token == token and info.size == size else None
    is_same = all(answer.get(name) == value for name, value in checksum.items())
    return info if is_same and (info.size, info.metadata) == (size, dict(metadata)) else None


def parse_head(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    """The object that an answer's headers describe.

    Raises:
        AttemptError: some are missing.
    """
    try:
        modified = parsedate_to_datetime(headers["last-modified"])
        size = int(headers["content-length"])
        check_size(size)
        return ObjectInfo(
            key,
            size,
            quoted(headers["etag"]),
            whole_seconds(modified),
            usable(headers.get("x-amz-storage-class")) or "STANDARD",
            usable(headers.get("content-type")) or UNTYPED,
            usable(headers.get("x-amz-version-id")),
            {
                name.removeprefix(META): value
                for name, value in headers.items()
                if name.startswith(META)
            },
        )
    except (ArithmeticError, KeyError, ValueError) as error:
        sentence = "S3 did not say what there is"
        raise AttemptError(Failure(UnreachableError, sentence, is_retryable=True)) from error


def _parse_boto(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(
        key,
        answer["ContentLength"],
        quoted(answer["ETag"]),
        whole_seconds(answer["LastModified"]),
        usable(answer.get("StorageClass")) or "STANDARD",
        usable(answer.get("ContentType")) or UNTYPED,
        usable(answer.get("VersionId")),
        {name.lower(): value for name, value in answer.get("Metadata", {}).items()},
    )
