"""Sizes and durations as people write them, and back.

Binary units are `KiB` to `PiB` (or Kubernetes' `Ki` to `Pi`), decimal ones
`kB` to `PB`. A bare `K` or `G` is refused: half of the tools mean 1000 by it
and the other half 1024. What is written is read back as the same value.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB, MIB, GIB, TIB, PIB = (1024**power for power in range(1, 6))

# Kubernetes writes a quantity of 1024**3 bytes as Gi.
_BINARY = {
    unit: 1024**power
    for power, letter in enumerate("KMGTP", start=1)
    for unit in (f"{letter}iB", f"{letter}i")
}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)}
_SIZE_UNITS = {"": 1, "B": 1, "kB": 1000} | _DECIMAL | _BINARY
# Half of the tools mean 1000 by it, the other half 1024.
_AMBIGUOUS = frozenset("KMGTP")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Read `50GiB`, `1.5TB` or `4096` as bytes."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is not None and match[2].upper() in _AMBIGUOUS:
        number, letter = match[1], match[2][0].upper()
        decimal = "k" if letter == "K" else letter
        raise ValueError(
            f"{text!r} may mean {number}{letter}iB (units of 1024) or {number}{decimal}B (units of"
            " 1000); write the one that is meant"
        )
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 50GiB, 1.5TB or 4096 (bytes)")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2]])


def format_size(size: int) -> str:
    """Show `size` in the largest binary unit that loses nothing."""
    for unit, factor in (("PiB", PIB), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_duration(text: str) -> float:
    """Read `60s`, `500ms`, `5m`, `2h` or a number of seconds."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in _DURATION_UNITS:
        raise ValueError(f"{text!r} is not a duration; write it like 60s, 500ms, 5m or 2h")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def format_duration(seconds: float) -> str:
    return "indefinite" if math.isinf(seconds) else f"{plain_number(seconds)}s"


def plain_number(number: float) -> str:
    """`number` without an exponent and without losing a digit."""
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
