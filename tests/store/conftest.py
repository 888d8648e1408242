"""A store of the tests' server, and a bucket that is filled."""

from collections.abc import AsyncIterator

import pytest

from fusefs.store.s3 import store as s3_module
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import BODY, ODD_KEY, opened


@pytest.fixture(scope="module")
def shared(shared: Bucket) -> Bucket:
    """A bucket that no test changes, with `BODY` under a plain and an odd key."""
    shared.put("body", BODY)
    shared.put(ODD_KEY, BODY)
    return shared


@pytest.fixture(autouse=True)
def as_owner(as_owner: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere, and a store is given up soon."""
    monkeypatch.setattr(s3_module, "CHECK_TIME_S", 0.5)


@pytest.fixture
async def store(as_owner: None, shared: Bucket, faulty: FaultyS3) -> AsyncIterator[S3Store]:
    """A store that sees the shared bucket through the server that fails on demand."""
    async with opened(shared, faulty) as one:
        yield one
