"""A mount without a kernel, and its first process."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.survival.mortal_mount import MortalMount, Process


@pytest.fixture
def mount(tmp_path: Path) -> MortalMount:
    return MortalMount(tmp_path)


@pytest.fixture
async def process(mount: MortalMount) -> AsyncIterator[Process]:
    """The only process of a test; it is there before the test begins."""
    async with mount.serving() as one:
        yield one
