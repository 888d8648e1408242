"""The proxy of a connection to S3: one answer for every library.

The variables are those of curl and of most programs: `HTTPS_PROXY` for https,
`HTTP_PROXY` for http, `ALL_PROXY` for what has none of these, and `NO_PROXY`
for the hosts that are reached without; each also in lower case, which wins.
botocore knows no `ALL_PROXY`, and its `NO_PROXY` no networks; libcurl has rules
of its own. So the answer is found here, and each library is given it.

`NO_PROXY` is a list with commas or blanks. An element is `*`, a host name (with
all names below it, also where it is written `.example.org` or `*.example.org`),
an IP address or a network such as `10.0.0.0/8`, and may end with a port. Names
are not looked up to see whether their address is in a network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from fusefs.store.errors import StoreError

PORTS = {"http": 80, "https": 443}
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(\d+))?")


class ProxyError(StoreError):
    """The proxy that the environment names can't be used."""


@dataclass(frozen=True, slots=True)
class Proxies:
    """The proxies of the environment. A URL of a proxy may have a password: not for the log."""

    http: str
    https: str
    excluded: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Proxies:
        """The proxies in the variables of an environment; those in lower case win, as for curl."""

        def value(name: str) -> str:
            lower = name.lower()
            return environment[lower] if lower in environment else environment.get(name, "")

        every = value("ALL_PROXY")
        # Where REQUEST_METHOD is set, the request's header `Proxy` stands in HTTP_PROXY (CGI).
        is_cgi = "REQUEST_METHOD" in environment and "http_proxy" not in environment
        http = "" if is_cgi else value("HTTP_PROXY")
        excluded = tuple(re.split(r"[,\s]+", value("NO_PROXY").strip().lower()))
        return cls(http or every, value("HTTPS_PROXY") or every, excluded)

    def choose(self, url: str) -> str | None:
        """The URL of the proxy for a URL, None to do without.

        Raises:
            ProxyError: no proxy of its kind can be used.
        """
        parts = urlsplit(url)
        proxy = self.https if parts.scheme == "https" else self.http
        port = parts.port or PORTS.get(parts.scheme, 0)
        if not proxy or self._is_excluded((parts.hostname or "").rstrip("."), port):
            return None
        return _usable(proxy)

    def _is_excluded(self, host: str, port: int) -> bool:
        return any(element and _fits(element, host, port) for element in self.excluded)


def shown(proxy: str) -> str:
    """A proxy's URL without user and password."""
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _usable(proxy: str) -> str:
    if "://" not in proxy:
        proxy = f"http://{proxy.removeprefix('//')}"
    try:
        parts = urlsplit(proxy)
        is_usable = parts.scheme in PORTS and parts.hostname and parts.port != 0
    except ValueError:  # of the address or the port
        raise ProxyError(
            "the proxy of the environment is no URL; write it like http://proxy.example.org:3128"
        ) from None
    if not is_usable:
        raise ProxyError(
            f"the proxy {shown(proxy)} can't be used: only those with http:// and https:// can;"
            " name the endpoint in NO_PROXY to do without"
        )
    return proxy


def _fits(element: str, host: str, port: int) -> bool:
    """True if an element of NO_PROXY is about this host."""
    if element == "*":
        return True
    if (network := _network(element)) is not None:
        return _is_inside(host, network)
    element, wanted = _without_port(element)
    if wanted is not None and wanted != port:
        return False
    if (network := _network(element)) is not None:
        return _is_inside(host, network)
    name = element.removeprefix("*").strip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_inside(host: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]) in network
    except ValueError:
        return False


def _without_port(element: str) -> tuple[str, int | None]:
    bracketed = _BRACKETED.fullmatch(element)
    if bracketed is not None:
        return bracketed[1], int(bracketed[2]) if bracketed[2] else None
    name, colon, port = element.rpartition(":")
    return (name, int(port)) if colon and port.isdecimal() else (element, None)
