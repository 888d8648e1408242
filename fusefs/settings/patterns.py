"""Patterns of paths, as the shell has them: for `fusefs warm`, pins and rules by path.

A rule by path is a value, or VALUE:PATTERN, or several of both with commas between them, as
`bucket,local:runs/**`. The last pattern that matches decides; the plain value is for all
other paths. Patterns of rules are relative to the root of the mount.

`*`, `?` and `[…]` match within a name, `**` matches any number of directories. A
pattern that matches a directory matches all below it. With `hides`, as in a shell,
nothing of these matches a dot at a name's beginning.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

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


@dataclass(frozen=True, slots=True)
class PathRules(Generic[Value]):
    """The value of a setting for each path: that of the last rule whose pattern matches."""

    otherwise: Value
    rules: tuple[tuple[Value, str], ...] = ()

    def of(self, path: str) -> Value:
        """The value for a path that is relative to the root of the mount."""
        return _of(self, path) if self.rules else self.otherwise

    @property
    def values(self) -> tuple[Value, ...]:
        """All values that some path may have."""
        return self.otherwise, *(value for value, _ in self.rules)

    def shown(self, show: Callable[[Value], str] = str) -> str:
        """The text that `parse_rules` reads."""
        rules = (f"{show(value)}:{pattern}" for value, pattern in self.rules)
        return ",".join([show(self.otherwise), *rules])


# Each write to a large file asks again.
@lru_cache(maxsize=1024)
def _of(rules: PathRules[Any], path: str) -> Any:
    names = path.split("/")
    for value, pattern in reversed(rules.rules):
        parts = [compiled(part, hides=False) for part in pattern.split("/")]
        if matched(names, parts, hides=False):
            return value
    return rules.otherwise


def parse_rules(text: str, read: Callable[[str], Value], default: Value) -> PathRules[Value]:
    """Read `bucket`, or `bucket,local:runs/**`, with `read` for each value.

    Raises:
        ValueError: it is none of that.
    """
    otherwise: list[Value] = []
    rules: list[tuple[Value, str]] = []
    for part in text.split(","):
        name, colon, pattern = part.strip().partition(":")
        value = read(name)
        if colon:
            rules.append((value, _pattern(pattern)))
        else:
            otherwise.append(value)
    if len(otherwise) > 1:
        raise ValueError(f"{text!r} has {len(otherwise)} values without a pattern; one is for all")
    return PathRules(otherwise[0] if otherwise else default, tuple(rules))


def _pattern(text: str) -> str:
    pattern = text.removesuffix("/")
    if not pattern.isprintable() or any(
        part in ("", ".", "..") or ("**" in part and part != "**") for part in pattern.split("/")
    ):
        raise ValueError(
            f"{text!r} is not a pattern of paths below the mount; write it like runs/** or **/*.log"
        )
    return pattern
