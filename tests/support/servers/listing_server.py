"""An S3 server that only lists: generated keys, of which no object can be read.

It answers ListObjectsV2 (prefix, delimiter, start-after, max-keys,
continuation-token, encoding-type=url) unsigned and in-process, so that a
directory of a hundred thousand objects costs nothing to make. Requests for an
object are answered with the error that a test has set.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, urlsplit

PAGE = 1000
SIZE = 100


class ListingServer:
    """Lists the same keys for every bucket; each object has `SIZE` bytes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = sorted(keys, key=str.encode)
        self.lists = 0
        self.refusal = (404, "NoSuchKey")  # the answer for any object
        self._is_stopped = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[ListingServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()

    def stop(self) -> None:
        """Answer nothing more, and refuse connections; may be called twice."""
        self._is_stopped = True
        self._server.shutdown()
        self._server.server_close()

    def page(self, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], bool]:
        """Keys and common prefixes behind a key, and whether there are more."""
        found: list[str] = []
        index = bisect_right(self.keys, after) if after else 0
        while index < len(self.keys):
            key = self.keys[index]
            index += 1
            if not key.startswith(prefix):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            entry = key if cut < 0 else key[: cut + 1]
            if len(found) == most:
                return found, True
            found.append(entry)
            if cut >= 0:
                index = bisect_right(self.keys, entry + "\U0010ffff")
        return found, False

    def answer(self, query: dict[str, list[str]]) -> bytes:
        def one(name: str, otherwise: str = "") -> str:
            return query.get(name, [otherwise])[0]

        self.lists += 1
        prefix, delimiter = one("prefix"), one("delimiter")
        after = one("continuation-token") or one("start-after")
        entries, is_truncated = self.page(
            prefix, delimiter, after, min(PAGE, int(one("max-keys", str(PAGE))))
        )
        parts = ['<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">']
        parts.append(f"<EncodingType>url</EncodingType><KeyCount>{len(entries)}</KeyCount>")
        parts.append(f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>")
        if is_truncated:
            parts.append(f"<NextContinuationToken>{quote(entries[-1])}</NextContinuationToken>")
        for entry in entries:
            if delimiter and entry.endswith(delimiter) and entry != prefix:
                parts.append(f"<CommonPrefixes><Prefix>{quote(entry)}</Prefix></CommonPrefixes>")
            else:
                parts.append(
                    f"<Contents><Key>{quote(entry)}</Key><Size>{SIZE}</Size>"
                    "<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
                    "<ETag>&quot;0123456789abcdef0123456789abcdef&quot;</ETag>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
        parts.append("</ListBucketResult>")
        return "".join(parts).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if server._is_stopped:
                    self.close_connection = True
                    return
                query = parse_qs(urlsplit(self.path).query)
                status, code = (200, "") if "list-type" in query else server.refusal
                body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
                body = body or server.answer(query)
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
