"""Checks of the network path to S3: DNS, connection, TLS and clock, with the daemon's own client.

All functions block, and need no credentials.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import trio

from fusefs.diagnosis.findings import Finding, advice, ok, problem, skipped
from fusefs.store import unreachable
from fusefs.store.engine.engine import Completion, open_engine
from fusefs.store.errors import PROXY_PASSWORD, StoreError, translate
from fusefs.store.http.proxies import PORTS
from fusefs.store.s3.access import DEFAULT_REGION, Access
from fusefs.store.s3.address import Call
from fusefs.store.s3.settings import S3Settings

CONNECT_TIMEOUT_S = 5.0
SLOW_NAME_S = 0.5
# S3 refuses requests whose signing time differs by more from its own (RequestTimeTooSkewed).
REFUSED_SKEW_S = 900.0
# A smaller difference is no finding: the Date header has whole seconds, and answers take time.
NOTICED_SKEW_S = 30.0
# The names of the checks after whose failure more requests are useless.
CONNECTION, TLS = "connection", "TLS"


def check(settings: S3Settings) -> Iterator[Finding]:
    """Make all checks of the network path to the bucket of these settings."""
    try:
        access = _unsigned_access(settings)
    except StoreError as error:
        yield problem("network", str(error), "correct what the sentence names")
        return
    yield _name(access.url, access.address.route.proxy)
    is_tls = access.url.startswith("https:")
    check, began = TLS if is_tls else CONNECTION, time.time()
    try:
        completion = trio.run(_ask, access)
    except ValueError as error:  # the host name is invalid in a URL
        yield _unreachable(check, str(error))
        yield _clock(None, began)
        return
    middle = (began + time.time()) / 2
    yield _connection(access, completion, check)
    if not is_tls:
        yield skipped(TLS, f"{access.url} is without TLS: anybody on the way can read along")
    yield _clock(completion.headers.get("date"), middle)


def _unsigned_access(settings: S3Settings) -> Access:
    """Return an access to S3 without signatures, which needs no credentials."""
    region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        return Access(
            replace(
                settings,
                anonymous=True,
                region=region or DEFAULT_REGION,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                read_timeout_s=CONNECT_TIMEOUT_S,
            )
        )
    except Exception as error:  # botocore raises many kinds for mistakes in its files
        raise translate(error) from error


async def _ask(access: Access) -> Completion:
    """Send a LIST and return its completion: every server answers, at least with a refusal."""
    call = Call("LIST", "GET", query={"list-type": 2, "max-keys": 1})
    async with open_engine(1) as engine:
        return await engine.send(access.address.request(call, None))


def _name(url: str, proxy: str | None) -> Finding:
    """Look up the host that connections go to, S3's or the proxy's; return a finding."""
    address = urlsplit(proxy or url)
    host = address.hostname or ""
    what = f"{host} (the proxy)" if proxy else host
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(
            host, address.port or PORTS.get(address.scheme, 443), type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        return problem(
            "DNS",
            f"{what}: {getattr(error, 'strerror', None) or error}",
            "check the endpoint's name, /etc/resolv.conf, and the cluster's DNS",
        )
    took_s = time.monotonic() - began
    addresses = sorted({str(entry[4][0]) for entry in found})
    number = "1 address" if len(addresses) == 1 else f"{len(addresses)} addresses"
    text = f"{what} has {number}, found in {1e3 * took_s:.0f} ms"
    figures = {"seconds": took_s, "addresses": addresses}
    if took_s > SLOW_NAME_S:
        return advice(
            "DNS",
            text,
            "each new connection waits for it: run a cache (systemd-resolved, NodeLocal DNSCache), "
            "and see whether a server in /etc/resolv.conf does not answer",
            **figures,
        )
    return ok("DNS", text, **figures)


def _connection(access: Access, completion: Completion, check: str) -> Finding:
    """Return a finding about the connection; any answer, even a refusal, proves that it works."""
    if completion.error is not None and not completion.status:
        error = unreachable.of_engine(completion, access.url, access.address.route.proxy)
        return _unreachable(check, str(error))
    if completion.status == 407:
        return _unreachable(check, PROXY_PASSWORD)
    text = (
        f"connected in {1e3 * completion.connected_s:.0f} ms, answered in"
        f" {1e3 * completion.last_byte_s:.0f} ms"
    )
    return ok(check, text, seconds=completion.connected_s)


def _unreachable(check: str, why: str) -> Finding:
    return problem(
        check,
        why,
        "check the endpoint, firewalls and proxies (HTTPS_PROXY, NO_PROXY), and for certificates "
        "--ca-bundle",
    )


def _clock(date: str | None, middle: float) -> Finding:
    """Compare S3's `date` with `middle`, this machine's time in the middle of the request."""
    skew_s: float | None = None
    with suppress(ValueError, TypeError):  # the header may be malformed
        skew_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - middle
    if skew_s is None:
        return skipped("clock", "S3 did not tell its time")
    text = f"S3's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
    synchronise = "synchronise the clock (systemd-timesyncd or chrony; timedatectl shows it)"
    if abs(skew_s) > REFUSED_SKEW_S:
        text += ": fusefs signs with S3's time, other programs are refused"
        return problem("clock", text, synchronise, skew_seconds=skew_s)
    if abs(skew_s) > NOTICED_SKEW_S:
        return advice("clock", text, synchronise, skew_seconds=skew_s)
    return ok("clock", "agrees with S3's", skew_seconds=skew_s)
