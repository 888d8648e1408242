"""Findings, the results of checks: a text, a severity, and advice."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusefs.settings.display import counted, shown

_LABEL_WIDTH = 17
_LEVEL_WIDTH = 9


class Level(enum.StrEnum):
    """The severity of a finding. Only a problem makes `fusefs doctor` fail."""

    OK = "ok"
    ADVICE = "advice"  # works, but could work better
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` tells the user what to do; `figures` are for programs.

    Figures are in bytes, seconds and bytes per second.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_text(self) -> str:
        """Return the finding as one line, with a second line if there is advice."""
        line = f"{self.level:<{_LEVEL_WIDTH}}{self.check:<{_LABEL_WIDTH}}{shown(self.text)}"
        if not self.advice:
            return line
        return f"{line}\n{' ' * (_LEVEL_WIDTH + _LABEL_WIDTH)}-> {self.advice}"


def ok(check: str, text: str, **figures: Any) -> Finding:
    return Finding(check, Level.OK, text, figures=figures)


def advice(check: str, text: str, what_to_do: str, **figures: Any) -> Finding:
    return Finding(check, Level.ADVICE, text, what_to_do, figures)


def problem(check: str, text: str, what_to_do: str, **figures: Any) -> Finding:
    return Finding(check, Level.PROBLEM, text, what_to_do, figures)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, Level.SKIPPED, f"not checked: {why}")


def has_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def summary(findings: Iterable[Finding]) -> str:
    """Return the command's last line, with the counts of problems and of pieces of advice."""
    levels = [finding.level for finding in findings]
    problems, advices = levels.count(Level.PROBLEM), levels.count(Level.ADVICE)
    if not problems and not advices:
        return "nothing is wrong"
    return f"{counted(problems, 'problem')}, {counted(advices, 'piece')} of advice"
