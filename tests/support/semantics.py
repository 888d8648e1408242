"""Tests that show a sentence of docs/semantics.md."""

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def states(*sentences: str) -> Callable[[Test], Test]:
    """The test shows these statements, which are quoted word for word.

    tests/packaging/test_documents.py reads the quotations from the source.
    """
    return lambda test: test
