"""Requests without botocore's ceremony.

botocore takes two milliseconds of Python for each request: parameters,
endpoint rules, events, parsers. Where a user waits for hundreds of them (a
walk through small directories, the copies of a rename, the parts of an upload)
that is half of the time. Only the first LIST goes through botocore, which
knows about regions, addressing and access points; what it sent (the address,
the scope of the signature) is the pattern for the rest. Where that is known
(s3/plain.py), no request does. They are signed here
(sigv4.py) and sent over connections of our own (pool.py). An answer that calls
for more than a retry (a redirect, a bad request) has the caller send the
request through botocore.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

from fusefs.store import renewal, unreachable
from fusefs.store.admission.hedging import Hedging
from fusefs.store.customer_key import COPY_SOURCE, CustomerKey
from fusefs.store.errors import AttemptError, Failure, StoreError, UnreachableError, from_body
from fusefs.store.http import async_exchange, exchange
from fusefs.store.http.answers import Answer, WireError
from fusefs.store.http.async_exchange import Late
from fusefs.store.http.exchange import RequestBody
from fusefs.store.http.pool import ConnectionPool, Network
from fusefs.store.http.proxies import PORTS
from fusefs.store.http.server_clock import ServerClock
from fusefs.store.http.sigv4 import Signer
from fusefs.telemetry.s3_requests import note_sent

if TYPE_CHECKING:
    from botocore.credentials import Credentials

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")
# What botocore added that does not depend on the request.
_KEPT_HEADERS = ("user-agent", "x-amz-request-payer")
# A server that has no use for the body says so before it is sent.
_WITH_BODY = {"expect": "100-continue"}
# What S3 encrypts or decrypts for.
_OF_CONTENT = ("GET", "HEAD", "PUT")
# They are sent as Latin-1, of which each line is one header.
_NOT_IN_HEADERS = re.compile("[\\r\\n\\0\u0100-\U0010ffff]")
_UNSENDABLE = Failure(StoreError, "no header of a request can say that")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What botocore's requests have in common; `signer` is None if it did not sign.

    `path` is that of the bucket.
    """

    origin: str
    path: str
    headers: dict[str, str]
    signer: Signer | None
    pool: ConnectionPool


class HttpClient:
    """Sends one bucket's requests, from any number of threads and the event loop."""

    def __init__(
        self,
        credentials: Credentials | None,
        network: Network,
        write_headers: Mapping[str, str],
        customer_key: CustomerKey | None = None,
        clock: ServerClock | None = None,
    ) -> None:
        """`write_headers` go with each request that makes an object, unless it has them itself.

        `customer_key` goes with each request that reads or writes one.
        """
        self._clock = clock or ServerClock()
        self._customer_key = customer_key
        self._write_headers = dict(write_headers)
        self._credentials = credentials
        self._network = network
        self._sent: _Pattern | None = None
        self._pattern: _Pattern | None = None  # of a request that was answered

    def watch(self, client: Any) -> None:
        """Have the LISTs of a client of boto3's show how to send the rest, and count it all."""
        client.meta.events.register("before-send.s3", _note_sent)
        client.meta.events.register("before-send.s3.ListObjectsV2", self._note_sent)

    def begin(self, endpoint: str, bucket: str, region: str, headers: Mapping[str, str]) -> bool:
        """Send requests for a bucket in the path of this endpoint, without any of botocore's first.

        False if its connections are botocore's to make.

        Raises:
            ProxyError: no proxy of its kind can be used.
        """
        address = urlsplit(endpoint)
        origin = f"{address.scheme}://{address.netloc}"
        pool = self._network.pool(origin)
        if pool is None:
            return False
        self._sent = self._pattern = _Pattern(
            origin,
            f"/{bucket}",
            {**headers, "host": _host(address), "accept-encoding": "identity"},
            Signer(region, "s3", self._clock) if self._credentials is not None else None,
            pool,
        )
        return True

    def learn(self) -> None:
        """Send like the last LIST of botocore's from now on: it was answered."""
        self._pattern = self._sent

    def close(self) -> None:
        """Close the connections."""
        if self._pattern is not None:
            self._pattern.pool.close()

    def send(
        self,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: RequestBody | None = None,
    ) -> Answer | None:
        """Send one request and return the answer that says it was done. Blocks.

        None if botocore should send it. The signature does not cover `body`: a
        checksum of it belongs into the headers.

        Raises:
            AttemptError: S3 refused it, or there was no answer.
            Exception: of reading `body`.
        """
        pattern = self._pattern
        if pattern is None:
            return None
        size = None if body is None else len(body)
        offset_s = self._clock.offset_s
        head = self._head(pattern, method, key, query, headers or {}, size)
        note_sent()
        with pattern.pool.connection() as connection:
            try:
                answer, connection.is_reusable = exchange.exchange(
                    connection.sock, head, body, is_head=method == "HEAD"
                )
            except (OSError, WireError) as error:
                raise _unanswered(error, pattern) from error
        return answer if self._is_done(answer, offset_s) else None

    def download(
        self,
        key: str,
        headers: Mapping[str, str],
        size: int,
        begin: Callable[[Mapping[str, str]], None],
        take: Callable[[memoryview], None],
    ) -> bool:
        """Have `size` bytes of an object's handed on to `take`. Blocks.

        False if botocore should send it. `begin` gets the headers first, with
        names in lower case.

        Raises:
            AttemptError: S3 refused it, or the answer broke off.
            Exception: whatever `begin` and `take` raise.
        """
        pattern = self._pattern
        if pattern is None:
            return False
        offset_s = self._clock.offset_s
        request = self._head(pattern, "GET", key, None, headers, None)
        note_sent()
        with pattern.pool.connection() as connection:
            try:
                answer, connection.is_reusable = exchange.download(
                    connection.sock, request, size, begin, take
                )
            except (OSError, WireError) as error:
                raise _unanswered(error, pattern) from error
        return answer is not None and self._is_done(answer, offset_s)

    async def send_now(
        self,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str],
        body: bytes | bytearray | None = None,
        size: int = 0,
        hedge: Hedging | None = None,
        late: Late | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Answer | None:
        """Send one small request from the event loop; return the answer, which has an ETag.

        That of a DELETE says by its status that it is done. `size` is how many bytes the
        answer's body has; `hedge`, `late` and `begun` are as for `async_exchange.exchange`.

        None if there is no open connection for it, or something to wait for.

        Raises:
            AttemptError: it was sent in vain, as far as is known.
            Exception: whatever `late` raises.
        """
        pattern = self._pattern
        if pattern is None or self._is_to_renew():
            return None
        content = b"" if body is None else body
        offset_s = self._clock.offset_s
        head = self._head(pattern, method, key, None, headers, None if body is None else len(body))
        try:
            answer = await async_exchange.exchange(
                pattern.pool,
                head,
                content,
                is_head=method == "HEAD",
                size=size,
                hedge=hedge,
                late=late,
                begun=begun,
            )
        except (OSError, WireError) as error:
            raise _unanswered(error, pattern) from error
        if answer is None:
            return None
        has_proof = method == "DELETE" or _has_etag(answer)
        if answer.status >= 300 or not has_proof:
            failure = self._failure(answer, offset_s)
            if answer.status < 300 and not failure.code:
                sentence = "S3 did not say what it did"
                failure = Failure(UnreachableError, sentence, is_retryable=True)
            raise AttemptError(failure)
        return answer

    def _is_done(self, answer: Answer, offset_s: float) -> bool:
        """True if S3 did it; if not, botocore should send the request.

        `offset_s` is that of the clock when the request was signed.

        Raises:
            AttemptError: S3 refused it.
        """
        if answer.status < 300:
            return True
        failure = self._failure(answer, offset_s)
        if answer.status < 401 and not failure.is_retryable:
            return False
        raise AttemptError(failure)

    def _failure(self, answer: Answer, offset_s: float) -> Failure:
        text = answer.content.decode(errors="replace")
        failure = from_body(answer.status, text, answer.headers.get("x-amz-request-id", ""))
        is_off = self._clock.corrects(answer.status, failure.code, answer.headers, offset_s)
        if is_off and self._credentials is not None:
            return replace(failure, is_retryable=True)
        return failure

    def _is_to_renew(self) -> bool:
        """Whether a signature has to wait for other credentials, which may take a request."""
        return renewal.is_due(self._credentials)

    def _head(
        self,
        pattern: _Pattern,
        method: str,
        key: str,
        query: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        size: int | None,
    ) -> bytes:
        """A signed request up to its body, which has `size` bytes (None: there is none)."""
        target = f"{pattern.path.rstrip('/')}/{quote(key, safe='/~')}" if key else pattern.path
        search = _quoted(query) if query else ""
        sent = {**pattern.headers, **headers}
        if method == "PUT" and not query:  # an object's, not a part's
            sent = self._write_headers | sent
        if key and self._customer_key is not None and method in _OF_CONTENT:
            sent |= self._customer_key.headers(is_copy=COPY_SOURCE in sent)
        if size is not None and size > exchange.SMALL:
            sent |= _WITH_BODY
        if _NOT_IN_HEADERS.search("".join(sent.values())):
            raise AttemptError(_UNSENDABLE)
        if pattern.signer is not None and self._credentials is not None:
            credentials = self._credentials.get_frozen_credentials()
            sent = pattern.signer.sign(
                method, target, search, sent, credentials, has_body=size is not None
            )
        lines = [f"{name}: {value}\r\n" for name, value in (sent | pattern.pool.headers).items()]
        if method == "PUT":
            lines.append(f"content-length: {size or 0}\r\n")
        target = pattern.pool.target_prefix + target + (f"?{search}" if search else "")
        return f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")

    def _note_sent(self, request: Any, **_: Any) -> None:
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        scope = _SCOPE.match(headers.get("authorization", ""))
        is_signed = scope is not None or self._credentials is None
        address = urlsplit(request.url)
        origin = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
        last = self._sent
        is_same = last is not None and last.origin == origin
        pool = last.pool if last is not None and is_same else self._network.pool(origin)
        # Other kinds of signatures (of directory buckets, say) stay botocore's.
        self._sent = None
        if is_signed and pool is not None:
            self._sent = _Pattern(
                origin,
                address.path or "/",
                {name: headers[name] for name in _KEPT_HEADERS if name in headers}
                | {"host": _host(address), "accept-encoding": "identity"},
                Signer(scope[1], scope[2], self._clock) if scope else None,
                pool,
            )


@cache
def unsigned_body() -> dict[str, Any]:
    """What keeps botocore's signer from hashing a body, as the context of a request.

    By itself it does without only where there is a checksum that it has
    computed itself, and TLS. The SHA256 takes longer than all the rest of an
    upload, here and in the server.
    """
    from botocore.config import Config

    return {"client_config": Config(s3={"payload_signing_enabled": False})}


def _note_sent(**_: Any) -> None:
    note_sent()


def _unanswered(error: Exception, pattern: _Pattern) -> AttemptError:
    """A request was sent on an open connection, and no whole answer came."""
    if isinstance(error, TimeoutError):
        pattern.pool.close_idle()  # the network may have lost all of them without a word
    cause = unreachable.of_exchange(error, pattern.origin)
    return AttemptError(Failure(UnreachableError, cause.sentence, is_retryable=cause.may_pass))


def _has_etag(answer: Answer) -> bool:
    """Whether it has the proof that it was done: of a copy in the document, else in a header."""
    return bool(answer.headers.get("etag")) or b"<ETag>" in answer.content


def _quoted(query: Mapping[str, Any]) -> str:
    """A query as it is signed: by its names."""
    quoted = ((quote(name, safe=""), quote(str(query[name]), safe="")) for name in query)
    return "&".join(f"{name}={value}" for name, value in sorted(quoted))


def _host(address: SplitResult) -> str:
    """The header `Host`, as clients send and sign it: without the usual port."""
    return address.netloc.removesuffix(f":{PORTS[address.scheme]}").rpartition("@")[2]


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
