"""Sizes and times as text for people, with three or four digits; texts of others on one line."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")

# C0 and C1: ends of lines, and what terminals take for commands.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def shown(text: str) -> str:
    """`text` as one line without control characters, which keys of objects may have."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def human_size(size: float) -> str:
    """`size` bytes in three or four digits."""
    if size < 1024:
        return f"{size:.0f} B"
    exponent = 1
    while size >= 1000 * 1024**exponent and exponent < len(_UNITS):
        exponent += 1
    value = size / 1024**exponent
    digits = 1 if value < 100 else 0
    return f"{value:.{digits}f} {_UNITS[exponent - 1]}"


def human_duration(seconds: float | None) -> str:
    """A time span in its two largest units; None and infinity are `indefinite`."""
    if seconds is None or seconds == float("inf"):
        return "indefinite"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds % 1 == 0 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def counted(number: int, thing: str) -> str:
    """A number of things: `1 file`, `1,200 files`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
