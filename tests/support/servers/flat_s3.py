"""An S3 server in memory whose keys are plain strings, as AWS's are.

To SeaweedFS a key is a path, so that `a`, `a/` and `a/b` are not three objects. It knows
what a mount of small files sends: GET, HEAD, PUT, COPY, DELETE, DeleteObjects and
ListObjectsV2, with If-Match and If-None-Match, and compares no signature. With
`is_ordered` False it lists in an order of its own, which is no order of the keys, and
knows no `start-after`, as directory buckets do.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

PAGE = 1000
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


class FlatS3:
    """The same objects for every bucket. `lists` counts the pages that were requested."""

    def __init__(self, *, is_ordered: bool = True, page: int = PAGE) -> None:
        self.objects: dict[str, Stored] = {}
        self.lists = 0
        self._is_ordered, self._page = is_ordered, page
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[FlatS3]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

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

    def get(self, key: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
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

    def change(self, key: str, headers: Any, data: bytes) -> tuple[int, dict[str, str], bytes]:
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

    def delete(self, key: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        there = self.objects.get(key)
        if there is not None and headers.get("if-match", there.etag) != there.etag:
            return _error(412, "PreconditionFailed")
        self.objects.pop(key, None)
        return 204, {}, b""

    def delete_many(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        for key in re.findall("<Key>(.*?)</Key>", body.decode()):
            self.objects.pop(unescape(key), None)
        return 200, {}, f"<DeleteResult {_XMLNS}></DeleteResult>".encode()

    def list_page(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.lists += 1
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: list[str] = []
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            entry = key if cut < 0 else key[: cut + 1]
            if not entries or entries[-1] != entry:
                entries.append(entry)
        token = query.get("continuation-token", "")
        if self._is_ordered:
            after = token or query.get("start-after", "")
            entries = [entry for entry in entries if entry > after]
        else:
            entries.sort(key=lambda entry: hashlib.md5(entry.encode()).digest())
            entries = entries[int(token or 0) :]
        most = min(self._page, int(query.get("max-keys", PAGE)))
        page = entries[:most]
        parts = [f"<ListBucketResult {_XMLNS}><EncodingType>url</EncodingType>"]
        parts.append(f"<IsTruncated>{str(len(page) < len(entries)).lower()}</IsTruncated>")
        if len(page) < len(entries):
            following = page[-1] if self._is_ordered else str(int(token or 0) + len(page))
            parts.append(f"<NextContinuationToken>{quote(following)}</NextContinuationToken>")
        for entry in page:
            one = self.objects.get(entry)
            if one is None or (delimiter and entry != prefix and entry.endswith(delimiter)):
                parts.append(f"<CommonPrefixes><Prefix>{quote(entry)}</Prefix></CommonPrefixes>")
                continue
            parts.append(
                f"<Contents><Key>{quote(entry)}</Key><Size>{len(one.data)}</Size>"
                "<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                f"<ETag>{escape(one.etag)}</ETag></Contents>"
            )
        return 200, {}, "".join([*parts, "</ListBucketResult>"]).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                key = unquote(parts.path).lstrip("/").partition("/")[2]
                found = parse_qs(parts.query, keep_blank_values=True)
                query = {name: values[0] for name, values in found.items()}
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.command in ("GET", "HEAD") and key:
                    status, headers, data = server.get(key, self.headers)
                elif self.command == "GET" and "list-type" in query:
                    status, headers, data = server.list_page(query)
                elif self.command == "PUT" and key and not query:
                    status, headers, data = server.change(key, self.headers, body)
                elif self.command == "DELETE" and key:
                    status, headers, data = server.delete(key, self.headers)
                elif self.command == "POST" and "delete" in query:
                    status, headers, data = server.delete_many(body)
                elif self.command == "HEAD":
                    status, headers, data = 200, {}, b""
                else:
                    status, headers, data = _error(501, "NotImplemented")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code></Error>".encode()
