"""Answers that redirect to another address (301, 302, 303, 307, 308): never followed.

A signature, and with it a session token, is for one host. AWS redirects to the bucket's region and
names it; the request is then signed anew for that region. From any other endpoint, a redirect is
mostly a mistake in the configuration (http instead of https, a console instead of the API), so the
user is told its target.
"""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urljoin, urlsplit

REDIRECTS = (301, 302, 303, 307, 308)


def complaint(location: str | None, url: str, *, knows_region: bool = False) -> str | None:
    """Return a sentence for the user about a redirect of `url` to `location`, if that is given.

    None if `location` is on the same server and the answer named the bucket's right region
    (`knows_region`): then the request only has to be signed for that region.
    """
    requested, target = urlsplit(url), urlsplit("")
    with suppress(ValueError):  # as brackets without an IPv6 address cause it
        target = urlsplit(urljoin(url, location or ""))
    if not target.netloc:
        where = "to an address that is not valid"
    elif (requested.scheme, requested.netloc) != (target.scheme, target.netloc):
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
    """True if a URL's host is one of AWS's."""
    return (urlsplit(url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
