"""The way to S3: names, connections and TLS, by each of the paths that a daemon uses.

A daemon has three: connections of its own (frequent and small requests), boto3's
(what is rare), and obstore's (long reads over TLS, with another TLS library).
A proxy or a certificate may stop one of them and not the others. All functions
block, and need no credentials.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from fusefs.diagnosis.findings import Finding, Level, advice, ok, problem, skipped
from fusefs.settings.display import human_duration
from fusefs.store.errors import AttemptError, StoreError, translate
from fusefs.store.http.proxies import PORTS
from fusefs.store.s3.clients import Clients, S3Settings
from fusefs.store.s3.plain import DEFAULT_REGION

CONNECT_TIMEOUT_S = 5.0
SLOW_NAME_S = 0.5
# S3 refuses requests that are signed with a time this far from its own
# (RequestTimeTooSkewed).
REFUSED_SKEW_S = 900.0
# The header Date has whole seconds, and the answer took some time.
NOTICED_SKEW_S = 30.0
EXPIRES_SOON_S = 14 * 86_400.0
# The path that is taken where the others can't be; without it there is no use in more requests.
LAST_PATH = "boto3"
# No object has this name: a HEAD of it takes the whole way, and changes nothing.
NO_KEY = ".fusefs-doctor"


@dataclass(slots=True)
class _Clock:
    """How far the clock of S3 is ahead, in seconds; None as long as nothing answered."""

    skew_s: float | None = None


def check(settings: S3Settings) -> Iterator[Finding]:
    """All checks of the way to the bucket of these settings."""
    try:
        clients = _unsigned_clients(settings)
        url = clients.url
        proxy = clients.network.proxies.choose(url)
    except (StoreError, AttemptError) as error:
        yield problem("network", str(error), "correct what the sentence names")
        return
    yield _name(url, proxy)
    is_tls = url.startswith("https:")
    label = "TLS" if is_tls else "connection"
    clock = _Clock()
    yield _own(clients, url, f"{label} own")
    yield _path(f"{label} {LAST_PATH}", lambda: _boto3(clients, clock))
    if is_tls and clients.uses_obstore:
        yield _without_obstore(_path(f"{label} obstore", lambda: _obstore(clients)))
    elif is_tls and clients.is_confined:
        yield advice(
            f"{label} obstore",
            "can't be used with these certificates; large reads go over Python's connections",
            "see the warning in the mount's log",
        )
    elif not is_tls:
        yield skipped("TLS", f"{url} is without TLS: anybody on the way can read along")
    yield _clock(clock.skew_s)


def _unsigned_clients(settings: S3Settings) -> Clients:
    """Clients that sign nothing: the way is to be tried also where there are no credentials."""
    region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        return Clients(
            replace(
                settings,
                anonymous=True,
                # With a region, the bucket is not sent a request for it.
                region=region or DEFAULT_REGION,
                connect_timeout_s=CONNECT_TIMEOUT_S,
                read_timeout_s=CONNECT_TIMEOUT_S,
            )
        )
    except (StoreError, AttemptError):
        raise
    except Exception as error:  # botocore has an exception for each mistake in its files
        raise StoreError(translate(error).sentence) from error


def _name(url: str, proxy: str | None) -> Finding:
    """Look up the host that connections go to."""
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


def _own(clients: Clients, url: str, check: str) -> Finding:
    parts = urlsplit(url)
    pool = clients.network.pool(f"{parts.scheme}://{parts.netloc}")
    if pool is None:
        return skipped(check, "a proxy that is reached over TLS: boto3 sends these requests")
    try:
        began = time.monotonic()
        with pool.connection() as borrowed:
            took_s = time.monotonic() - began
            sock = borrowed.sock
            details, valid_s = _certificate(sock)
    except AttemptError as error:
        return _unreachable(check, str(error))
    except (OSError, UnicodeError) as error:  # the latter of a host with an empty or long part
        return _unreachable(check, getattr(error, "strerror", None) or str(error))
    finally:
        pool.close()
    text = f"connected in {1e3 * took_s:.0f} ms{details}"
    if valid_s is not None and valid_s < EXPIRES_SOON_S:
        return advice(
            check,
            text,
            "have the server's certificate renewed before it expires",
            seconds=took_s,
            certificate_valid_seconds=valid_s,
        )
    return ok(check, text, seconds=took_s, certificate_valid_seconds=valid_s)


def _certificate(sock: socket.socket) -> tuple[str, float | None]:
    """The version of TLS and until when the certificate is valid, as text and in seconds."""
    if not isinstance(sock, ssl.SSLSocket):
        return "", None
    found = sock.getpeercert() or {}
    version = sock.version() or "TLS"
    if "notAfter" not in found:
        return f", {version}", None
    valid_s = ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()
    return f", {version}, certificate valid for {human_duration(valid_s)}", valid_s


def _path(check: str, send: Callable[[], None]) -> Finding:
    """Send a request by one path. Any answer of a server counts, a refusal as well."""
    began = time.monotonic()
    try:
        send()
    except Exception as error:  # anything may come from the libraries
        failure = translate(error)
        if not failure.status:
            return _unreachable(check, failure.sentence)
        if failure.status == 407:
            return _unreachable(check, failure.sentence)
    took_s = time.monotonic() - began
    return ok(check, f"answered in {1e3 * took_s:.0f} ms", seconds=took_s)


def _without_obstore(found: Finding) -> Finding:
    """What it means where obstore alone can't connect: a mount does without it."""
    if found.level is Level.OK:
        return found
    return advice(
        found.check,
        f"{found.text}; large reads go over Python's connections",
        "they cost more processor time there: have the server's certificate issued by an authority",
    )


def _unreachable(check: str, why: str) -> Finding:
    return problem(
        check,
        why,
        "check the endpoint, firewalls and proxies (HTTPS_PROXY, NO_PROXY), and for certificates "
        "--ca-bundle",
    )


def _boto3(clients: Clients, clock: _Clock) -> None:
    from botocore.exceptions import ClientError

    began = time.time()
    answer: Any
    try:
        answer = clients.s3.list_objects_v2(**clients.request, MaxKeys=1)
    except ClientError as error:
        answer = error.response
    finally:
        middle = (began + time.time()) / 2
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if date:
        with suppress(ValueError, TypeError):  # a server may write nonsense
            clock.skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - middle


def _obstore(clients: Clients) -> None:
    import obstore

    assert clients.objects is not None
    try:
        obstore.head(clients.objects, NO_KEY)
    except FileNotFoundError:
        return


def _clock(skew_s: float | None) -> Finding:
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
