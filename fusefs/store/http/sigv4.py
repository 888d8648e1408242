"""AWS Signature Version 4 for requests to S3: botocore's result in a tenth of the time.

The signing key is derived once per day, region and secret, so each request takes one SHA256 and one
HMAC. The payload is a short document, empty or unsigned; all headers are signed, and a checksum
among them covers the bytes of an object.

https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusefs.store.http.server_clock import ServerClock

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

_ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY = hashlib.sha256(b"").hexdigest()
UNSIGNED = "UNSIGNED-PAYLOAD"
# Headers that proxies or the transport may change.
_NOT_SIGNED = {"accept-encoding", "expect", "user-agent"}


@functools.lru_cache(256)  # requests of one kind have the same headers
def _order(names: tuple[str, ...]) -> tuple[list[str], str]:
    """Return the names of the signed headers, sorted, and the same names joined by semicolons."""
    signed = sorted(set(names) - _NOT_SIGNED)
    return signed, ";".join(signed)


@functools.lru_cache(8)  # requests are signed with the times of a few stores
def _moment(second: int) -> str:
    """Return a time, given in seconds since the epoch, in the signed format."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


@functools.lru_cache(64)
def _signing_hmac(secret: str, day: str, region: str, service: str) -> hmac.HMAC:
    """Return the HMAC with the signing key of one day.

    It is copied per request: `hmac.digest` would release the interpreter lock, which is slower.
    """
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, digestmod="sha256")


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs requests for one region and service, from any number of threads."""

    region: str
    service: str
    clock: ServerClock

    def sign(
        self,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        credentials: ReadOnlyCredentials,
        payload: str = EMPTY,
    ) -> dict[str, str]:
        """Return the headers (Latin-1, lower-case names, including `host`) with a signature added.

        `path` and `query` are as they are sent: quoted, and the query sorted. `payload` is the
        SHA256 of the body in hexadecimal digits, or UNSIGNED.
        """
        moment = _moment(int(self.clock.now()))
        signed = {**headers, "x-amz-date": moment, "x-amz-content-sha256": payload}
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names, listed = _order(tuple(signed))
        # Split as bytes: text is also split at U+0085 and U+00A0, which are parts of UTF-8 here.
        words = {name: signed[name].encode("latin-1").split() for name in names}
        lines = "".join([f"{name}:{b' '.join(words[name]).decode('latin-1')}\n" for name in names])
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{payload}"
        day = moment[:8]
        scope = f"{day}/{self.region}/{self.service}/aws4_request"
        digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}".encode()
        mac = _signing_hmac(credentials.secret_key or "", day, self.region, self.service).copy()
        mac.update(text)
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={mac.hexdigest()}"
        )
        return signed
