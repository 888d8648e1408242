"""Requests of the bucket that holds the blocks of a cluster cache."""

import random
from collections.abc import AsyncIterator

import pytest
import trio

from fusefs.cluster_cache import remote as remote_module
from fusefs.cluster_cache.block import Domain
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.store.engine.engine import Engine, open_engine
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectVersion, demanded
from fusefs.store.s3.access import AccessSource
from fusefs.store.s3.settings import S3Settings
from fusefs.telemetry.s3_requests import CLUSTER_REQUESTS, S3_REQUESTS
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3

BLOCK = Domain("", "bucket", b"secret").block(ObjectVersion("a", '"e"', 1000), 0)
BODY = Domain("", "bucket", b"secret").stored(BLOCK, bytes(1000))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with open_engine(4) as made:
        yield made


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[AccessSource]:
    """The sources of credentials that were to look for other ones."""
    found: list[AccessSource] = []
    monkeypatch.setattr(AccessSource, "renew", lambda source: found.append(source))
    return found


async def test_expired_credentials_are_looked_for_anew(
    bucket: Bucket, faulty: FaultyS3, engine: Engine, renewals: list[AccessSource]
) -> None:
    faulty.clear()
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/", engine)
    taken: list[bytes] = []

    async def take(chunk: memoryview) -> None:
        taken.append(bytes(chunk))

    async def get() -> None:
        await remote.get(
            BLOCK.name,
            *BLOCK.stored_range(BLOCK.start, BLOCK.stop),
            take,
            sent=lambda: None,
            priority=demanded,
        )

    await remote.open()
    assert await remote.put(BLOCK.name, BODY, overwrites=False)
    assert not await remote.put(BLOCK.name, BODY, overwrites=False)
    await get()
    assert b"".join(taken) == BODY
    assert renewals == []
    faulty.add("*", "blocks/*", code="ExpiredToken")
    with pytest.raises(StoreError):
        await get()
    assert len(renewals) == 1
    with pytest.raises(StoreError):
        await remote.put(BLOCK.name, BODY, overwrites=True)
    assert len(renewals) == 2


async def test_a_block_that_collides_with_another_nodes_is_there_only_if_that_one_stored_it(
    bucket: Bucket, faulty: FaultyS3, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "COLLIDED_S", 0.0)
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/", engine)
    await remote.open()
    collided = faulty.add("PUT", "blocks/*", code="ConditionalRequestConflict", times=2)
    assert await remote.put(BLOCK.name, BODY, overwrites=False)
    assert collided.used == 2
    faulty.add("PUT", "blocks/*", code="ConditionalRequestConflict", times=1)
    assert not await remote.put(BLOCK.name, BODY, overwrites=False)
    faulty.add("PUT", "blocks/*", code="ExistingObjectIsDirectory", status=409)
    with pytest.raises(StoreError, match="409"):
        await remote.put(BLOCK.name, BODY, overwrites=False)


async def test_a_large_block_is_handed_on_as_it_comes(
    bucket: Bucket, faulty: FaultyS3, engine: Engine
) -> None:
    domain, size = Domain("", "bucket", b"secret"), 3 << 20
    block = domain.block(ObjectVersion("a", '"e"', size), 0)
    body = domain.stored(block, random.randbytes(size))
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/", engine)
    await remote.open()
    assert await remote.put(block.name, body, overwrites=False)
    taken: list[bytes] = []

    async def take(chunk: memoryview) -> None:
        await trio.sleep(0.01)
        taken.append(bytes(chunk))

    faulty.add("GET", "blocks/*", bytes_per_s=8 << 20, times=1)
    await remote.get(block.name, 0, len(body), take, sent=lambda: None, priority=demanded)
    assert b"".join(taken) == body
    assert len(taken) > 1
    taken.clear()
    faulty.add("GET", "blocks/*", cut_after=2 << 20, times=1)
    with pytest.raises(StoreError):
        await remote.get(block.name, 0, len(body), take, sent=lambda: None, priority=demanded)
    assert b"".join(taken) == body[: sum(map(len, taken))]

    async def refuse(_chunk: memoryview) -> None:
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        await remote.get(block.name, 0, len(body), refuse, sent=lambda: None, priority=demanded)


async def test_what_is_stored_too_slowly_is_given_up(
    bucket: Bucket, faulty: FaultyS3, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.clear()
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/", engine)
    await remote.open()
    held = faulty.hold("PUT", "blocks/*")
    monkeypatch.setattr(remote_module, "PUT_LIMIT_S", 0.1)
    with pytest.raises(StoreError, match="too long"):
        await remote.put(BLOCK.name, BODY, overwrites=False)
    held.drop()


async def test_requests_to_the_cluster_cache_are_none_to_s3(bucket: Bucket, engine: Engine) -> None:
    before = S3_REQUESTS.samples()
    remote = BlockBucket(S3Settings(bucket.name, bucket.server.endpoint_url), "blocks/", engine)
    away = BlockBucket(S3Settings(bucket.name, "http://127.0.0.1:9"), "blocks/", engine)
    await remote.open()
    assert await remote.put(BLOCK.name, BODY, overwrites=False)
    with pytest.raises(StoreError):
        await away.open()
    assert S3_REQUESTS.samples() == before  # what is failing there is no alert about S3
    durations = CLUSTER_REQUESTS.samples()["cluster_cache_request_duration_seconds"]
    found = {(one["labels"]["operation"], one["labels"]["code"]) for one in durations}
    assert found >= {("list", "200"), ("put", "200"), ("list", "none")}
