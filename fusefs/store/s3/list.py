"""LIST requests, and their answers (ListObjectsV2), parsed fast.

botocore's own parser takes 69 ms for a page of 1,000 keys, more than the
server needs to make it; an XML parser in C takes 5 ms, most of it for telling
elements apart in Python. A server writes all entries of a page alike, though:
so the first entry tells the order of the elements, a regular expression is
made of it (and kept), and what it finds is worked on column by column. That
reads the page in 1 ms. A page whose entries differ is read by the XML parser, and so is one
of which something can't be used: an entry without a proper size, time or ETag is an object
with the ETag "", which is hidden; one without a key is counted alone.

Keys travel URL-encoded, since XML 1.0 has no control characters. Ceph's
gateway encodes keys and common prefixes, but not the prefix and the key to
start after, which it repeats: those are not needed, and what XML has no way to
write is taken out of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from html import unescape
from itertools import chain, repeat
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import AttemptError, Failure, StoreError, UnreachableError
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.store.s3.address import Call

# How long a request is repeated whose answer is no listing.
GARBLED_TIME_S = 3.0
_FIRST_ENTRY = re.compile(r"<Contents>((?:<\w+>[^<]*</\w+>\s*)+)</Contents>")
_ELEMENT = re.compile(r"<(\w+)>[^<]*</\w+>(\s*)")
# Characters that XML 1.0 has no way to write, as they are and as references.
_NOT_XML = (
    "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]"
    "|&#0*(?:[0-8]|1[124-9]|2[0-9]|3[01]);|&#[xX]0*(?:[0-8bcefBCEF]|1[0-9a-fA-F]);"
)
# Sizes and times are kept in 64 bits, one of them for the sign.
MOST_64 = (1 << 63) - 1
# More than any server has. What it says of an object goes into headers of requests and records.
LONGEST_VALUE = 1024
# What a header can have: visible characters of Latin-1 (RFC 9110, section 8.8.3), and blanks.
_ETAG = re.compile(f"[ -~\xa1-\xff]{{1,{LONGEST_VALUE}}}")
_VALUE = re.compile(f"(?=.{{1,{LONGEST_VALUE}}}$)[!-~]([ -~]*[!-~])?")
_NEEDED = ("Key", "Size", "ETag", "LastModified")
_FIELDS = (*_NEEDED, "StorageClass")


class ListingError(ValueError):
    """An answer that should be a listing is none; `is_final` if the next would not be either."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def list_call(
    prefix: str, delimiter: str, start_after: str, max_keys: int, token: str = ""
) -> Call:
    """Make the request for a page of at most `max_keys` entries; "" is none.

    It is as `Store.list_page`, or goes on from a continuation token.
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


def page_of(answer: Completion, prefix: str) -> ListPage:
    """Read the page in an answer, without what is not below its prefix.

    Raises:
        AttemptError: it is no listing.
    """
    try:
        page = parse(answer.body)
    except ListingError as error:
        # An answer that was cut is whole the next time; what the server itself writes
        # (a key with characters that XML has not) stays as it is.
        failure = Failure(
            UnreachableError,
            str(error),
            is_retryable=not error.is_final,
            longest_s=GARBLED_TIME_S,
        )
        raise AttemptError(failure) from error
    return _only_below(page, prefix)


def _only_below(page: ListPage, prefix: str) -> ListPage:
    """A page without what does not begin with `prefix`, which no server should send."""
    objects = [info for info in page.objects if info.key.startswith(prefix)]
    prefixes = [one for one in page.prefixes if one.startswith(prefix) and one != prefix]
    others = len(page.objects) + len(page.prefixes) - len(objects) - len(prefixes)
    if not others:
        return page
    return replace(page, objects=objects, prefixes=prefixes, unnamed=page.unnamed + others)


def parse(body: bytes) -> ListPage:
    """Read a ListBucketResult.

    Raises:
        ListingError: it is not one.
    """
    try:
        text = body.decode()
        try:
            return _read(text)
        except ElementTree.ParseError:
            legible = re.sub(_NOT_XML, "", text)
            if legible == text or not _is_encoded(text):
                raise
            return _read(legible)
    except (ElementTree.ParseError, IndexError, ValueError) as error:
        # A listing that is there from its beginning to its end stays what it is.
        is_whole = b"<ListBucketResult" in body and body.rstrip().endswith(b"</ListBucketResult>")
        sentence = f"the answer is not a listing: {error}"
        raise ListingError(sentence, is_final=is_whole) from error


def _read(text: str) -> ListPage:
    objects, text = _objects_alike(text) or (None, text)
    return _page(ElementTree.fromstring(text), objects)


def _is_encoded(text: str) -> bool:
    return "<EncodingType>url</EncodingType>" in text


def _page(root: ElementTree.Element, objects: list[ObjectInfo] | None) -> ListPage:
    """The page of a document; its objects are read from it unless they are given."""
    if root.tag.rpartition("}")[2] != "ListBucketResult":
        raise ValueError(f"it is {root.tag!r}")
    is_encoded = text_of(root, "EncodingType") == "url"
    if objects is None:
        objects = [_object(element, is_encoded) for element in root.iterfind("{*}Contents")]
    prefixes = [
        decoded(text_of(element, "Prefix"), is_encoded)
        for element in root.iterfind("{*}CommonPrefixes")
    ]
    count = len(objects) + len(prefixes)
    objects = [info for info in objects if info.key]
    prefixes = [prefix for prefix in prefixes if prefix]
    unnamed = count - len(objects) - len(prefixes)
    last = max(objects[-1].key if objects else "", prefixes[-1] if prefixes else "")
    token = None
    if text_of(root, "IsTruncated") == "true" and last:
        # Without a token the listing still goes on, behind its last key.
        token = text_of(root, "NextContinuationToken") or last
    elif unnamed and text_of(root, "IsTruncated") == "true":
        raise ValueError("its entries have no keys")
    return ListPage(objects, prefixes, token, last, unnamed)


# --- entries that are all alike -------------------------------------------------


def _objects_alike(text: str) -> tuple[list[ObjectInfo], str] | None:
    """The objects of a page and the document without them; None if the entries differ."""
    start = text.find("<Contents>")
    first = _FIRST_ENTRY.match(text, start) if start >= 0 else None
    if first is None:
        return None
    shape = tuple(_ELEMENT.findall(first[1]))
    names = [name for name, _ in shape]
    if len(set(names)) < len(names) or not set(_NEEDED) <= set(names):
        return None
    pattern = _reader(shape)
    rows = pattern.findall(text)
    if len(rows) != text.count("<Contents>"):
        return None
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    is_encoded = _is_encoded(text)
    try:
        objects = _objects_of(columns, is_encoded)
    except (AttemptError, ValueError):  # of a single one, perhaps
        return None
    stop = text.rindex("</Contents>") + len("</Contents>")
    if text.count("</Contents><Contents>", start, stop) == len(rows) - 1:
        rest = text[:start] + text[stop:]
    else:
        rest = pattern.sub("", text)
    return objects, rest


@lru_cache(maxsize=64)
def _reader(shape: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """The expression that reads entries of this shape."""
    # The plus, for not to try less, halves the time.
    elements = (f"<{name}>([^<]*+)</{name}>{space}" for name, space in shape)
    return re.compile(f"<Contents>{''.join(elements)}</Contents>")


def _objects_of(columns: dict[str, tuple[str, ...]], is_encoded: bool) -> list[ObjectInfo]:
    """The objects whose elements have these texts.

    Raises:
        AttemptError, ValueError: of at least one they can't be used.
    """
    keys: Iterable[str] = columns["Key"]
    together = "".join(keys)
    if any(mark in together for mark in "&%+"):
        keys = [decoded(unescaped(key), is_encoded) for key in keys]
    column = columns.get("StorageClass", ())
    known = {text: sys.intern(usable(text) or "STANDARD") for text in set(column)}
    classes = (known[text] for text in column)
    sizes, etags = list(map(int, columns["Size"])), list(map(_etag, columns["ETag"]))
    is_usual = "".join(etags).isascii() and "".join(etags).isprintable()
    if not (all(columns["Key"]) and is_usual and max(map(len, etags)) <= LONGEST_VALUE):
        raise ValueError("one can't be used")
    check_size(min(sizes))
    check_size(max(sizes))
    times = map(nanoseconds, columns["LastModified"])
    return list(map(ObjectInfo, keys, sizes, etags, times, chain(classes, repeat("STANDARD"))))


def _etag(text: str) -> str:
    # The ways in which nearly all servers write it, spelled out for speed.
    plain = text.replace("&#34;", '"').replace("&quot;", '"')
    return plain if plain[:1] == '"' and "&" not in plain else quoted(unescaped(text))


def unescaped(text: str) -> str:
    """The string that an element's text stands for."""
    return unescape(text) if "&" in text else text


# --- entries of any kind --------------------------------------------------------


def _object(element: ElementTree.Element, is_encoded: bool) -> ObjectInfo:
    fields = {child.tag.rpartition("}")[2]: child.text or "" for child in element}
    key = decoded(fields.get("Key", ""), is_encoded)
    try:
        size = int(fields.get("Size", ""))
        check_size(size)
        modified = nanoseconds(fields.get("LastModified", ""))
        etag = quoted(fields.get("ETag", ""))
    except (AttemptError, ValueError):
        return ObjectInfo(key, 0, "", 0)
    return ObjectInfo(key, size, etag, modified, usable(fields.get("StorageClass")) or "STANDARD")


def usable(value: str | None) -> str | None:
    """The value of an answer beside an object's ETag, if a request can have it as well."""
    return value if value and _VALUE.fullmatch(value) else None


def check_size(size: int) -> None:
    """Refuse what no object's size is.

    Raises:
        ValueError: it is none.
    """
    if not 0 <= size <= MOST_64:
        raise ValueError(f"no object has {size} bytes")


def quoted(etag: str) -> str:
    """An ETag in the quotes that some servers leave out, and without what makes it weak.

    S3's are strong; proxies weaken them on the way (`W/"…"`), in some answers and not in others.

    Raises:
        AttemptError: no request could carry it.
    """
    etag = etag.removeprefix("W/")
    etag = etag if etag.startswith('"') else f'"{etag}"'
    if not _ETAG.fullmatch(etag):
        raise AttemptError(Failure(StoreError, f"S3 gives an ETag that can't be used: {etag:.40}"))
    return etag


def decoded(text: str, is_encoded: bool) -> str:
    """The key that an element's text stands for."""
    # Encoded, a plus sign stands for a space; a plus itself is %2B.
    return unquote_plus(text) if is_encoded and ("%" in text or "+" in text) else text


@lru_cache(maxsize=1024)
def nanoseconds(text: str) -> int:
    """2026-11-21T04:15:07.000Z in nanoseconds since the epoch, in whole seconds.

    Some stores (Ceph's gateway) tell fractions in listings. The answers to HEAD
    and GET have none, so with them an object would have two times.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return whole_seconds(moment)


def whole_seconds(moment: datetime) -> int:
    """A moment in ns since the epoch; years that 64 bits have no room for become the nearest.

    Servers without a time say the year 1, or 9999.
    """
    return max(-MOST_64, min(MOST_64, int(moment.timestamp()) * 1_000_000_000))


def text_of(element: ElementTree.Element, name: str) -> str:
    """The text of an element's child; "" if there is none."""
    return element.findtext(f"{{*}}{name}") or ""
