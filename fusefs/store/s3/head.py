"""HEAD requests, and the metadata of objects in the headers of all requests and answers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from fusefs.store.errors import UnreachableError
from fusefs.store.fencing import META
from fusefs.store.interface import ObjectInfo, Urgency, demanded
from fusefs.store.s3.address import Call
from fusefs.store.s3.list import quoted, size_of, usable, whole_seconds
from fusefs.store.s3.requester import Requester

SECOND_NS = 1_000_000_000
# S3's content type of objects that were stored without one.
UNTYPED = "binary/octet-stream"
_KEY = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def check(metadata: Mapping[str, str], content_type: str | None = None) -> None:
    """Raise a ValueError if metadata can't be sent as HTTP headers."""
    for name, value in (*metadata.items(), ("content-type", content_type or "none")):
        if not _is_sendable(name, value):
            raise ValueError(f"no metadata: {name!r}: {value!r}")


def sendable(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without entries that can't be sent: other clients may write such."""
    return {name: value for name, value in metadata.items() if _is_sendable(name, value)}


def _is_sendable(name: str, value: str) -> bool:
    return bool(_KEY.fullmatch(name) and _VALUE.fullmatch(value))


def metadata_headers(metadata: Mapping[str, str], content_type: str | None) -> dict[str, str]:
    """Return the headers for metadata and, unless None, a content type."""
    headers = {f"{META}{name}": value for name, value in metadata.items()}
    if content_type is not None:
        headers["content-type"] = content_type
    return headers


def copy_source(bucket: str, key: str) -> str:
    """Return the header value that names a copy's source."""
    return quote(f"{bucket}/{key}", safe="/~")


def now_ns() -> int:
    """Return the time in ns since the epoch, in whole seconds, as S3 has it."""
    return int(time.time()) * SECOND_NS


async def head(
    requester: Requester, key: str, priority: Urgency = demanded
) -> tuple[ObjectInfo, Mapping[str, str]]:
    """Send a HEAD; return the object, and the answer's headers (names in lower case).

    Raises:
        NotFoundError: there is no such object.
    """
    return await requester.send(
        Call("HEAD", "HEAD", key),
        lambda answer: (parse_head(key, answer.headers), answer.headers),
        priority=priority,
    )


def parse_head(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    """Return the object that an answer's headers describe.

    Raises:
        StoreError: headers are missing or unusable.
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
        raise UnreachableError("S3 did not say what there is", is_retryable=True) from error
