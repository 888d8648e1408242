"""LIST requests and their answers (ListObjectsV2).

botocore's own parser takes 69 ms for a page of 1,000 keys, more than the server needs to make it,
and an XML parser in C 5 ms. So the entries are cut out of the document and parsed by regular
expressions, field by field, in 2 ms; the rest is parsed as XML. An entry without a valid size, time
or ETag becomes an object with the ETag "", which is hidden; one without a key is only counted.

Keys are sent URL-encoded, since XML 1.0 cannot express control characters. Ceph's gateway repeats
the prefix and the key to start after without encoding them: these are not needed, and characters
that are not valid in XML are removed from them.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from functools import lru_cache
from html import unescape
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from fusefs.store.errors import StoreError, UnreachableError
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.store.s3.address import Call

# Seconds for which a request is repeated if its answer is no listing.
GARBLED_TIME_S = 3.0
# The fields of an entry. S3 repeats none of them in one entry.
_NAMES = ("Key", "Size", "ETag", "LastModified", "StorageClass")
_FIELDS = [re.compile(f"<{name}>([^<]*+)</{name}>") for name in _NAMES]
# Characters that XML 1.0 cannot express, as such and as references.
_NOT_XML = (
    "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]"
    "|&#0*(?:[0-8]|1[124-9]|2[0-9]|3[01]);|&#[xX]0*(?:[0-8bcefBCEF]|1[0-9a-fA-F]);"
)
# Sizes and times are stored in 64 bits, one of them for the sign.
MOST_64 = (1 << 63) - 1
# Longer than the values of any server. Such values go into headers of requests and into records.
LONGEST_VALUE = 1024
# The characters of a header: visible ones of Latin-1 (RFC 9110, section 8.8.3), and blanks.
_ETAG = re.compile(f"[ -~\xa1-\xff]{{1,{LONGEST_VALUE}}}")
# ETags that `quoted` returns as they are, one a line.
_QUOTED = re.compile(f'(?:"[ !#-~]{{1,{LONGEST_VALUE - 2}}}+"\n)*+')
_VALUE = re.compile(f"(?=.{{1,{LONGEST_VALUE}}}$)[!-~]([ -~]*[!-~])?")


def list_call(
    prefix: str, delimiter: str, start_after: str, max_keys: int, token: str = ""
) -> Call:
    """Return the `Call`, not sent yet, for a page of a listing of at most `max_keys` entries.

    An empty `delimiter`, `start_after` or (continuation) `token` is omitted.
    """
    query: dict[str, Any] = {
        "list-type": 2,
        "prefix": prefix,
        "max-keys": max_keys,
        "encoding-type": "url",
    }
    chosen = {"delimiter": delimiter, "start-after": start_after, "continuation-token": token}
    query |= {name: value for name, value in chosen.items() if value}
    return Call("LIST", "GET", query=query)


def parse(body: bytes, prefix: str = "") -> ListPage:
    """Parse a ListBucketResult; entries that are not below the prefix are dropped.

    Raises:
        StoreError: the document is no listing.
    """
    try:
        entries, rest = _cut(body.decode())
        return _page(_root(rest), entries, prefix)
    except (ElementTree.ParseError, ValueError) as error:
        # A truncated document may be whole the next time; any other stays the same.
        is_whole = b"<ListBucketResult" in body and body.rstrip().endswith(b"</ListBucketResult>")
        sentence = f"the answer is not a listing: {error}"
        raise UnreachableError(
            sentence, is_retryable=not is_whole, longest_s=GARBLED_TIME_S
        ) from error


def _cut(text: str) -> tuple[list[str], str]:
    """Return the contents of a document's entries, and the document without the entries."""
    first, *others = text.split("<Contents>")
    entries, rest = [], [first]
    for other in others:
        entry, end, behind = other.partition("</Contents>")
        entries.append(entry)
        rest.append(behind if end else f"<Contents>{entry}")
    return entries, "".join(rest)


def _root(text: str) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        legible = re.sub(_NOT_XML, "", text)
        if legible == text or "<EncodingType>url</EncodingType>" not in text:
            raise
        root = ElementTree.fromstring(legible)
    if root.tag.rpartition("}")[2] != "ListBucketResult":
        raise ValueError(f"it is {root.tag!r}")
    if root.find("{*}Contents") is not None:
        raise ValueError("its entries have names or attributes that S3's have not")
    return root


def _page(root: ElementTree.Element, entries: list[str], prefix: str) -> ListPage:
    is_encoded = text_of(root, "EncodingType") == "url"
    objects = _objects(entries, is_encoded) if entries else []
    prefixes = [
        decoded(text_of(element, "Prefix"), is_encoded)
        for element in root.iterfind("{*}CommonPrefixes")
    ]
    count = len(objects) + len(prefixes)
    objects = [info for info in objects if info.key]
    prefixes = [one for one in prefixes if one]
    last = max(objects[-1].key if objects else "", prefixes[-1] if prefixes else "")
    token = None
    if text_of(root, "IsTruncated") == "true":
        if count and not last:
            raise ValueError("its entries have no keys")
        # Without a token the listing still continues after its last key.
        token = text_of(root, "NextContinuationToken") or last or None
    objects = [info for info in objects if info.key.startswith(prefix)]
    prefixes = [one for one in prefixes if one.startswith(prefix) and one != prefix]
    return ListPage(objects, prefixes, token, last, count - len(objects) - len(prefixes))


def _objects(entries: list[str], is_encoded: bool) -> list[ObjectInfo]:
    """Parse entries all at once, or one by one if a field can't be used."""
    text = "".join(entries)
    keys, sizes, etags, times, classes = (field.findall(text) for field in _FIELDS)
    if "&" in text:
        # The two usual encodings of ETags' quotes, replaced at once for speed.
        etags = [etag.replace("&quot;", '"').replace("&#34;", '"') for etag in etags]
        keys, etags = (
            [unescape(one) if "&" in one else one for one in each] for each in (keys, etags)
        )
    if is_encoded and ("%" in text or "+" in text):
        keys = [decoded(key, is_encoded) for key in keys]
    known = {name: sys.intern(usable(unescape(name)) or "STANDARD") for name in set(classes)}
    storage_classes = [known[name] for name in classes] or ["STANDARD"] * len(keys)
    try:
        if not _QUOTED.fullmatch("\n".join([*etags, ""])):
            etags = list(map(quoted, etags))
        values = list(map(size_of, sizes)), etags, map(nanoseconds, times)
        if {len(keys), len(sizes), len(etags), len(times), len(storage_classes)} == {len(entries)}:
            return list(map(ObjectInfo, keys, *values, storage_classes))
    except (StoreError, ValueError):
        pass
    if len(entries) == 1:
        return [ObjectInfo(keys[0] if keys else "", 0, "", 0)]
    return [one for entry in entries for one in _objects([entry], is_encoded)]


def usable(value: str | None) -> str | None:
    """Return `value`, which an answer gave, if a request's header can carry it; else None."""
    return value if value and _VALUE.fullmatch(value) else None


def size_of(text: str) -> int:
    """Parse an object's size; raise a ValueError if it is not valid."""
    size = int(text)
    if not 0 <= size <= MOST_64:
        raise ValueError(f"no object has {size} bytes")
    return size


def quoted(etag: str) -> str:
    """Return an ETag in quotes, which some servers leave out, and without a weak ETag's mark `W/`.

    S3's ETags are strong; some proxies weaken them (`W/"…"`), but not in all answers.

    Raises:
        StoreError: no request could carry the ETag.
    """
    etag = etag.removeprefix("W/")
    etag = etag if etag.startswith('"') else f'"{etag}"'
    if not _ETAG.fullmatch(etag):
        raise StoreError(f"S3 gives an ETag that can't be used: {etag:.40}")
    return etag


def decoded(text: str, is_encoded: bool) -> str:
    """Return the key in an element's text, which is URL-encoded if `is_encoded`."""
    # Encoded, a plus sign stands for a space; a plus itself is %2B.
    return unquote_plus(text) if is_encoded and ("%" in text or "+" in text) else text


@lru_cache(maxsize=1024)
def nanoseconds(text: str) -> int:
    """Parse a time like 2026-11-21T04:15:07.000Z to whole seconds, in ns since the epoch.

    Some stores (Ceph's gateway) give fractions in listings. The answers to HEAD and GET have no
    fractions, so an object would have two different times.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return whole_seconds(moment)


def whole_seconds(moment: datetime) -> int:
    """Return a time in ns since the epoch, in whole seconds, clipped to 64 bits.

    Servers that do not know a time give the year 1, or 9999.
    """
    return max(-MOST_64, min(MOST_64, int(moment.timestamp()) * 1_000_000_000))


def text_of(element: ElementTree.Element, name: str) -> str:
    """Return the text of an element's child, or "" if there is none."""
    return element.findtext(f"{{*}}{name}") or ""
