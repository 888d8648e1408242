"""What the tests of the store's writing share: a store, files to send, and what arrived."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from fusefs.posix.nodes.object_metadata import Form, dated
from fusefs.store.interface import Condition, ObjectInfo, Write
from fusefs.store.s3.put import SMALL
from fusefs.store.s3.store import S3Store
from tests.support import store_reading
from tests.support.machine.local_file import LocalFile
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server

PART = 5 << 20  # no S3 takes smaller ones
# One of usual characters, and one that XML has no way to write.
KEYS = ["some dir/a+b %20~ü", "odd\x01key"]
METADATA = {"mode": "33188", "mtime": "1795250694.123456789"}
REVISE = partial(dated, form=Form.S3FS)

# How a file is sent, by its size: from memory, from the file, in parts.
WAYS = [(1000, "PUT"), (SMALL + 1000, "PUT"), (3 * PART, "PART")]
each_way = pytest.mark.parametrize(("size", "operation"), WAYS, ids=["small", "one", "parts"])


@asynccontextmanager
async def opened(
    bucket: Bucket, server: FaultyS3 | S3Server, /, *, has_listed: bool = True, **settings: Any
) -> AsyncIterator[S3Store]:
    """A store with small parts; a mount's has listed before it writes."""
    chosen = {"read_timeout_s": 5.0, "part_size": PART, **settings}
    async with store_reading.opened(bucket, server, **chosen) as store:
        if has_listed:
            await store.check("")
        yield store


async def put(
    store: S3Store, key: str, file: LocalFile, condition: Condition = None, **options: Any
) -> ObjectInfo:
    """Send the whole file, with METADATA."""
    chosen: dict[str, Any] = {"metadata": METADATA, "content_type": "text/x-test", **options}
    return await store.put_file(key, file.fd, file.size, Write(condition=condition, **chosen))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
