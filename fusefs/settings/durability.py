"""Durability by path: where a file is when `close` and `fsync` return (rules: patterns.py)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fusefs.settings.patterns import PathRules, parse_rules


class Durability(enum.StrEnum):
    """The place of a file when fsync and close return.

    AUTO is the bucket, but for closes of a temporary file, and of one that is appended to again
    and again.
    """

    AUTO = "auto"
    BUCKET = "bucket"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class DurabilityRules(PathRules[Durability]):
    """The durability of each path."""

    otherwise: Durability = Durability.AUTO

    def __str__(self) -> str:
        return self.shown()

    @property
    def may_be_local(self) -> bool:
        """True if some path may have local durability."""
        return Durability.LOCAL in self.values


EVERYWHERE_AUTO = DurabilityRules()


def _read(name: str) -> Durability:
    try:
        return Durability(name)
    except ValueError:
        raise ValueError(
            f"{name!r} is none of {', '.join(Durability)}; write it like bucket, or for some"
            " paths like bucket,local:runs/**"
        ) from None


def parse_durability(text: str) -> DurabilityRules:
    """Read `bucket`, or `bucket,local:runs/**`."""
    read = parse_rules(text, _read, Durability.AUTO)
    return DurabilityRules(read.otherwise, read.rules)
