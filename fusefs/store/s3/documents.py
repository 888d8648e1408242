"""The small XML documents of S3's requests and answers, except listings of objects.

S3 begins the answer to a slow request before it knows the result: an answer with status 200 may
contain an error, or no document. Functions that read answers then raise StoreError.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import StoreError, UnreachableError, UnsupportedError, from_body
from fusefs.store.interface import Part, PendingUpload
from fusefs.store.s3.list import decoded, nanoseconds, quoted, text_of

T = TypeVar("T")

ODD_LISTING = "this server's listings make no sense, or do not go on"
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
# XML parsers turn other line ends into line feeds. (xml.sax.saxutils imports half of urllib.)
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;", "\n": "&#10;"})


def no_result() -> StoreError:
    """Return the error for an answer with status 200 that does not say what was done."""
    return UnreachableError("S3 did not say what it did", is_retryable=True)


def etag_in(text: str | None) -> str:
    """Return the quoted ETag in `text`, which an answer to a change gives.

    Raises:
        StoreError: `text` is empty, or no request could carry the ETag.
    """
    if not text:
        raise no_result()
    return quoted(text)


def read(answer: Completion, tag: str) -> Element:
    """Return the root of an answer's document.

    Raises:
        StoreError: the document is an error, or has another root than `tag`.
    """
    try:
        root = ElementTree.fromstring(answer.body.strip())
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # also of odd encodings
        raise no_result() from error
    found = root.tag.rpartition("}")[2]
    if found == "Error":
        raise from_body(500, answer.body.decode(errors="replace"))
    if found != tag:
        raise no_result()
    return root


def completion(parts: Iterable[Part]) -> bytes:
    """Return the document that completes an upload of these parts."""
    return _written("CompleteMultipartUpload", "".join(_part(part) for part in parts))


def _part(part: Part) -> str:
    checksum = f"<ChecksumCRC32>{part.checksum}</ChecksumCRC32>" if part.checksum else ""
    number, etag = part.number, _escaped(part.etag)
    return f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>{checksum}</Part>"


def deletion(keys: Iterable[str], etags: Mapping[str, str]) -> bytes:
    """Return the document that deletes keys, those in `etags` only if they have that ETag."""
    objects = "".join(_object(key, etags.get(key)) for key in keys)
    return _written("Delete", f"{objects}<Quiet>true</Quiet>")


def _object(key: str, etag: str | None) -> str:
    condition = f"<ETag>{_escaped(etag)}</ETag>" if etag is not None else ""
    return f"<Object><Key>{_escaped(key)}</Key>{condition}</Object>"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPED)


def _written(tag: str, content: str) -> bytes:
    return f'<{tag} xmlns="{_NAMESPACE}">{content}</{tag}>'.encode()


def undeleted(answer: Completion) -> list[tuple[str, str]]:
    """Return the keys that were not deleted, each with its error code."""
    root = read(answer, "DeleteResult")
    return [(text_of(one, "Key"), text_of(one, "Code")) for one in root.iterfind("{*}Error")]


def upload_id(answer: Completion) -> str:
    """Return the id of a newly created upload; raise StoreError if the answer has no id."""
    found = text_of(read(answer, "InitiateMultipartUploadResult"), "UploadId")
    if not found:
        raise no_result()
    return found


def parts(answer: Completion) -> tuple[list[Part], dict[str, str] | None]:
    """Return one page of an upload's parts, and the next page's query parameters or None.

    Raises:
        StoreError: the answer is no page of parts, or lacks the marker of the next page.
    """

    def part(one: Element) -> Part:
        number, size = int(text_of(one, "PartNumber")), int(text_of(one, "Size"))
        return Part(number, size, quoted(text_of(one, "ETag")), text_of(one, "ChecksumCRC32"))

    root = read(answer, "ListPartsResult")
    return _rows(root, "Part", part), _behind(root, {"part-number-marker": "NextPartNumberMarker"})


def uploads(answer: Completion) -> tuple[list[PendingUpload], dict[str, str] | None]:
    """Return a page of a bucket's uploads, and the next page's parameters or None; see `parts`."""
    root = read(answer, "ListMultipartUploadsResult")
    is_encoded = text_of(root, "EncodingType") == "url"

    def upload(one: Element) -> PendingUpload:
        key, begun_ns = text_of(one, "Key"), nanoseconds(text_of(one, "Initiated"))
        return PendingUpload(decoded(key, is_encoded), text_of(one, "UploadId"), begun_ns)

    markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
    following = _behind(root, markers)
    if following is not None and "key-marker" in following:
        following["key-marker"] = decoded(following["key-marker"], is_encoded)
    return _rows(root, "Upload", upload), following


def _rows(root: Element, tag: str, row: Callable[[Element], T]) -> list[T]:
    try:
        return [row(one) for one in root.iterfind(f"{{*}}{tag}")]
    except ValueError as error:
        raise UnsupportedError(ODD_LISTING) from error


def _behind(root: Element, markers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the query parameters of the page after `root`; None if `root` is the last page.

    `markers` names, for each parameter, the element with its value; StoreError if there is none.
    """
    if text_of(root, "IsTruncated") != "true":
        return None
    following = {name: text for name, tag in markers.items() if (text := text_of(root, tag))}
    if not following:
        raise UnsupportedError(ODD_LISTING)
    return following


def tags(answer: Completion) -> list[tuple[str, str]]:
    """Return an object's tags as pairs of name and value."""
    root = read(answer, "Tagging")
    return [(text_of(tag, "Key"), text_of(tag, "Value")) for tag in root.iterfind(".//{*}Tag")]
