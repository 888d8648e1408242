"""Answers that send the client to another address (301, 302, 303, 307, 308): never followed.

A signature, and with it a session token, is for one host. AWS redirects to the region where
the bucket is, which it names, and the request is signed anew for that. With any other endpoint
a redirect is mostly a mistake of the configuration (http where it should be https, a
console instead of the API), so the user gets to know where it leads.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from fusefs.store.errors import StoreError

REDIRECTS = (301, 302, 303, 307, 308)


class RedirectError(StoreError):
    """The endpoint sends its clients to another address."""


def check(location: str | None, url: str, *, knows_region: bool = False) -> None:
    """Refuse a redirect of `url` to another address; its own is fine with the bucket's region.

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
    """True if a URL is one of AWS's own."""
    return (urlsplit(url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
