"""Rules that every module keeps: how docstrings begin, and what may not be added up."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLAUSES = {"How", "If", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"}


def nodes(package: str) -> Iterator[tuple[str, ast.AST]]:
    """The syntax of a package, each node with its place."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.parent.name != "generated":
            for node in ast.walk(ast.parse(path.read_text())):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


@pytest.mark.parametrize("package", ["fusefs", "csi", "bench"])
def test_no_docstring_begins_with_a_clause(package: str) -> None:
    """A thing's begins with a noun, an action's with a verb."""
    texts = [
        (place, text)
        for place, node in nodes(package)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    assert len(texts) > 100
    assert [each for each in texts if each[1].split()[0].rstrip(":,.") in CLAUSES] == []


def test_no_sum_of_an_object_is_read_before_a_wait() -> None:
    """In `self.n += await f()` what other tasks add meanwhile is lost."""
    sums = [(place, node) for place, node in nodes("fusefs") if isinstance(node, ast.AugAssign)]
    assert len(sums) > 50
    assert [
        place
        for place, node in sums
        if not isinstance(node.target, ast.Name)
        and any(isinstance(each, ast.Await) for each in ast.walk(node.value))
    ] == []
