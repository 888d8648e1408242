"""An engine; no S3 server is needed."""

from collections.abc import AsyncIterator

import pytest

from fusefs.store.engine.engine import Engine, open_engine


@pytest.fixture(autouse=True)
def as_owner() -> None:
    """No owner's credentials, and so no server of theirs."""


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with open_engine(64) as one:
        yield one
