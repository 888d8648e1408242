"""Requests without botocore's ceremony.

botocore takes two milliseconds of Python for each request: parameters,
endpoint rules, events, parsers. Where a user waits for hundreds of them (a
walk through small directories, the copies of a rename, the parts of an upload)
that is half of the time. Only the first LIST goes through botocore, which
knows about regions, addressing and access points; what it sent (the address,
the scope of the signature) is the pattern for the rest. They are signed by
botocore's signer and sent through its connections, with its proxies and
certificates. An answer that asks for anything but patience (a redirect, a bad
request) has the caller send the request through botocore.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from fusefs.store.body import Body
from fusefs.store.errors import from_body
from fusefs.store.stream import AttemptError

if TYPE_CHECKING:
    from botocore.credentials import Credentials

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")
# What botocore added that does not depend on the request.
_KEPT_HEADERS = ("user-agent", "x-amz-request-payer")
# A server that has no use for the body says so before it is sent.
_WITH_BODY = {"Expect": b"100-continue"}


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How botocore asked; `scope` is region and service, None if it did not sign."""

    address: str
    headers: dict[str, str]
    scope: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What S3 answered; `headers` are found in any case."""

    headers: Mapping[str, str]
    content: bytes


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
        body: Body | None = None,
    ) -> Answer | None:
        """Send one request and return the answer that says it was done. Blocks.

        None if botocore should send it. The signature does not cover `body`: a
        checksum of it belongs into the headers.

        Raises:
            AttemptError: S3 said no.
            Exception: whatever botocore raises.
        """
        from botocore.awsrequest import AWSRequest

        pattern = self._pattern
        if pattern is None:
            return None
        url = pattern.address
        if key:
            url = f"{url.rstrip('/')}/{quote(key, safe='/~')}"
        if query:
            url += f"?{urlencode(query, quote_via=quote, safe='')}"
        all_headers: dict[str, str | bytes] = {**pattern.headers, **(headers or {})}
        if body is not None:
            all_headers.update(_WITH_BODY)
        request = AWSRequest(method, url, all_headers, body)
        if body is not None:
            request.context.update(unsigned_body())
        self._sign(request, pattern)
        # botocore offers no public way to its connections.
        answer = self._client._endpoint.http_session.send(request.prepare())
        if answer.status_code < 300:
            return Answer(answer.headers, answer.content)
        request_id = answer.headers.get("x-amz-request-id", "")
        failure = from_body(answer.status_code, answer.text, request_id)
        if answer.status_code < 401 and not failure.is_retryable:
            return None
        raise AttemptError(failure)

    def _note_sent(self, request: Any, **_: Any) -> None:
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        scope = _SCOPE.match(headers.get("authorization", ""))
        is_signed = scope is not None or self._credentials is None
        # Other kinds of signatures (of directory buckets, say) stay botocore's.
        self._sent = None
        if is_signed:
            self._sent = _Pattern(
                request.url.partition("?")[0],
                {name: headers[name] for name in _KEPT_HEADERS if name in headers},
                (scope[1], scope[2]) if scope else None,
            )

    def _sign(self, request: Any, pattern: _Pattern) -> None:
        from botocore.auth import S3SigV4Auth

        if self._credentials is None or pattern.scope is None:
            return
        region, service = pattern.scope
        S3SigV4Auth(self._credentials.get_frozen_credentials(), service, region).add_auth(request)


@cache
def unsigned_body() -> dict[str, Any]:
    """What keeps botocore's signer from hashing a body, as the context of a request.

    By itself it does without only where there is a checksum that it has
    computed itself, and TLS. The SHA256 takes longer than all the rest of an
    upload, here and in the server.
    """
    from botocore.config import Config

    return {"client_config": Config(s3={"payload_signing_enabled": False})}


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
