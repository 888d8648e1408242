"""Answers that send the client to another address (301, 302, 303, 307, 308): never followed.

A signature, and with it a session token, is for one host. AWS redirects to the region where
the bucket is, which it names, and the request is signed anew for that. With any other endpoint
a redirect is mostly a mistake of the configuration (http where it should be https, a
console instead of the API), so the user gets to know where it leads.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

REDIRECTS = (301, 302, 303, 307, 308)


def complaint(location: str | None, url: str, *, knows_region: bool = False) -> str | None:
    """A sentence about a redirect of `url`; None for its own address with the bucket's region."""
    requested, target = urlsplit(url), urlsplit(urljoin(url, location or ""))
    if (requested.scheme, requested.netloc) != (target.scheme, target.netloc):
        host = target.netloc.rpartition("@")[2]
        where = f"to {target.scheme}://{host}: if that is meant, use it as the endpoint"
    elif knows_region:
        return None
    elif location:
        where = f"to its own path {target.path}: is it an S3 endpoint?"
    else:
        where = "and does not say where to"
    return f"{requested.scheme}://{requested.netloc} redirects {where}"


def is_aws(url: str) -> bool:
    """True if a URL is one of AWS's own."""
    return (urlsplit(url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
