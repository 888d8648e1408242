"""Durability by path: where a file is when `close` and `fsync` return.

A value is a mode, or MODE:PATTERN, or several of both with commas between them, as
`bucket,local:runs/**`. The last pattern that matches decides; the plain mode is for all
other paths. Patterns are relative to the root of the mount.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

from fusefs.settings.patterns import compiled, matched


class Durability(enum.StrEnum):
    """The place of a file when fsync and close return.

    AUTO is the bucket, but for closes of a temporary file, and of one that is appended to again
    and again.
    """

    AUTO = "auto"
    BUCKET = "bucket"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class DurabilityRules:
    """The durability of each path: that of the last rule (a mode and a pattern) that matches."""

    otherwise: Durability = Durability.AUTO
    rules: tuple[tuple[Durability, str], ...] = ()

    def __str__(self) -> str:
        return ",".join([self.otherwise, *(f"{mode}:{pattern}" for mode, pattern in self.rules)])

    def of(self, path: str) -> Durability:
        """The durability of a file whose path is relative to the root of the mount."""
        return _of(self, path) if self.rules else self.otherwise

    @property
    def may_be_local(self) -> bool:
        """True if some path may have local durability."""
        return Durability.LOCAL in (self.otherwise, *(mode for mode, _ in self.rules))


EVERYWHERE_AUTO = DurabilityRules()


# Each write to a large file asks again.
@lru_cache(maxsize=1024)
def _of(rules: DurabilityRules, path: str) -> Durability:
    names = path.split("/")
    for mode, pattern in reversed(rules.rules):
        parts = [compiled(part, hides=False) for part in pattern.split("/")]
        if matched(names, parts, hides=False):
            return mode
    return rules.otherwise


def parse_durability(text: str) -> DurabilityRules:
    """Read `bucket`, or `bucket,local:runs/**`."""
    otherwise: list[Durability] = []
    rules: list[tuple[Durability, str]] = []
    for part in text.split(","):
        name, colon, pattern = part.strip().partition(":")
        try:
            mode = Durability(name)
        except ValueError:
            raise ValueError(
                f"{name!r} is none of {', '.join(Durability)}; write it like bucket, or for some"
                " paths like bucket,local:runs/**"
            ) from None
        if colon:
            rules.append((mode, _pattern(pattern)))
        else:
            otherwise.append(mode)
    if len(otherwise) > 1:
        raise ValueError(f"{text!r} has {len(otherwise)} modes without a pattern; one is for all")
    return DurabilityRules(otherwise[0] if otherwise else Durability.AUTO, tuple(rules))


def _pattern(text: str) -> str:
    pattern = text.removesuffix("/")
    if not pattern.isprintable() or any(
        part in ("", ".", "..") or ("**" in part and part != "**") for part in pattern.split("/")
    ):
        raise ValueError(
            f"{text!r} is not a pattern of paths below the mount; write it like runs/** or **/*.log"
        )
    return pattern
