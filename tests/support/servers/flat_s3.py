"""An S3 server in memory whose keys are plain strings, as AWS's are.

To SeaweedFS a key is a path, so that `a`, `a/` and `a/b` are not three objects. It knows
what a mount of small files sends: GET, HEAD, PUT, COPY, DELETE, DeleteObjects and
ListObjectsV2, with If-Match and If-None-Match, and compares no signature. With
`is_ordered` False it lists in an order of its own, which is no order of the keys, and
knows no `start-after`, as directory buckets do. With `has_gaps` each listing begins with
a page without entries, as in buckets where many objects were deleted.
"""

import hashlib
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from urllib.parse import quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.support.servers.in_process import Answer, Headers, InProcessServer, single_values

PAGE = 1000
# Of each object of a `ListingServer`.
SIZE = 100
MODIFIED = "Fri, 02 Jan 2026 03:04:05 GMT"
_XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@dataclass(frozen=True)
class Stored:
    """One object; `headers` are those that come back with it."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class FlatS3(InProcessServer):
    """The same objects for every bucket. `lists` counts the pages that were requested."""

    def __init__(self, *, is_ordered: bool = True, page: int = PAGE) -> None:
        super().__init__()
        self.objects: dict[str, Stored] = {}
        self.lists = 0
        self.has_gaps = False
        self._is_ordered, self._page = is_ordered, page
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes = b"") -> None:
        self.objects[key] = Stored(data)

    def contents(self) -> dict[str, bytes]:
        """What there is, without empty markers."""
        return {
            key: one.data
            for key, one in sorted(self.objects.items())
            if one.data or not key.endswith("/")
        }

    # Requests: each returns a status, headers and a body.

    def get(self, key: str, headers: Headers) -> Answer:
        found = self.objects.get(key)
        if found is None:
            return _error(404, "NoSuchKey")
        if headers.get("if-match", found.etag) != found.etag:
            return _error(412, "PreconditionFailed")
        shown = {"ETag": found.etag, "Last-Modified": MODIFIED, **found.headers}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if asked is None:
            return 200, shown, found.data
        start, stop = int(asked[1]), min(int(asked[2] or 1 << 62) + 1, len(found.data))
        shown["Content-Range"] = f"bytes {start}-{stop - 1}/{len(found.data)}"
        return 206, shown, found.data[start:stop]

    def head(self, key: str, headers: Headers) -> Answer:
        return self.get(key, headers)

    def change(self, key: str, headers: Headers, data: bytes) -> Answer:
        with self._lock:
            there = self.objects.get(key)
            if there is not None and headers.get("if-none-match") == "*":
                return _error(412, "PreconditionFailed")
            if "if-match" in headers and there is None:
                return _error(404, "NoSuchKey")
            if there is not None and headers.get("if-match", there.etag) != there.etag:
                return _error(412, "PreconditionFailed")
            kept = {
                name: value
                for name, value in headers.items()
                if name.lower().startswith("x-amz-meta-") or name.lower() == "content-type"
            }
            origin = headers.get("x-amz-copy-source")
            if origin is None:
                made = self.objects[key] = Stored(data, kept)
                return 200, {"ETag": made.etag}, b""
            source = self.objects.get(unquote(origin).lstrip("/").partition("/")[2])
            if source is None:
                return _error(404, "NoSuchKey")
            if headers.get("x-amz-copy-source-if-match", source.etag) != source.etag:
                return _error(412, "PreconditionFailed")
            is_replaced = headers.get("x-amz-metadata-directive") == "REPLACE"
            made = Stored(source.data, kept if is_replaced else source.headers)
            self.objects[key] = made
        told = f"<ETag>{made.etag}</ETag><LastModified>2026-01-02T03:04:05Z</LastModified>"
        return 200, {}, f"<CopyObjectResult {_XMLNS}>{told}</CopyObjectResult>".encode()

    def delete(self, key: str, headers: Headers) -> Answer:
        there = self.objects.get(key)
        if there is not None and headers.get("if-match", there.etag) != there.etag:
            return _error(412, "PreconditionFailed")
        self.objects.pop(key, None)
        return 204, {}, b""

    def delete_many(self, body: bytes) -> Answer:
        for key in re.findall("<Key>(.*?)</Key>", body.decode()):
            self.objects.pop(unescape(key), None)
        return 200, {}, f"<DeleteResult {_XMLNS}></DeleteResult>".encode()

    def list_page(self, query: dict[str, str]) -> Answer:
        self.lists += 1
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token = query.get("continuation-token", "")
        if self.has_gaps and not token:
            behind = quote(query.get("start-after", "!"))
            told = f"<NextContinuationToken>{behind}</NextContinuationToken>"
            told = f"<IsTruncated>true</IsTruncated>{told}"
            return 200, {}, f"<ListBucketResult {_XMLNS}>{told}</ListBucketResult>".encode()
        most = min(self._page, int(query.get("max-keys", PAGE)))
        if self._is_ordered:
            after = token or query.get("start-after", "")
            found = list(islice(self._entries(prefix, delimiter, after), most + 1))
            following = found[most - 1] if len(found) > most else ""
        else:
            at = int(token or 0)
            found = sorted(self._entries(prefix, delimiter, ""), key=_scattered)[at:]
            following = str(at + most)
        is_truncated = len(found) > most
        parts = [f"<ListBucketResult {_XMLNS}><EncodingType>url</EncodingType>"]
        parts.append(f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>")
        if is_truncated:
            parts.append(f"<NextContinuationToken>{quote(following)}</NextContinuationToken>")
        for entry in found[:most]:
            if delimiter and entry != prefix and entry.endswith(delimiter):
                parts.append(f"<CommonPrefixes><Prefix>{quote(entry)}</Prefix></CommonPrefixes>")
                continue
            one = self.objects[entry]
            parts.append(
                f"<Contents><Key>{quote(entry)}</Key><Size>{len(one.data)}</Size>"
                "<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                f"<ETag>{escape(one.etag)}</ETag></Contents>"
            )
        return 200, {}, "".join([*parts, "</ListBucketResult>"]).encode()

    def _keys(self) -> list[str]:
        return sorted(self.objects)

    def _entries(self, prefix: str, delimiter: str, after: str) -> Iterator[str]:
        """Keys and common prefixes behind a key, in their order."""
        keys = self._keys()
        at = bisect_left(keys, max(prefix, after))
        while at < len(keys) and keys[at].startswith(prefix):
            cut = keys[at].find(delimiter, len(prefix)) if delimiter else -1
            entry = keys[at] if cut < 0 else keys[at][: cut + 1]
            at = at + 1 if cut < 0 else bisect_right(keys, entry + "\U0010ffff", at)
            if entry > after:
                yield entry

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        parts = urlsplit(target)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        query = single_values(parts.query)
        if key and method == "GET":
            return self.get(key, headers)
        if key and method == "HEAD":
            return self.head(key, headers)
        if method == "GET" and "list-type" in query:
            return self.list_page(query)
        if method == "PUT" and key and not query:
            return self.change(key, headers, body)
        if method == "DELETE" and key:
            return self.delete(key, headers)
        if method == "POST" and "delete" in query:
            return self.delete_many(body)
        return (200, {}, b"") if method == "HEAD" else _error(501, "NotImplemented")


class ListingServer(FlatS3):
    """Lists the same keys for every bucket, each of `SIZE` bytes, and hands out no content.

    `refusal` is the answer to each GET.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__()
        self.refusal = (404, "NoSuchKey")
        self._sorted: list[str] = []
        self.objects = dict.fromkeys(sorted(keys), Stored(bytes(SIZE)))

    def add(self, *keys: str) -> None:
        for key in keys:
            self.put(key, bytes(SIZE))

    def get(self, key: str, headers: Headers) -> Answer:
        return _error(*self.refusal)

    def head(self, key: str, headers: Headers) -> Answer:
        return super().get(key, headers)

    def _keys(self) -> list[str]:
        if len(self._sorted) != len(self.objects):  # a hundred thousand are sorted once
            self._sorted = sorted(self.objects)
        return self._sorted


def _scattered(entry: str) -> bytes:
    return hashlib.md5(entry.encode()).digest()


def _error(status: int, code: str) -> Answer:
    return status, {}, f"<Error><Code>{code}</Code></Error>".encode()
