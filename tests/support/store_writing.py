"""What the tests of the store's writing share: a store, files to send, and what arrived."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.store.base import Condition, ObjectInfo
from fusefs.store.clients import S3Settings
from fusefs.store.s3 import S3Store
from fusefs.store.writing import SMALL
from tests.support.buckets import Bucket
from tests.support.s3_server import S3Server

PART = 5 << 20  # no S3 takes smaller ones
LIMIT_S = 60
# One that obstore can express, and one that it can't.
KEYS = ["some dir/a+b %20~ü", "odd\x01key"]
METADATA = {"mode": "33188", "mtime": "1795250694.123456789"}

# How a file is sent, by its size: through obstore, through boto3, in parts.
WAYS = [(1000, "PUT"), (SMALL + 1000, "PUT"), (3 * PART, "PART")]
each_way = pytest.mark.parametrize(("size", "operation"), WAYS, ids=["small", "one", "parts"])


def become_owner(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the credentials of the server in the environment, and nothing else of AWS's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@asynccontextmanager
async def opened(
    bucket: Bucket, endpoint_url: str, *, has_listed: bool = True, **settings: Any
) -> AsyncIterator[S3Store]:
    """A store with small parts that gives up soon; a mount's has listed before it writes."""
    chosen = {
        "bucket": bucket.name, "endpoint_url": endpoint_url, "max_connections": 4,
        "retry_time_s": 20.0, "read_timeout_s": 5.0, "part_size": PART, **settings,
    }  # fmt: skip
    store = S3Store(S3Settings(**chosen))
    with trio.fail_after(LIMIT_S):
        if has_listed:
            await store.check("")
        yield store
        await store.aclose()


class LocalFile:
    """A file of random bytes, open for reading."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.write_bytes(os.urandom(size))
        self.fd = os.open(path, os.O_RDONLY)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def data(self) -> bytes:
        return self.path.read_bytes()

    def change(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def append(self, size: int) -> None:
        with self.path.open("ab") as file:
            file.write(os.urandom(size))


MakeFile = Callable[[int], LocalFile]


async def put(
    store: S3Store, key: str, file: LocalFile, condition: Condition = None, **options: Any
) -> ObjectInfo:
    """Send the whole file, with METADATA."""
    chosen: dict[str, Any] = {"metadata": METADATA, "content_type": "text/x-test", **options}
    return await store.put_file(key, file.fd, file.size, condition=condition, **chosen)


def contents(bucket: Bucket, key: str) -> bytes:
    data: bytes = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    return data


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keys(bucket: Bucket) -> list[str]:
    answer = bucket.client.list_objects_v2(Bucket=bucket.name)
    return [one["Key"] for one in answer.get("Contents", [])]


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await trio.sleep(0.01)
