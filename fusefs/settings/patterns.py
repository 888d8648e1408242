"""Patterns of paths, as the shell has them: for `fusefs warm`, pins and rules by path.

`*`, `?` and `[…]` match within a name, `**` matches any number of directories. A
pattern that matches a directory matches all below it. With `hides`, as in a shell,
nothing of these matches a dot at a name's beginning.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

_NOTHING = re.compile(r"(?!)")


def is_pattern(path: str) -> bool:
    """True if a path has characters of a pattern."""
    return any(character in path for character in "*?[")


def matches(pattern: str, path: str) -> bool:
    """True if a path, or a directory that it is in, matches a pattern."""
    return bool(matched(path.split("/"), [compiled(part) for part in pattern.split("/")]))


def compiled(part: str, *, hides: bool = True) -> re.Pattern[str] | None:
    """A part of a pattern; None is `**`."""
    if part == "**":
        return None
    hidden = "" if part.startswith(".") or not hides else r"(?!\.)"
    return re.compile(hidden + fnmatch.translate(part))


def matched(
    path: Sequence[str], patterns: Sequence[re.Pattern[str] | None], *, hides: bool = True
) -> int:
    """Count the first names of a path that match all patterns; 0 if they never do."""

    def with_skipped(states: set[int]) -> set[int]:
        # `**` may stand for no name at all.
        for state in sorted(states):
            while state < len(patterns) and patterns[state] is None:
                state += 1
                states.add(state)
        return states

    # The numbers of patterns that may come next.
    states = with_skipped({0})
    for count, name in enumerate(path, 1):
        following = set()
        for state in states:
            pattern = patterns[state] if state < len(patterns) else _NOTHING
            if pattern is None:
                if not hides or not name.startswith("."):
                    following.add(state)
            elif pattern.match(name):
                following.add(state + 1)
        states = with_skipped(following)
        if len(patterns) in states:
            return count
    return 0
