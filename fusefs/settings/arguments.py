"""The parser of both commands: complaints in one line, and options by their whole names."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '([^']*)' \((?:choose from|maybe you meant) (.*)\)")


class Parser(argparse.ArgumentParser):
    """Knows no abbreviations, since those of today would stand in the way of new options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    # Overloaded in typeshed; only this form is used.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but the command that does not know an option complains itself."""
        found, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                hint = did_you_mean(name, self._option_string_actions)
                self.error(f"there is no option {name}{hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[0]
        choice = _CHOICE.search(message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            hint = did_you_mean(choice[1], known) or f"; it is one of {', '.join(known)}"
            message = f"{message[: choice.start()]}{choice[1]!r} is not known{hint}"
        text = " ".join(f"{message}; see {self.prog} --help".split())
        print(f"{command}: {text}", file=sys.stderr)
        sys.exit(2)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question to follow a complaint; "" if nothing is near."""
    names = [name for name in known if name.startswith("--") == word.startswith("--")]
    begun = [name for name in names if len(word) > 3 and name.startswith(word)]
    nearest = begun[:1] or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
