"""Unit tests sync their files thousands of times, so these are in memory where that is possible."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM = 1 << 30


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory on a tmpfs, if there is one with room; on a disk for tests that are marked so."""
    if request.node.get_closest_marker("disk") or not _has_room():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="fusefs-") as directory:
        yield Path(directory)


def _has_room() -> bool:
    try:
        found = os.statvfs(MEMORY)
    except FileNotFoundError:
        return False
    return found.f_bavail * found.f_bsize >= ROOM
