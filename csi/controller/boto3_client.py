"""The CSI controller's boto3 client of S3: reaches buckets as mounts do, and nothing else.

It takes the proxy that mounts take, refuses redirects to other addresses as they do, bounds
what botocore reads into memory, and sends DeleteObjects as every store takes it: S3 demanded a
Content-MD5 for many years, and many stores still do, where botocore sends a CRC32.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from fusefs.store.http import redirects
from fusefs.store.http.proxies import Proxies
from fusefs.store.unreachable import TOO_LONG

# A listing of a thousand keys of the longest kind has 4 MiB.
MOST_CONTENT = 16 << 20


class TooLongError(Exception):
    """The answer is longer than any should be."""

    def __init__(self) -> None:
        super().__init__(TOO_LONG.sentence)


def make(make: Callable[[dict[str, Any]], Any], proxies: Proxies, ca_file: str | None) -> Any:
    """Make a boto3 client with the proxy that `proxies` chooses for its endpoint, or none.

    `make` makes it with more parameters of botocore's `Config`. The endpoint may
    come from boto3's configuration, so only a client knows it. `ca_file` has the
    authorities that are trusted for a proxy with https.

    Raises:
        ProxyError: no proxy of its kind can be used.
    """
    _bound()
    client = make({"proxies": {}})  # without this botocore takes those of the environment
    proxy = proxies.choose(client.meta.endpoint_url)
    if proxy is not None:
        chosen: dict[str, Any] = {"proxies": {"http": proxy, "https": proxy}}
        if proxy.startswith("https:") and ca_file:
            chosen["proxies_config"] = {"proxy_ca_bundle": ca_file}
        client = make(chosen)
    events = client.meta.events
    events.register_first("needs-retry.s3", _refuse_redirect)
    events.register("before-sign.s3.DeleteObjects", _add_md5)
    events.register("before-parse.s3.DeleteObjects", _refuse_other_answers)
    return client


def _refuse_redirect(response: Any, **_: Any) -> None:
    """Raise `RedirectError` before botocore looks for another region, at the same server."""
    if response is None or response[0] is None:
        return
    answer, parsed = response
    if answer.status_code in redirects.REDIRECTS and not redirects.is_aws(answer.url):
        region = answer.headers.get("x-amz-bucket-region") or parsed.get("Error", {}).get("Region")
        redirects.check(answer.headers.get("location"), answer.url, knows_region=bool(region))


def _add_md5(request: Any, **_: Any) -> None:
    body = request.body.encode() if isinstance(request.body, str) else request.body
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def _refuse_other_answers(response_dict: dict[str, Any], **_: Any) -> None:
    """Take nothing but a result for one; botocore takes a proxy's page for a success."""
    # As botocore does with an error that has status 200.
    if response_dict["status_code"] == 200 and b"<DeleteResult" not in response_dict["body"]:
        response_dict["status_code"] = 500


@cache
def _bound() -> None:
    """Have no client of botocore's in this process read more than `MOST_CONTENT` bytes.

    It has no setting for that, and no event comes before an answer is read. What is raised
    there it raises as its `HTTPClientError`.
    """
    from botocore import awsrequest

    class BoundedResponse(awsrequest.AWSResponse):
        _content: bytes | None

        @property
        def content(self) -> Any:
            if self._content is None:
                content = bytearray()
                for piece in self.raw.stream():
                    content += piece
                    if len(content) > MOST_CONTENT:
                        raise TooLongError
                self._content = bytes(content)
            return self._content

    setattr(awsrequest, "AWSResponse", BoundedResponse)  # noqa: B010
