"""A cache without a mount."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.local_cache import Parts, cache_in


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with cache_in(tmp_path) as one:
        yield one
