"""Requests without botocore's ceremony.

botocore takes two milliseconds of Python for each request: parameters,
endpoint rules, events, parsers. Where a user waits for hundreds of them (a
walk through small directories, the copies of a rename, the parts of an upload)
that is half of the time. Only the first LIST goes through botocore, which
knows about regions, addressing and access points; what it sent (the address,
the scope of the signature) is the pattern for the rest. They are signed here
(sigv4.py) and sent through its connections, with its proxies and
certificates: by ourselves if one is open (exchange.py). An answer that asks for
anything but patience (a redirect, a bad request) has the caller send the
request through botocore.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

from urllib3.exceptions import HTTPError

from fusefs.store.errors import AttemptError, Failure, UnreachableError, from_body
from fusefs.store.http import async_exchange, exchange
from fusefs.store.http.exchange import Answer, RequestBody
from fusefs.store.http.sigv4 import Signer

if TYPE_CHECKING:
    from botocore.credentials import Credentials

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")
# What botocore added that does not depend on the request.
_KEPT_HEADERS = ("user-agent", "x-amz-request-payer")
# A server that has no use for the body says so before it is sent.
_WITH_BODY = {"expect": "100-continue"}
# Bodies of at most so many bytes are sent without asking whether they are wanted.
_SMALL = 128 << 10
_NOT_IN_HEADERS = re.compile("[\\r\\n\\0]")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How botocore asked, to the path of the bucket; `signer` is None if it did not sign.

    `pool` has urllib3's connections; None if they are to a proxy that wants to know more.
    """

    origin: str
    path: str
    headers: dict[str, str]
    signer: Signer | None
    pool: Any


class Direct:
    """Asks one bucket through one boto3 client, from any number of threads."""

    def __init__(self, client: Any, credentials: Credentials | None) -> None:
        self._client = client
        self._credentials = credentials
        self._sent: _Pattern | None = None
        self._pattern: _Pattern | None = None  # of a request that was answered
        client.meta.events.register("before-send.s3.ListObjectsV2", self._note_sent)

    def learn(self) -> None:
        """Ask like the last LIST of botocore's from now on: it was answered."""
        self._pattern = self._sent

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
            AttemptError: S3 said no.
            Exception: whatever botocore raises.
        """
        pattern = self._pattern
        if pattern is None:
            return None
        target, sent = self._signed(
            pattern, method, key, query, headers or {}, None if body is None else len(body)
        )
        answer = None
        if pattern.pool is not None and (body is None or len(body) <= _SMALL):
            answer = self._exchange(pattern, method, target, sent, body)
        if answer is None:
            answer = self._through_botocore(method, pattern.origin + target, sent, body)
        return answer if self._is_done(answer) else None

    def download(
        self, key: str, headers: Mapping[str, str], size: int,
        begin: Callable[[Mapping[str, str]], None], take: Callable[[memoryview], None],
    ) -> bool:  # fmt: skip
        """Have `size` bytes of an object's handed on to `take`. Blocks.

        False if others should ask: through a proxy, TLS, where botocore has not
        shown how, or the server does not say how much it sends. `begin` gets the
        headers first, with names in lower case.

        Raises:
            AttemptError: S3 said no.
            Exception: whatever botocore raises, or `begin` and `take`.
        """
        pattern = self._pattern
        if pattern is None or pattern.pool is None or not pattern.origin.startswith("http:"):
            return False
        target, sent = self._signed(pattern, "GET", key, None, headers, None)
        request = _head("GET", target, sent, 0)
        try:
            answer = exchange.download(
                pattern.pool, request, size, lambda head: begin(head.headers), take
            )
        except (OSError, exchange.WireError, HTTPError) as error:
            raise _as_botocore(error, pattern.origin) from error
        return answer is not None and self._is_done(answer)

    @staticmethod
    def _is_done(answer: Answer) -> bool:
        """Whether S3 did it; if not, botocore should ask.

        Raises:
            AttemptError: S3 said no.
        """
        if answer.status < 300:
            return True
        text = answer.content.decode(errors="replace")
        failure = from_body(answer.status, text, answer.headers.get("x-amz-request-id", ""))
        if answer.status < 401 and not failure.is_retryable:
            return False
        raise AttemptError(failure)

    async def send_now(
        self, method: str, key: str, *, headers: Mapping[str, str],
        body: bytes | bytearray | None = None, size: int = 0,
    ) -> Answer | None:  # fmt: skip
        """Send one small request from the event loop; return the answer, which tells an ETag.

        That of a DELETE tells by its status that it is done.
        `size` is how many bytes it asks for.

        None if there is no open connection for it, or something to wait for.

        Raises:
            AttemptError: it was sent in vain, as far as is known.
        """
        pattern = self._pattern
        if pattern is None or pattern.pool is None or self._is_to_renew():
            return None
        content = b"" if body is None else body
        body_size = None if body is None else len(body)
        target, sent = self._signed(pattern, method, key, None, headers, body_size)
        head = _head(method, target, sent, len(content))
        try:
            answer = await async_exchange.exchange(
                pattern.pool, head, content, is_head=method == "HEAD", size=size
            )
        except (OSError, exchange.WireError) as error:
            failure = Failure(UnreachableError, str(error) or "no answer", is_retryable=True)
            raise AttemptError(failure) from error
        is_told = method == "DELETE" or answer is None or _tells_etag(answer)
        if answer is not None and (answer.status >= 300 or not is_told):
            text = answer.content.decode(errors="replace")
            request_id = answer.headers.get("x-amz-request-id", "")
            failure = from_body(answer.status, text, request_id)
            if answer.status < 300 and not failure.code:
                sentence = "S3 did not say what it did"
                failure = Failure(UnreachableError, sentence, is_retryable=True)
            raise AttemptError(failure)
        return answer

    def _is_to_renew(self) -> bool:
        """Whether to ask for the credentials would ask somebody far away."""
        is_needed = getattr(self._credentials, "refresh_needed", None)
        return is_needed is not None and is_needed()

    def _signed(
        self, pattern: _Pattern, method: str, key: str, query: Mapping[str, Any] | None,
        headers: Mapping[str, str], size: int | None,
    ) -> tuple[str, dict[str, str]]:  # fmt: skip
        """The target and the headers of a request with a body of `size` bytes (None: without)."""
        target = f"{pattern.path.rstrip('/')}/{quote(key, safe='/~')}" if key else pattern.path
        search = _quoted(query) if query else ""
        sent = {**pattern.headers, **headers}
        if size is not None and size > _SMALL:
            sent |= _WITH_BODY
        if pattern.signer is not None and self._credentials is not None:
            sent = pattern.signer.sign(
                method, target, search, sent, self._credentials.get_frozen_credentials(),
                has_body=size is not None,
            )  # fmt: skip
        if _NOT_IN_HEADERS.search("".join(sent.values())):
            raise ValueError("a header would have several lines")
        return f"{target}?{search}" if search else target, sent

    def _exchange(
        self, pattern: _Pattern, method: str, target: str, headers: dict[str, str],
        body: RequestBody | None,
    ) -> Answer | None:  # fmt: skip
        """Send a request by ourselves; None if no connection is open."""
        content = body.whole() if body is not None else b""
        head = _head(method, target, headers, len(content))
        try:
            return exchange.exchange(pattern.pool, head, content, is_head=method == "HEAD")
        except (OSError, exchange.WireError) as error:
            raise _as_botocore(error, pattern.origin) from error

    def _through_botocore(
        self, method: str, url: str, headers: dict[str, str], body: RequestBody | None
    ) -> Answer:
        """Send a request through botocore's connections, of which it opens a new one if need be."""
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, url, headers, body)
        # botocore offers no public way to its connections.
        answer = self._client._endpoint.http_session.send(request.prepare())
        names = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(answer.status_code, names, answer.content)

    def _note_sent(self, request: Any, **_: Any) -> None:
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        scope = _SCOPE.match(headers.get("authorization", ""))
        is_signed = scope is not None or self._credentials is None
        # Other kinds of signatures (of directory buckets, say) stay botocore's.
        self._sent = None
        if is_signed:
            address = urlsplit(request.url)
            self._sent = _Pattern(
                f"{address.scheme}://{address.netloc}",
                address.path or "/",
                {name: headers[name] for name in _KEPT_HEADERS if name in headers}
                | {"host": _host(address), "accept-encoding": "identity"},
                Signer(scope[1], scope[2]) if scope else None,
                self._pool(request.url),
            )

    def _pool(self, url: str) -> Any:
        session = self._client._endpoint.http_session
        proxy = session._proxy_config.proxy_url_for(url)
        if proxy and url.startswith("http:"):
            return None
        return session._get_connection_manager(url, proxy).connection_from_url(url)


@cache
def unsigned_body() -> dict[str, Any]:
    """What keeps botocore's signer from hashing a body, as the context of a request.

    By itself it does without only where there is a checksum that it has
    computed itself, and TLS. The SHA256 takes longer than all the rest of an
    upload, here and in the server.
    """
    from botocore.config import Config

    return {"client_config": Config(s3={"payload_signing_enabled": False})}


def _tells_etag(answer: Answer) -> bool:
    """Whether it says what was done: of a copy in the document, of others in a header."""
    return bool(answer.headers.get("etag")) or b"<ETag>" in answer.content


def _head(method: str, target: str, headers: Mapping[str, str], size: int) -> bytes:
    """A request up to its body."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    if method == "PUT":
        lines.append(f"content-length: {size}\r\n")
    return f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


def _quoted(query: Mapping[str, Any]) -> str:
    """A query as it is signed: by its names."""
    quoted = ((quote(name, safe=""), quote(str(query[name]), safe="")) for name in query)
    return "&".join(f"{name}={value}" for name, value in sorted(quoted))


def _host(address: SplitResult) -> str:
    """The header `Host`, as clients send and sign it: without the usual port."""
    usual = {"http": 80, "https": 443}[address.scheme]
    return address.netloc.removesuffix(f":{usual}").rpartition("@")[2]


def _as_botocore(error: Exception, url: str) -> Exception:
    """What botocore would raise."""
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

    kind = ReadTimeoutError if isinstance(error, TimeoutError) else ConnectionClosedError
    return kind(endpoint_url=url, error=error)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
