"""Selection of the proxy for connections to S3, the same for every library.

The variables have the names that curl and most programs use: `HTTPS_PROXY` for https, `HTTP_PROXY`
for http, `ALL_PROXY` where the scheme's variable is not set, and `NO_PROXY` for hosts that are
reached directly. A name in lower case has precedence. botocore ignores `ALL_PROXY`, and networks in
`NO_PROXY`; libcurl has rules of its own. So the proxy is chosen here and passed to each library.

`NO_PROXY` is a list separated by commas or blanks. An element is `*`, a host name (which includes
all names below it, also if written `.example.org` or `*.example.org`), an IP address or a network
such as `10.0.0.0/8`, and may end with a port. Names are not resolved.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from fusefs.store.errors import StoreError

PORTS = {"http": 80, "https": 443}


def choose(url: str, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy for `url`, or None. A URL may have a password: don't log it.

    Raises:
        StoreError: the configured proxy can't be used.
    """

    def value(name: str) -> str:
        lower = name.lower()
        return environment[lower] if lower in environment else environment.get(name, "")

    parts = urlsplit(url)
    # If REQUEST_METHOD is set (CGI), HTTP_PROXY holds the request's header `Proxy`.
    is_cgi = "REQUEST_METHOD" in environment and "http_proxy" not in environment
    proxy = "" if is_cgi and parts.scheme == "http" else value(f"{parts.scheme.upper()}_PROXY")
    proxy = proxy or value("ALL_PROXY")
    host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
    excluded = re.split(r"[,\s]+", value("NO_PROXY").strip().lower())
    if not proxy or any(_fits(element, host, port) for element in excluded):
        return None
    return _usable(proxy)


def shown(proxy: str) -> str:
    """Return a proxy's URL without user and password."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _usable(proxy: str) -> str:
    if "://" not in proxy:
        proxy = f"http://{proxy.removeprefix('//')}"
    try:
        parts = urlsplit(proxy)
        is_usable = parts.scheme in PORTS and parts.hostname and parts.port != 0
    except ValueError:  # of the address or the port
        raise StoreError(
            "the proxy of the environment is no URL; write it like http://proxy.example.org:3128"
        ) from None
    if not is_usable:
        raise StoreError(
            f"the proxy {shown(proxy)} can't be used: only those with http:// and https:// can;"
            " name the endpoint in NO_PROXY to do without"
        )
    return proxy


def _fits(element: str, host: str, port: int) -> bool:
    """True if an element of NO_PROXY matches this host and port."""
    name, _, number = element.rpartition(":")
    if number.isdecimal() and name and _network(element) is None:
        if int(number) != port:
            return False
        element = name
    if (network := _network(element.strip("[]"))) is not None:
        address = _network(host.partition("%")[0])
        return address is not None and address.network_address in network
    name = element.removeprefix("*").strip(".")
    return element == "*" or (bool(name) and f".{host}".endswith(f".{name}"))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the IP network that a text names (an address is a network of one), or None."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
