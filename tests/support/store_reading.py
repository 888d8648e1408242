"""What the tests of the store's reading share: a filled bucket, a store, and a download.

The fixtures are imported by name; `as_owner` then holds for all tests of a module.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from fusefs.store.interface import ObjectInfo, ObjectVersion
from fusefs.store.s3 import store as s3_module
from fusefs.store.s3.clients import S3Settings
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3

BODY = os.urandom(5 << 20)
# No path of obstore's can hold it, so boto3 reads it.
ODD_KEY = "odd//key"
LIMIT_S = 30


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


@asynccontextmanager
async def opened(shared: Bucket, faulty: FaultyS3, **settings: Any) -> AsyncIterator[S3Store]:
    """A store that sees the bucket through the faulty server and gives up soon."""
    chosen = {
        "bucket": shared.name,
        "endpoint_url": faulty.endpoint_url,
        "max_connections": 4,
        "retry_time_s": 20.0,
        "read_timeout_s": 1.0,
        **settings,
    }
    store = S3Store(S3Settings(**chosen))
    with trio.fail_after(LIMIT_S):
        yield store
        await store.aclose()


async def download(
    store: S3Store,
    info: ObjectInfo | ObjectVersion,
    start: int = 0,
    stop: int | None = None,
    *,
    in_loop: bool = False,
) -> bytes:
    """Download a range; checks that the pieces come in order and without gaps."""
    version = info.version if isinstance(info, ObjectInfo) else info
    got = bytearray()

    def write(offset: int, chunk: memoryview) -> None:
        assert offset == start + len(got)
        got.extend(chunk)

    stop = version.size if stop is None else stop
    await store.download(version, start, stop, write, in_loop=in_loop)
    return bytes(got)
