"""Text for people: sizes, times and counts in short forms, and foreign text on one line."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")

# The control characters C0 and C1: newlines, and characters that terminals take for commands.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def shown(text: str) -> str:
    """Return `text`, such as an object's key, with its control characters escaped."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def human_size(size: float) -> str:
    """Return `size` bytes as text of three or four digits with a binary unit."""
    if size < 1024:
        return f"{size:.0f} B"
    exponent = 1
    while size >= 1000 * 1024**exponent and exponent < len(_UNITS):
        exponent += 1
    value = size / 1024**exponent
    digits = 1 if value < 100 else 0
    return f"{value:.{digits}f} {_UNITS[exponent - 1]}"


def human_duration(seconds: float | None) -> str:
    """Return a time span as text in its two largest units; `indefinite` for None and infinity."""
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
    """Return a number of things as text, such as `1 file` or `1,200 files`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
