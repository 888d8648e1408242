"""Fences against requests that the server executes late: they must not undo a newer change.

A request whose sender has timed out or died may still be executed, seconds later:

- A condition (`Expect`, store/interface.py) restricts the change to the object that the mount
  knew. If the key has another object, the server answers 412, and a HEAD shows that object.
- A token in the object's metadata (`fusefs-change`: the daemon that made the change, and the
  change's number) shows if an earlier attempt of the same change made that object. If not, another
  client wrote the object: the change is repeated on the condition that the key still has that
  object's ETag. So the last client to close a file wins.

Every PUT, every multipart upload and every copy that replaces the metadata carries a token. A
caller that needs to know the token before the request is sent takes the next one (`Write.token`).
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

# The name of the token in the object's metadata.
CHANGE = "fusefs-change"
# The bytes of metadata that the token and its name take at most.
CHANGE_SIZE = len(CHANGE) + 16 + 1 + 16
# S3's limit of metadata, in bytes of all names and values. Some stores count the names with this
# prefix, as headers.
METADATA_LIMIT = 2048
META = "x-amz-meta-"
_TOKEN = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})")


class ChangeToken(NamedTuple):
    """Identity of a change: `mount`, the random name of a daemon, and the number of its change."""

    mount: str
    number: int

    def __str__(self) -> str:
        return f"{self.mount}-{self.number}"

    @staticmethod
    def parse(metadata: Mapping[str, str] | None) -> ChangeToken | None:
        """Return the token in an object's metadata; None if there is none, or no metadata."""
        found = _TOKEN.fullmatch((metadata or {}).get(CHANGE, ""))
        return ChangeToken(found[1], int(found[2])) if found else None


class TokenSource:
    """The generator of one process's tokens, numbered from 1.

    `mount` is 64 random bits, different for each process: no token is ever used twice, not even
    after a restart.
    """

    def __init__(self) -> None:
        self.mount = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def next(self) -> ChangeToken:
        return ChangeToken(self.mount, next(self._numbers))


def has_room(metadata: Mapping[str, str]) -> bool:
    """True if S3's limit leaves room for a token in an object's metadata."""
    size = sum(len(META) + len(name) + len(value) for name, value in metadata.items())
    return size + len(META) + CHANGE_SIZE <= METADATA_LIMIT


def without_token(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return an object's metadata without the token."""
    return {name: value for name, value in metadata.items() if name != CHANGE}
