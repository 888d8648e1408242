"""The argument parser of `fusefs` and `fusefs-csi`: one-line errors, no abbreviated options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '([^']*)' \((?:choose from|maybe you meant) (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options: a new option could make them ambiguous."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    # typeshed has overloads, of which only this form is used.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse, but exit for an unknown option; the error names this subcommand."""
        found, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                near = did_you_mean(name, self._option_string_actions)
                self.error(f"there is no option {name}{near}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[0]
        if (choice := _CHOICE.search(message)) is not None:
            known = re.findall(r"[\w-]+", choice[2])
            hint = did_you_mean(choice[1], known) or f"; it is one of {', '.join(known)}"
            message = f"{message[: choice.start()]}{choice[1]!r} is not known{hint}"
        text = " ".join(f"{message}; see {self.prog} --help".split())
        print(f"{command}: {text}", file=sys.stderr)
        sys.exit(2)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for the end of an error message; "" if no known word is similar."""
    import difflib  # only needed after mistakes

    names = [name for name in known if name.startswith("--") == word.startswith("--")]
    begun = [name for name in names if len(word) > 3 and name.startswith(word)]
    nearest = begun[:1] or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
