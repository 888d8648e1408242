"""The reasons why a connection to S3 did not come about: the cause, and whether waiting may help.

The causes are in what the libraries say: OpenSSL's texts, as the engine and as urllib3
within botocore's exceptions hand them on. A certificate that is not trusted
or a proxy that refuses the password stays so until an administrator changes it, and is
not tried again; a refused connection or a time-out may pass.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from fusefs.store.engine.engine import Completion


@dataclass(frozen=True, slots=True)
class UnreachableCause:
    """The reason for no connection; `may_pass` if another attempt may find it otherwise."""

    sentence: str
    may_pass: bool = True


# It would be as long the next time.
TOO_LONG = UnreachableCause("the answer is longer than any should be", may_pass=False)
# A header of an object is what somebody has stored, and comes as it is the next time as well.
MALFORMED = UnreachableCause("the answer has a header that none should have", may_pass=False)
# The meaning of status 407.
PROXY_PASSWORD = "the proxy wants a user and a password, or refuses those that it got"
_UNTRUSTED = "its certificate is of an authority that is not trusted (setting ca-bundle)"
_EXPIRED = "its certificate has expired"
_EARLY = "its certificate is not valid yet: is the clock of this machine right?"
_NO_TLS = "the server speaks no TLS there (an http:// endpoint?)"

# What OpenSSL and urllib3 say, in the order in which it is looked for.
_OPENSSL = (
    ("self-signed certificate in certificate chain", _UNTRUSTED),
    ("unable to get local issuer certificate", _UNTRUSTED),
    ("unable to get issuer certificate", _UNTRUSTED),
    (
        "self-signed certificate",
        "its certificate is its own authority, and not trusted (setting ca-bundle)",
    ),
    ("certificate has expired", _EXPIRED),
    ("certificate is not yet valid", _EARLY),
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    ("HTTP_REQUEST", _NO_TLS),
    ("wrong version number", _NO_TLS),
    ("http request", _NO_TLS),
)
_VERIFY = r"certificate verify failed: (.*?)(?: \(_ssl\.c:\d+\))?['\")]*$"
_OTHER_NAME = r"doesn't match|not valid for|[Mm]ismatch|certificate subject name"
_TUNNEL = r"Tunnel connection failed: (\d{3}) ?([^'\")]*)"
_PROBLEM = r"SSL certificate problem: (.*)"


def of_botocore(error: Any) -> UnreachableCause:
    """The cause of one of botocore's connection errors."""
    from botocore import exceptions

    url = urlsplit(str(error.kwargs.get("endpoint_url") or ""))
    whom = f"{url.scheme}://{url.netloc}" if url.netloc else "S3"
    reason = str(error.kwargs.get("error", ""))
    if reason == TOO_LONG.sentence:
        return TOO_LONG
    if isinstance(error, exceptions.ConnectTimeoutError | exceptions.ReadTimeoutError):
        return UnreachableCause(f"no answer from {whom} in time")
    if isinstance(error, exceptions.IncompleteReadError | exceptions.ResponseStreamingError):
        return UnreachableCause("the answer broke off")
    if isinstance(error, exceptions.SSLError):
        return _of_openssl(reason, whom)
    if isinstance(error, exceptions.ProxyConnectionError):
        # botocore masks what is like user and password wherever it stands first.
        place = str(error.kwargs["proxy_url"]).rpartition("@")[2].rpartition("://")[2]
        return _of_proxy(reason, urlsplit(f"//{place}"))
    why = _of_network(reason)
    return UnreachableCause(
        f"no connection to {whom}: {why}" if why else f"no connection to {whom}"
    )


def of_engine(completion: Completion, origin: str, proxy: str | None) -> UnreachableCause:
    """The cause of a request of the engine's that got no whole answer from `origin`.

    `proxy` is the URL of the proxy that it went through.
    """
    error, detail = completion.error, completion.detail
    if error == "too-large":
        return TOO_LONG
    if error == "malformed":
        return MALFORMED
    if error in ("timeout", "low-speed"):
        return UnreachableCause(f"no answer from {origin} in time")
    if error in ("certificate", "tls"):
        return _of_openssl(detail, origin)
    if completion.proxy_status >= 300:
        return _of_proxy(f"Tunnel connection failed: {completion.proxy_status}", urlsplit(proxy))
    why = ""
    if error == "resolve":
        why = "the name is not known"
    elif completion.errno:
        why = os.strerror(completion.errno).lower()
    elif error not in ("connect", "proxy"):
        why = "the answer broke off"
    whom = origin
    if proxy is not None and error in ("connect", "resolve", "proxy"):
        whom = f"the proxy {_place(urlsplit(proxy))}"
    return UnreachableCause(f"no connection to {whom}" + (f": {why}" if why else ""))


def _of_openssl(reason: str, whom: str) -> UnreachableCause:
    refused = f"no secure connection to {whom}: "
    for part, sentence in _OPENSSL:
        if part in reason:
            return UnreachableCause(refused + sentence, may_pass=False)
    if re.search(_OTHER_NAME, reason):
        names = re.findall(r"'([\w.*:-]+)'", reason)
        of = f", for {', '.join(names[1:])}" if names[1:] else ""
        return UnreachableCause(f"{refused}its certificate is for another name{of}", may_pass=False)
    verify = re.search(_VERIFY, reason) or re.search(_PROBLEM, reason)
    if verify is not None:
        return UnreachableCause(f"{refused}its certificate is refused: {verify[1]}", may_pass=False)
    return UnreachableCause(refused + reason)


def _of_proxy(reason: str, proxy: Any) -> UnreachableCause:
    whom = _place(proxy)
    tunnel = re.search(_TUNNEL, reason)
    if tunnel is not None and tunnel[1] == "407":
        return UnreachableCause(f"{PROXY_PASSWORD} ({whom})", may_pass=False)
    if tunnel is not None:
        status = f"{tunnel[1]} {tunnel[2]}".strip()
        is_refusal = tunnel[1].startswith("4")
        return UnreachableCause(
            f"the proxy {whom} does not connect to S3: {status}", may_pass=not is_refusal
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason or re.search(_OTHER_NAME, reason):
        return _of_openssl(reason, f"the proxy {whom}")
    why = _of_network(reason)
    return UnreachableCause(f"no connection to the proxy {whom}" + (f": {why}" if why else ""))


def _place(proxy: Any) -> str:
    return f"{proxy.hostname}:{proxy.port}" if proxy.port else f"{proxy.hostname}"


def _of_network(reason: str) -> str:
    """The error of the kernel or the resolver, in words."""
    if "resolve" in reason or "[Errno -" in reason:  # urllib3's text, and getaddrinfo's numbers
        return "the name is not known"
    number = re.search(r"\[Errno (\d+)\]", reason)
    return os.strerror(int(number[1])).lower() if number else ""
