"""What the tests of the store's reading share: a store, what there is to read, and a download."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from fusefs.store.interface import LARGE, ObjectInfo, ObjectVersion
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import S3Store, open_store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server

BODY = os.urandom(5 << 20)
# A key with an empty segment.
ODD_KEY = "odd//key"
LIMIT_S = 60


@asynccontextmanager
async def opened(
    bucket: Bucket, server: FaultyS3 | S3Server, /, **settings: Any
) -> AsyncIterator[S3Store]:
    """A store that sees the bucket through a server, and gives up soon."""
    chosen = {
        "bucket": bucket.name,
        "endpoint_url": server.endpoint_url,
        "max_connections": 4,
        "retry_time_s": 20.0,
        "read_timeout_s": 3.0,
        **settings,
    }
    with trio.fail_after(LIMIT_S):
        async with open_store(S3Settings(**chosen)) as store:
            yield store


class Collector:
    """A sink that checks that bytes come in order and without gaps."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self.file = os.memfd_create("sink")
        self.data = bytearray()
        self.sums: list[tuple[int, int, int]] = []

    async def open(self) -> int:
        return self.file

    async def write(self, offset: int, data: memoryview) -> None:
        raise AssertionError("the engine writes")

    def arrived(self, stop: int, sums: Sequence[tuple[int, int, int]]) -> None:
        assert stop >= self.stop
        self.data += os.pread(self.file, stop - self.stop, self.stop)
        self.stop = stop
        self.sums += sums

    def close(self) -> None:
        os.close(self.file)


async def read_body(store: S3Store) -> None:
    """Check the store, and download the object `body`: its beginning, and all of it."""
    await store.check("")
    info = await store.head("body")
    assert await download(store, info, 0, LARGE) == BODY[:LARGE]
    assert await download(store, info) == BODY


async def download(
    store: S3Store, info: ObjectInfo | ObjectVersion, start: int = 0, stop: int | None = None
) -> bytes:
    """Download a range; checks that the pieces come in order and without gaps."""
    version = info.version if isinstance(info, ObjectInfo) else info
    stop = version.size if stop is None else stop
    sink = Collector(start)
    try:
        await store.download(version, start, stop, sink)
    finally:
        sink.close()
    return bytes(sink.data)
