"""Answers that send the client to another address (301, 302, 303, 307, 308).

botocore takes each for a hint that the bucket is in another region, and asks
where, of the same server, which answers alike: until Python's stack is used up.
AWS's own hosts do mean that, and are left to botocore. With any other endpoint
the answer is a mistake of the configuration (http where it should be https, a
console instead of the API), so the user gets to know where the redirect leads.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin, urlsplit

from fusefs.store.errors import StoreError

REDIRECTS = (301, 302, 303, 307, 308)


class RedirectError(StoreError):
    """The endpoint sends its clients to another address."""


def install(client: Any) -> None:
    """Have a boto3 S3 client raise `RedirectError` before it looks for another region."""
    client.meta.events.register_first("needs-retry.s3", _refuse)


def _refuse(response: Any, **_: Any) -> None:
    if response is None or response[0] is None or response[0].status_code not in REDIRECTS:
        return
    answer, parsed = response
    if not is_aws(answer.url):
        region = answer.headers.get("x-amz-bucket-region") or parsed.get("Error", {}).get("Region")
        check(answer.headers.get("location"), answer.url, knows_region=bool(region))


def check(location: str | None, url: str, *, knows_region: bool = False) -> None:
    """Refuse a redirect of `url`, unless botocore can follow it to a region that it names.

    Raises:
        RedirectError: it leads elsewhere.
    """
    requested = urlsplit(url)
    target = urlsplit(urljoin(url, location or ""))
    if (requested.scheme, requested.netloc) != (target.scheme, target.netloc):
        host = target.netloc.rpartition("@")[2]
        where = f"to {target.scheme}://{host}: if that is meant, use it as the endpoint"
    elif knows_region:
        return
    elif location:
        where = f"to its own path {target.path}: is it an S3 endpoint?"
    else:
        where = "and does not say where to"
    raise RedirectError(f"{requested.scheme}://{requested.netloc} redirects {where}")


def is_aws(url: str) -> bool:
    """Whether a URL is one of AWS's own."""
    return (urlsplit(url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
