"""LIST requests without botocore's ceremony.

botocore takes a millisecond of Python for each request: parameters, endpoint
rules, events, parsers. A walk through many small directories is one LIST
after the other, so that is time a user waits for. Only the first LIST goes
through botocore, which knows about regions, addressing and access points; what
it sent (the address, the scope of the signature) is the pattern for the rest.
They are signed by botocore's signer and sent through its connections, with
its proxies and certificates. An answer that asks for anything but patience
(a redirect, a bad request) sends the request through botocore again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from fusefs.store import listing
from fusefs.store.base import ListPage
from fusefs.store.errors import Failure, UnreachableError, from_body
from fusefs.store.stream import AttemptError

if TYPE_CHECKING:
    from botocore.credentials import Credentials

# The names of list_objects_v2's parameters in the query.
_QUERY = {
    "Prefix": "prefix",
    "Delimiter": "delimiter",
    "StartAfter": "start-after",
    "MaxKeys": "max-keys",
    "EncodingType": "encoding-type",
}
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")
# What botocore added that does not depend on the request.
_KEPT_HEADERS = ("user-agent", "x-amz-request-payer")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How botocore asked; `scope` is region and service, None if it did not sign."""

    address: str
    headers: dict[str, str]
    scope: tuple[str, str] | None


class Lister:
    """Lists one bucket through one boto3 client, from any number of threads."""

    def __init__(
        self, client: Any, credentials: Credentials | None, request: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._request = request
        self._sent: _Pattern | None = None
        self._pattern: _Pattern | None = None  # of a request that was answered
        listing.install(client)
        client.meta.events.register("before-send.s3.ListObjectsV2", self._note_sent)

    def page(self, parameters: Mapping[str, Any]) -> ListPage:
        """Send one LIST, with list_objects_v2's parameters but the bucket. Blocks.

        Raises:
            AttemptError: S3 said no, or something else than a listing.
            Exception: whatever botocore raises.
        """
        pattern = self._pattern
        try:
            page = self._ask(pattern, parameters) if pattern is not None else None
            return page if page is not None else self._through_botocore(parameters)
        except listing.ListingError as error:
            raise AttemptError(Failure(UnreachableError, str(error), is_retryable=True)) from error

    def _through_botocore(self, parameters: Mapping[str, Any]) -> ListPage:
        answer = self._client.list_objects_v2(**self._request, **parameters)
        self._pattern = self._sent
        page: ListPage = answer[listing.PAGE]
        return page

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

    def _ask(self, pattern: _Pattern, parameters: Mapping[str, Any]) -> ListPage | None:
        """As `page`; None if botocore should have a look at it."""
        from botocore.awsrequest import AWSRequest

        query = {_QUERY[name]: value for name, value in parameters.items()}
        url = f"{pattern.address}?list-type=2&{urlencode(query, quote_via=quote, safe='')}"
        request = AWSRequest("GET", url, headers=pattern.headers)
        self._sign(request, pattern)
        # botocore offers no public way to its connections.
        answer = self._client._endpoint.http_session.send(request.prepare())
        if answer.status_code == 200:
            return listing.parse(answer.content)
        if answer.status_code < 401:
            return None
        request_id = answer.headers.get("x-amz-request-id", "")
        raise AttemptError(from_body(answer.status_code, answer.text, request_id))

    def _sign(self, request: Any, pattern: _Pattern) -> None:
        from botocore.auth import S3SigV4Auth

        if self._credentials is None or pattern.scope is None:
            return
        region, service = pattern.scope
        S3SigV4Auth(self._credentials.get_frozen_credentials(), service, region).add_auth(request)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
