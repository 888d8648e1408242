"""Docstrings begin with a noun, for a thing, or with a verb, for an action: never with a clause."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLAUSES = {"How", "If", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"}


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of a package, each with its place."""
    for path in sorted(folder.rglob("*.py")):
        if path.parent.name == "generated":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


@pytest.mark.parametrize("package", ["fusefs", "csi", "bench"])
def test_no_docstring_begins_with_a_clause(package: str) -> None:
    texts = list(docstrings(ROOT / package))
    assert len(texts) > 100
    assert [each for each in texts if each[1].split()[0].rstrip(":,.") in CLAUSES] == []
