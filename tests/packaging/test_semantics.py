"""Every statement of docs/semantics.md has a test that quotes it."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "semantics.md"


def statements() -> list[str]:
    return [
        line.removeprefix("- ") for line in DOCUMENT.read_text().splitlines() if line[:2] == "- "
    ]


def quotations() -> dict[str, str]:
    """Every sentence that a test quotes, and in which file."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "states":
                for argument in node.args:
                    found[ast.literal_eval(argument)] = path.name
    return found


def test_every_statement_of_the_document_has_a_test() -> None:
    assert set(statements()) - quotations().keys() == set()


def test_every_quoted_statement_is_in_the_document() -> None:
    assert quotations().keys() - set(statements()) == set()
