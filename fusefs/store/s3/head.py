"""HEAD requests, and what all requests say and learn about an object: its metadata."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from fusefs.store.checksum import ASKING
from fusefs.store.errors import AttemptError, Failure, NotFoundError, UnreachableError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo, Urgency, demanded
from fusefs.store.s3.address import Call
from fusefs.store.s3.list import quoted, size_of, usable, whole_seconds
from fusefs.store.s3.requester import Requester

META = "x-amz-meta-"
SECOND_NS = 1_000_000_000
# The content type of what is stored without one.
UNTYPED = "binary/octet-stream"
NO_HEADERS: Mapping[str, str] = {}
_KEY = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def check(metadata: Mapping[str, str], content_type: str | None = None) -> None:
    """Raise a ValueError if metadata can't be HTTP headers."""
    for name, value in (*metadata.items(), ("content-type", content_type or "none")):
        if not _is_sendable(name, value):
            raise ValueError(f"no metadata: {name!r}: {value!r}")


def sendable(metadata: Mapping[str, str]) -> dict[str, str]:
    """The part of an object's metadata that can be sent again: other clients write what can't."""
    return {name: value for name, value in metadata.items() if _is_sendable(name, value)}


def _is_sendable(name: str, value: str) -> bool:
    return bool(_KEY.fullmatch(name) and _VALUE.fullmatch(value))


def metadata_headers(metadata: Mapping[str, str], content_type: str | None) -> dict[str, str]:
    """The headers for metadata."""
    headers = {f"{META}{name}": value for name, value in metadata.items()}
    if content_type is not None:
        headers["content-type"] = content_type
    return headers


def copy_source(bucket: str, key: str) -> str:
    """The header that names the source of a copy; an access point is named by its ARN."""
    place = f"{bucket}/object" if bucket.startswith("arn:") else bucket
    return quote(f"{place}/{key}", safe="/~")


def now_ns() -> int:
    """The time, in whole seconds as S3 has it."""
    return int(time.time()) * SECOND_NS


async def head(
    requester: Requester,
    key: str,
    priority: Urgency = demanded,
    headers: Mapping[str, str] = NO_HEADERS,
) -> tuple[ObjectInfo, Mapping[str, str]]:
    """Return the object by a HEAD, and all headers of the answer, with names in lower case.

    Raises:
        NotFoundError: there is no such object.
    """
    return await requester.send(
        Call("HEAD", "HEAD", key, headers=headers),
        lambda answer: (parse_head(key, answer.headers), answer.headers),
        priority=priority,
    )


async def find(
    requester: Requester, key: str, size: int, metadata: Mapping[str, str], checksum: str
) -> ObjectInfo | None:
    """Return the object `key` if it is this very one, else None.

    The token decides; without one, size, metadata and `checksum` (S3's CRC32 in base64) do.

    Raises:
        StoreError: S3 could not tell.
    """
    try:
        info, headers = await head(requester, key, headers=ASKING)
    except NotFoundError:
        return None
    token = ChangeToken.parse(metadata)
    if token is not None:
        return info if info.token == token and info.size == size else None
    is_same = headers.get("x-amz-checksum-crc32") == checksum
    return info if is_same and (info.size, info.metadata) == (size, dict(metadata)) else None


def parse_head(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    """The object that an answer's headers describe.

    Raises:
        AttemptError: some are missing.
    """
    try:
        modified = parsedate_to_datetime(headers["last-modified"])
        found = {name: text for name, text in headers.items() if name.startswith(META)}
        return ObjectInfo(
            key,
            size_of(headers["content-length"]),
            quoted(headers["etag"]),
            whole_seconds(modified),
            usable(headers.get("x-amz-storage-class")) or "STANDARD",
            usable(headers.get("content-type")) or UNTYPED,
            usable(headers.get("x-amz-version-id")),
            {name.removeprefix(META): text for name, text in found.items()},
        )
    except (ArithmeticError, KeyError, ValueError) as error:
        sentence = "S3 did not say what there is"
        raise AttemptError(Failure(UnreachableError, sentence, is_retryable=True)) from error
