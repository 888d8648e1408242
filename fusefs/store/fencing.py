"""Fences that keep a request which the server executes late from undoing a later change.

A request whose sender has timed out or died may still be executed, seconds later:

- A condition (`Expect`, store/interface.py) has the change hold only over the object that the
  mount knew. Where another object is there, the server answers 412, and a HEAD tells which.
- A token in the object's metadata (`fusefs-change`: the mount that made the change, and its
  number) tells an earlier attempt of the same change, which has succeeded, from another client's
  object, whose ETag is then adopted, and the change repeated over it: the last to close wins.

Every PUT, every multipart upload and every copy that replaces the metadata carries a token. A
caller that has to know it before the request is sent takes the next one (`Write.token`).
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

# The name of the token in the object's metadata.
CHANGE = "fusefs-change"
# The bytes of metadata that name and token take at most.
CHANGE_SIZE = len(CHANGE) + 16 + 1 + 16
# What S3 takes as metadata, in bytes of all names and values. Some stores count
# the names with the prefix that they have as headers.
METADATA_LIMIT = 2048
_TOKEN = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})")


class ChangeToken(NamedTuple):
    """One change: `number` counts the changes of one process of a mount, which is `mount`."""

    mount: str
    number: int

    def __str__(self) -> str:
        return f"{self.mount}-{self.number}"

    @staticmethod
    def from_text(text: str) -> ChangeToken | None:
        """The token that was written as `str`; None if it is none."""
        found = _TOKEN.fullmatch(text)
        return ChangeToken(found[1], int(found[2])) if found else None

    @staticmethod
    def parse(metadata: Mapping[str, str] | None) -> ChangeToken | None:
        """The token in an object's metadata; None if it has none, or the metadata is not known."""
        return ChangeToken.from_text((metadata or {}).get(CHANGE, ""))


class TokenSource:
    """The tokens of one process, from 1 on.

    No two processes have the same `mount`, which is 64 random bits: a number
    that was given out is never given out again, also after a restart.
    """

    def __init__(self) -> None:
        self.mount = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def next(self) -> ChangeToken:
        return ChangeToken(self.mount, next(self._numbers))


def stamped(metadata: Mapping[str, str], token: ChangeToken) -> dict[str, str]:
    """An object's metadata with the token of the change that makes it."""
    return {**metadata, CHANGE: str(token)}


def without_token(metadata: Mapping[str, str]) -> dict[str, str]:
    """An object's metadata but for the token: what it says about its content."""
    return {name: value for name, value in metadata.items() if name != CHANGE}
