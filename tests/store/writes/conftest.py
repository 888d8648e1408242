"""Stores that write into a bucket of the test's own."""

from collections.abc import AsyncIterator

import pytest

from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_writing import opened


@pytest.fixture
async def store(as_owner: None, bucket: Bucket, faulty: FaultyS3) -> AsyncIterator[S3Store]:
    """A store that sees the bucket through the server that fails on demand."""
    async with opened(bucket, faulty) as one:
        yield one


@pytest.fixture
async def direct(as_owner: None, bucket: Bucket) -> AsyncIterator[S3Store]:
    """A store with nothing between it and the server."""
    async with opened(bucket, bucket.server) as one:
        yield one
