"""Patterns of paths, like the shell's: for `fusefs warm`, pins and settings by path.

A setting by path is a list of rules, separated by commas, such as `bucket,local:runs/**`:
a rule is VALUE:PATTERN, or a VALUE for all other paths. The last rule whose pattern matches
decides. Patterns of rules are relative to the root of the mount.

`*`, `?` and `[…]` match within a name, `**` matches any number of directories. A pattern
that matches a directory matches all paths below it. With `hides`, as in a shell, none of
these wildcards matches a dot at the beginning of a name.
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
    """True if a path contains a wildcard character: `*`, `?` or `[`."""
    return any(character in path for character in "*?[")


def matches(pattern: str, path: str) -> bool:
    """True if a pattern matches a path, or a directory above the path."""
    return bool(matched(path.split("/"), [compiled(part) for part in pattern.split("/")]))


def compiled(part: str, *, hides: bool = True) -> re.Pattern[str] | None:
    """Return the regular expression for a pattern's part between slashes; None for `**`."""
    if part == "**":
        return None
    hidden = "" if part.startswith(".") or not hides else r"(?!\.)"
    return re.compile(hidden + fnmatch.translate(part))


def matched(
    path: Sequence[str], patterns: Sequence[re.Pattern[str] | None], *, hides: bool = True
) -> int:
    """Return the number of leading names of a path that match all `patterns`; 0 for no match."""

    def with_skipped(states: set[int]) -> set[int]:
        # `**` may stand for no name at all.
        for state in sorted(states):
            while state < len(patterns) and patterns[state] is None:
                state += 1
                states.add(state)
        return states

    # The indexes of the patterns that the next name may match.
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
    """A setting's values by path: the last matching rule's, or `otherwise` if no rule matches."""

    otherwise: Value
    rules: tuple[tuple[Value, str], ...] = ()

    def of(self, path: str) -> Value:
        """Return the value for `path`, which is relative to the root of the mount."""
        return _of(self, path) if self.rules else self.otherwise

    @property
    def values(self) -> tuple[Value, ...]:
        """All values that a path can have."""
        return self.otherwise, *(value for value, _ in self.rules)

    def shown(self, show: Callable[[Value], str] = str) -> str:
        """Return the rules as text for `parse_rules`; `show` converts one value to text."""
        rules = (f"{show(value)}:{pattern}" for value, pattern in self.rules)
        return ",".join([show(self.otherwise), *rules])


# Results are cached, because each write to a large file calls this.
@lru_cache(maxsize=1024)
def _of(rules: PathRules[Any], path: str) -> Any:
    names = path.split("/")
    for value, pattern in reversed(rules.rules):
        parts = [compiled(part, hides=False) for part in pattern.split("/")]
        if matched(names, parts, hides=False):
            return value
    return rules.otherwise


def parse_rules(text: str, read: Callable[[str], Value], default: Value) -> PathRules[Value]:
    """Parse rules such as `bucket,local:runs/**`; `read` parses one value.

    `default` is for paths that no rule matches, unless the text has a VALUE without a pattern.

    Raises:
        ValueError: a value or a pattern is invalid, or two values have no pattern.
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
