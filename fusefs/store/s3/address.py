"""Requests of one bucket: their description (`Call`), and the bucket's address (`Address`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from fusefs.store.customer_key import COPY_SOURCE
from fusefs.store.engine.engine import Deadlines, FileBody, FileSink, MemorySink, Request, Route
from fusefs.store.http.proxies import PORTS
from fusefs.store.http.sigv4 import EMPTY, UNSIGNED, Signer
from fusefs.store.interface import LARGE
from fusefs.store.s3.settings import S3Settings

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

# A listing of a thousand keys of the longest kind has 4 MiB.
MOST_CONTENT = 16 << 20
DOCUMENT = MemorySink(MOST_CONTENT)
# A transfer below LEAST_RATE bytes a second, over PACE_WINDOW_S seconds, is given up.
LEAST_RATE, PACE_WINDOW_S = float(1 << 10), 30.0
# The longest attempt of a request whose answer is no object. S3 begins the answer to a change that
# takes minutes (a copy) at once, and sends blanks until the change is done.
ATTEMPT_LIMIT_S = 960.0
# Readers of a file into which an answer is written are woken once per PIECE bytes.
PIECE = 1 << 20
_NOTHING: Mapping[str, Any] = {}


# A tuple for speed: each small file that is fetched makes one.
class Call(NamedTuple):
    """One request to the bucket or, with a key, to an object, before it is signed.

    `operation` names the request in the log and in counters. Names of headers are in lower case. A
    `document` is a short body, which the signature covers; a checksum of any other `body` is among
    the headers.
    """

    operation: str
    method: str
    key: str = ""
    query: Mapping[str, Any] = _NOTHING
    headers: Mapping[str, str] = _NOTHING
    body: bytes | bytearray | FileBody | None = None
    document: bytes | None = None
    sink: MemorySink | FileSink = DOCUMENT

    @property
    def is_large(self) -> bool:
        """True if the request reads more than LARGE bytes into a file, or sends a file."""
        has_long_answer = isinstance(self.sink, FileSink) and self.sink.length > LARGE
        return has_long_answer or isinstance(self.body, FileBody)

    @property
    def makes_object(self) -> bool:
        """True if the request creates an object (PUT, copy) or a multipart upload."""
        if self.method == "POST":
            return "uploads" in self.query
        return self.method == "PUT" and not self.query


class Address:
    """The address of a bucket, and the headers that all its requests share."""

    def __init__(self, url: str, settings: S3Settings, signer: Signer | None, route: Route) -> None:
        """`url` is the bucket's URL; `signer` is None if requests are not signed."""
        parts = urlsplit(url)
        server = parts.netloc.rpartition("@")[2]
        self.origin = f"{parts.scheme}://{server}"
        self.route = route
        self._path = parts.path or "/"
        # The header Host as clients send and sign it: without the usual port.
        self._host = server.removesuffix(f":{PORTS[parts.scheme]}")
        self._signer = signer
        self._settings = settings
        self._headers = {"user-agent": "fusefs", "accept-encoding": "identity"}
        if settings.requester_pays:
            self._headers["x-amz-request-payer"] = "requester"
        self._write_headers = settings.write_options.headers()

    def request(
        self, call: Call, credentials: ReadOnlyCredentials | None, *, is_fresh: bool = False
    ) -> Request:
        """Return the engine's request for `call`, signed unless anonymous.

        With `is_fresh` the engine opens a new connection for the request.

        Raises:
            ValueError: a value of the call can't be sent in a header.
        """
        key = call.key
        target = f"{self._path.rstrip('/')}/{quote(key, safe='/~')}" if key else self._path
        search = urlencode(sorted(call.query.items()), quote_via=quote)
        headers = {**self._headers, **call.headers}
        if call.makes_object:
            headers = {**self._write_headers, **headers}
        customer_key = self._settings.customer_key
        if customer_key is not None and key and call.method != "DELETE":
            headers |= customer_key.headers(is_copy=COPY_SOURCE in headers)
        body = call.body if call.document is None else call.document
        if self._signer is not None and credentials is not None:
            payload = EMPTY if body is None else UNSIGNED
            if call.document is not None:
                payload = hashlib.sha256(call.document).hexdigest()
            headers["host"] = self._host
            headers = self._signer.sign(call.method, target, search, headers, credentials, payload)
            del headers["host"]
        if body is None and call.method in ("PUT", "POST"):
            body = b""
        # While a change takes minutes, the server sends a blank now and then.
        moves_bytes = call.method == "GET" or call.body is not None
        deadlines = Deadlines(
            self._settings.connect_timeout_s,
            self._settings.read_timeout_s,
            LEAST_RATE if moves_bytes else 0.0,
            PACE_WINDOW_S,
            0.0 if call.is_large or call.body is not None else ATTEMPT_LIMIT_S,
        )
        return Request(
            call.method,
            f"{self.origin}{target}?{search}" if search else f"{self.origin}{target}",
            headers.items(),
            body,
            call.sink,
            self.route,
            deadlines,
            PIECE if isinstance(call.sink, FileSink) and call.sink.path is None else 0,
            is_fresh,
        )
