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


@dataclass(frozen=True, slots=True)
class _Key:
    """The signing key of one day, with the secret and day that it was derived from.

    `mac` is copied per request: `hmac.digest` would release the interpreter lock, which is slower.
    """

    secret: str
    day: str
    mac: hmac.HMAC


class Signer:
    """Signs requests for one region and service, from any number of threads."""

    def __init__(self, region: str, service: str, clock: ServerClock | None = None) -> None:
        self._clock = clock or ServerClock()
        self._region = region
        self._service = service
        self._key: _Key | None = None
        self._second = (0, "")

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
        moment = self._moment()
        signed = {**headers, "x-amz-date": moment, "x-amz-content-sha256": payload}
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names, listed = _order(tuple(signed))
        # Split as bytes: text is also split at U+0085 and U+00A0, which are parts of UTF-8 here.
        words = {name: signed[name].encode("latin-1").split() for name in names}
        lines = "".join([f"{name}:{b' '.join(words[name]).decode('latin-1')}\n" for name in names])
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{payload}"
        day = moment[:8]
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}".encode()
        mac = self._key_of(day, credentials.secret_key or "").mac.copy()
        mac.update(text)
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={mac.hexdigest()}"
        )
        return signed

    def _moment(self) -> str:
        """Return the time in the signed format; it is formatted once a second."""
        now = int(self._clock.now())
        second, text = self._second
        if second != now:
            text = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
            self._second = now, text
        return text

    def _key_of(self, day: str, secret: str) -> _Key:
        key = self._key
        if key is None or (key.day, key.secret) != (day, secret):
            value = f"AWS4{secret}".encode()
            for part in (day, self._region, self._service, "aws4_request"):
                value = hmac.digest(value, part.encode(), "sha256")
            key = self._key = _Key(secret, day, hmac.new(value, digestmod="sha256"))
        return key
