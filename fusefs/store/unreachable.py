"""Failures of requests that got no usable answer: the cause, and whether a retry may help.

The engine gives the kind of error and OpenSSL's text. An error that an administrator has to fix (a
certificate, a proxy's password) is not retried; a refused connection or a time-out may pass.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fusefs.store.errors import PROXY_PASSWORD, StaleVersionError, StoreError, UnreachableError

if TYPE_CHECKING:
    from fusefs.store.engine.engine import Completion

_OTHER_RANGE = "S3 sent another range than the requested one"
_OTHER_SIZE = "what S3 sends is not the object as it is stored (is that compressed?)"
# Errors of an answer that came. Most would be the same the next time: headers are stored with the
# object. Another range is perhaps a proxy's mistake.
_UNFIT = {
    "etag": StaleVersionError("the object has been replaced"),
    "range": StoreError(_OTHER_RANGE, is_retryable=True, longest_s=10.0),
    "size": StoreError(_OTHER_SIZE),
    "too-large": UnreachableError("the answer is longer than any should be"),
    "malformed": UnreachableError("the answer has a header that none should have"),
}
_UNTRUSTED = "its certificate is of an authority that is not trusted (setting ca-bundle)"
_OWN = "its certificate is its own authority, and not trusted (setting ca-bundle)"
_EARLY = "its certificate is not valid yet: is the clock of this machine right?"
_NO_TLS = "the server speaks no TLS there (an http:// endpoint?)"

# Parts of OpenSSL's messages, in the order in which they are looked for.
_OPENSSL = (
    ("self-signed certificate in certificate chain", _UNTRUSTED),
    ("unable to get local issuer certificate", _UNTRUSTED),
    ("unable to get issuer certificate", _UNTRUSTED),
    ("self-signed certificate", _OWN),
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", _EARLY),
    ("wrong version number", _NO_TLS),
    ("http request", _NO_TLS),
    ("certificate subject name", "its certificate is for another name"),
)
_PROBLEM = re.compile("SSL certificate problem: (.*)")


def of_engine(completion: Completion, origin: str, proxy: str | None) -> StoreError:
    """Return the failure of an engine's request that got no complete answer from `origin`.

    `proxy` is the URL of the proxy that the request went through, or None.
    """
    error = completion.error
    if error in _UNFIT:
        return replace(_UNFIT[error])
    if error in ("timeout", "low-speed"):
        return _may_pass(f"no answer from {origin} in time")
    if error in ("certificate", "tls"):
        return _of_openssl(completion.detail, origin)
    place = urlsplit(proxy or "").netloc.rpartition("@")[2]
    status, whom = completion.proxy_status, f"the proxy {place}"
    if status == 407:
        return UnreachableError(f"{PROXY_PASSWORD} ({place})")
    if status >= 300:
        sentence = f"{whom} does not connect to S3: {status}"
        return UnreachableError(sentence, is_retryable=status >= 500)
    if proxy is None or error not in ("connect", "resolve", "proxy"):
        whom = origin
    why = ""
    if error == "resolve":
        why = ": the name is not known"
    elif completion.errno:
        why = f": {os.strerror(completion.errno).lower()}"
    elif error not in ("connect", "proxy"):
        why = ": the answer broke off"
    return _may_pass(f"no connection to {whom}{why}")


def _of_openssl(reason: str, whom: str) -> StoreError:
    refused = f"no secure connection to {whom}: "
    for part, sentence in _OPENSSL:
        if part in reason:
            return UnreachableError(refused + sentence)
    if (problem := _PROBLEM.search(reason)) is not None:
        return UnreachableError(f"{refused}its certificate is refused: {problem[1]}")
    return _may_pass(refused + reason)


def _may_pass(sentence: str) -> StoreError:
    return UnreachableError(sentence, is_retryable=True)
