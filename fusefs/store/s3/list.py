"""LIST requests: at most the first through botocore (store/http/client.py)."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusefs.store.errors import AttemptError, Failure, UnreachableError
from fusefs.store.http.answers import Answer
from fusefs.store.http.client import HttpClient
from fusefs.store.interface import ListPage
from fusefs.store.s3 import list_parser

# How long a request is repeated whose answer is no listing.
GARBLED_TIME_S = 3.0
# The names of list_objects_v2's parameters in the query.
_QUERY = {
    "Prefix": "prefix",
    "Delimiter": "delimiter",
    "StartAfter": "start-after",
    "ContinuationToken": "continuation-token",
    "MaxKeys": "max-keys",
    "EncodingType": "encoding-type",
}


def parameters(
    prefix: str, delimiter: str, start_after: str, max_keys: int, token: str = ""
) -> dict[str, Any]:
    """list_objects_v2's parameters for a page of at most `max_keys` entries; "" is none."""
    chosen = {"Prefix": prefix, "MaxKeys": max_keys, "EncodingType": "url"}
    if delimiter:
        chosen["Delimiter"] = delimiter
    if start_after:
        chosen["StartAfter"] = start_after
    if token:
        chosen["ContinuationToken"] = token
    return chosen


def _only_below(page: ListPage, prefix: str) -> ListPage:
    """A page without what does not begin with `prefix`, which no server should send."""
    objects = [info for info in page.objects if info.key.startswith(prefix)]
    prefixes = [one for one in page.prefixes if one.startswith(prefix) and one != prefix]
    others = len(page.objects) + len(page.prefixes) - len(objects) - len(prefixes)
    if not others:
        return page
    return replace(page, objects=objects, prefixes=prefixes, unnamed=page.unnamed + others)


class Lister:
    """Lists one bucket through one boto3 client, from any number of threads.

    `request` goes with every call of the client.
    """

    def __init__(self, client: Any, direct: HttpClient, request: Mapping[str, Any]) -> None:
        self._client = client
        self._direct = direct
        self._request = request
        self._has_connected = False

    def page(self, parameters: Mapping[str, Any]) -> ListPage:
        """Send one LIST, with list_objects_v2's parameters but the bucket. Blocks.

        Raises:
            AttemptError: S3 refused it, or the answer is no listing.
            Exception: whatever botocore raises.
        """
        query = {"list-type": 2, **{_QUERY[name]: value for name, value in parameters.items()}}
        try:
            answer = self._send(query)
            if answer is not None:
                page = list_parser.parse(answer.content)
            else:
                page = self._through_botocore(parameters)
        except list_parser.ListingError as error:
            # An answer that was cut is whole the next time; what the server itself writes
            # (a key with characters that XML has not) stays as it is.
            failure = Failure(
                UnreachableError,
                str(error),
                is_retryable=not error.is_final,
                longest_s=GARBLED_TIME_S,
            )
            raise AttemptError(failure) from error
        return _only_below(page, parameters.get("Prefix", ""))

    def _send(self, query: Mapping[str, Any]) -> Answer | None:
        """The answer; None if botocore should send the request."""
        try:
            answer = self._direct.send("GET", query=query)
        except AttemptError as error:
            is_certificate = isinstance(error.__cause__, ssl.SSLCertVerificationError)
            if self._has_connected or not is_certificate:
                raise
            return None  # it says more exactly what is wrong
        self._has_connected = self._has_connected or answer is not None
        return answer

    def _through_botocore(self, parameters: Mapping[str, Any]) -> ListPage:
        answer = self._client.list_objects_v2(**self._request, **parameters)
        self._direct.learn()
        page: ListPage = answer[list_parser.PAGE]
        return page
