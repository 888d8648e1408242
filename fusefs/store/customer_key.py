"""The key of server-side encryption with customer-provided keys (SSE-C).

S3 does not store the key: every request that reads or writes an object sends it (GET, HEAD, PUT,
the parts of an upload; a copy sends it for its source as well). Listings and deletions need no key
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html).

The key file holds 32 bytes, or their base64 in one line. A daemon, which may not read its user's
files, gets the content in a file in memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

# Environment variable of a daemon: the path of the content in memory.
VARIABLE = "FUSEFS_CUSTOMER_KEY_CONTENT"
SIZE = 32  # AES256 is the only algorithm
# A larger file cannot be a key.
_LONGEST = 256
_HEADER = "x-amz-server-side-encryption-customer-"
_SOURCE_HEADER = "x-amz-copy-source-server-side-encryption-customer-"
COPY_SOURCE = "x-amz-copy-source"


class CustomerKeyError(ValueError):
    """A file contains no key; the message is one line for the user, without the content."""


@dataclass(frozen=True, slots=True)
class CustomerKey:
    """One SSE-C key. `text` is its base64, a secret; `identity` names it without revealing it."""

    text: str = field(repr=False)

    @property
    def identity(self) -> str:
        """The first 16 hexadecimal digits of the key's SHA-256."""
        return hashlib.sha256(base64.b64decode(self.text)).hexdigest()[:16]

    def headers(self, *, is_copy: bool) -> dict[str, str]:
        """Return the key's headers (names in lower case); for a copy also those for its source."""
        digest = hashlib.md5(base64.b64decode(self.text), usedforsecurity=False).digest()
        md5 = base64.b64encode(digest).decode()
        values = {"algorithm": "AES256", "key": self.text, "key-md5": md5}
        prefixes = (_HEADER, _SOURCE_HEADER) if is_copy else (_HEADER,)
        return {prefix + name: value for prefix in prefixes for name, value in values.items()}


def parse(content: bytes, origin: str) -> CustomerKey:
    """Parse the content of a key file. Raises CustomerKeyError, which names `origin`."""
    if len(content) != SIZE:
        try:
            content = base64.b64decode(content.strip(), validate=True)
        except binascii.Error:
            content = b""
    if len(content) != SIZE:
        raise CustomerKeyError(f"{origin} is no key: neither {SIZE} bytes nor their base64")
    return CustomerKey(base64.b64encode(content).decode())


def find(path: Path | None) -> CustomerKey | None:
    """Read the key from the daemon's file in memory, else from `path`; None if `path` is None.

    Raises:
        CustomerKeyError: the file can't be read, or contains no key.
    """
    if path is None:
        return None
    place = os.environ.get(VARIABLE, path)
    try:
        with open(place, "rb") as file:
            content = file.read(_LONGEST)
    except OSError as error:
        raise CustomerKeyError(f"the key {place} cannot be read: {error.strerror}") from None
    return parse(content, str(place))
