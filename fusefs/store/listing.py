"""ListObjectsV2 answers, parsed fast.

botocore's own parser takes 69 ms for a page of 1,000 keys, nearly all of a
LIST's time. Its `before-parse` event lets a handler look at the answer first;
ours parses the XML with ElementTree's C parser (about a tenth of that), hands
the result over beside botocore's own, and leaves botocore an empty answer to
parse. Everything else (endpoint, signature, errors) stays botocore's.

Keys travel URL-encoded, since XML 1.0 has no control characters.
"""

from __future__ import annotations

import sys
from datetime import datetime
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from fusefs.store.base import ListPage, ObjectInfo

# Under which name the page stands beside botocore's answer.
PAGE = "FusefsPage"
_EMPTY = b"<ListBucketResult/>"


def install(client: Any) -> None:
    """Let a boto3 S3 client put a `ListPage` under `PAGE` of each list_objects_v2 answer."""
    client.meta.events.register("before-parse.s3.ListObjectsV2", _before_parse)


def _before_parse(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    if response_dict["status_code"] == 200:
        customized_response_dict[PAGE] = parse(response_dict["body"])
        response_dict["body"] = _EMPTY


def parse(body: bytes) -> ListPage:
    """Read a ListBucketResult.

    Raises:
        ValueError: it is not one.
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise ValueError(f"the listing is not XML: {error}") from error
    is_encoded = _text(root, "EncodingType") == "url"
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    for element in root:
        tag = element.tag.rpartition("}")[2]
        if tag == "Contents":
            objects.append(_object(element, is_encoded))
        elif tag == "CommonPrefixes":
            prefixes.append(_decode(element[0].text or "", is_encoded))
    token = _text(root, "NextContinuationToken")
    is_truncated = _text(root, "IsTruncated") == "true" and bool(token)
    last = max(objects[-1].key if objects else "", prefixes[-1] if prefixes else "")
    return ListPage(objects, prefixes, token if is_truncated else None, last)


def _object(element: ElementTree.Element, is_encoded: bool) -> ObjectInfo:
    key = etag = ""
    size = mtime_ns = 0
    storage_class = "STANDARD"
    for child in element:
        tag = child.tag.rpartition("}")[2]
        text = child.text or ""
        if tag == "Key":
            key = _decode(text, is_encoded)
        elif tag == "Size":
            size = int(text)
        elif tag == "ETag":
            etag = quoted(text)
        elif tag == "LastModified":
            mtime_ns = _nanoseconds(text)
        elif tag == "StorageClass" and text:
            storage_class = sys.intern(text)
    return ObjectInfo(key, size, etag, mtime_ns, storage_class)


def quoted(etag: str) -> str:
    """An ETag in the quotes that some servers leave out."""
    return etag if etag.startswith('"') else f'"{etag}"'


def _decode(text: str, is_encoded: bool) -> str:
    # Encoded, a plus sign stands for a space; a plus itself is %2B.
    return unquote_plus(text) if is_encoded and ("%" in text or "+" in text) else text


@lru_cache(maxsize=1024)
def _nanoseconds(text: str) -> int:
    """2026-11-21T04:15:07.000Z in nanoseconds since the epoch."""
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


def _text(root: ElementTree.Element, name: str) -> str:
    return root.findtext(f"{{*}}{name}") or ""
