"""What is seen of the processes that make requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux import callers
from fusefs.linux.callers import LIVES


@pytest.fixture
def own_name() -> Iterator[Path]:
    """The file that names this thread."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


def test_a_name_that_the_kernel_cuts_inside_a_character_hides_no_process(own_name: Path) -> None:
    own_name.write_bytes("загрузка данных".encode())
    with pytest.raises(UnicodeDecodeError):
        own_name.read_text()
    assert callers.fate(threading.get_native_id()) == LIVES
