"""Requests of the bucket that holds the blocks of a cluster cache."""

from __future__ import annotations

import weakref

import pytest

from fusefs.cluster_cache import remote as remote_module
from fusefs.cluster_cache.block import Domain, StoredBlock
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.store.errors import AttemptError
from fusefs.store.http.answers import Answer
from fusefs.store.http.async_exchange import Late
from fusefs.store.interface import ObjectVersion, demanded
from fusefs.store.s3.clients import ClientSource, S3Settings
from fusefs.telemetry.s3_requests import CLUSTER_REQUESTS, S3_REQUESTS
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3

BLOCK = Domain("", "bucket", b"secret").block(ObjectVersion("a", '"e"', 1000), 0)
BODY = StoredBlock(Domain("", "bucket", b"secret"), BLOCK, bytes(1000))


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[ClientSource]:
    """The sources of credentials that were to look for other ones."""
    found: list[ClientSource] = []
    monkeypatch.setattr(ClientSource, "renew", lambda source: found.append(source))
    return found


@pytest.mark.usefixtures("as_owner")
async def test_expired_credentials_are_looked_for_anew(
    bucket: Bucket, faulty: FaultyS3, renewals: list[ClientSource]
) -> None:
    faulty.clear()
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/")
    taken: list[bytes] = []

    async def get() -> None:
        await remote.get(
            BLOCK.name,
            0,
            BLOCK.stored_size,
            lambda chunk: taken.append(bytes(chunk)),
            sent=lambda: None,
            priority=demanded,
        )

    try:
        await remote.open()
        assert await remote.put(BLOCK.name, BODY, overwrites=False)
        assert not await remote.put(BLOCK.name, BODY, overwrites=False)
        await get()
        assert b"".join(taken) == BODY.whole()
        assert renewals == []
        faulty.add("*", "blocks/*", code="ExpiredToken")
        with pytest.raises(AttemptError):
            await get()
        assert len(renewals) == 1
        with pytest.raises(AttemptError):
            await remote.put(BLOCK.name, BODY, overwrites=True)
        assert len(renewals) == 2
    finally:
        remote.close()


@pytest.mark.usefixtures("as_owner")
async def test_a_block_that_collides_with_another_nodes_is_there_only_if_that_one_stored_it(
    bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "COLLIDED_S", 0.0)
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/")
    try:
        await remote.open()
        collided = faulty.add("PUT", "blocks/*", code="ConditionalRequestConflict", times=2)
        assert await remote.put(BLOCK.name, BODY, overwrites=False)
        assert collided.used == 2
        faulty.add("PUT", "blocks/*", code="ConditionalRequestConflict", times=1)
        assert not await remote.put(BLOCK.name, BODY, overwrites=False)
        faulty.add("PUT", "blocks/*", code="ExistingObjectIsDirectory", status=409)
        with pytest.raises(AttemptError, match="409"):
            await remote.put(BLOCK.name, BODY, overwrites=False)
    finally:
        remote.close()


class Bytes(bytearray):
    """Of which it is seen whether they are still in memory."""


@pytest.mark.usefixtures("as_owner")
async def test_what_is_stored_too_slowly_is_not_held_in_memory(
    bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.clear()
    domain, size = Domain("", "bucket", b"secret"), 1 << 20
    block = domain.block(ObjectVersion("a", '"e"', size), 0)
    remote = BlockBucket(S3Settings(bucket.name, faulty.endpoint_url), "blocks/")
    try:
        await remote.open()
        held = faulty.hold("PUT", "blocks/*")
        monkeypatch.setattr(remote_module, "PUT_LIMIT_S", 0.1)
        data = Bytes(size)
        is_held = weakref.ref(data)
        body = StoredBlock(domain, block, data)
        del data
        with pytest.raises(AttemptError):
            await remote.put(block.name, body, overwrites=False)
        assert is_held() is None
        held.drop()
    finally:
        remote.close()


@pytest.mark.usefixtures("as_owner")
async def test_requests_to_the_cluster_cache_are_none_to_s3(bucket: Bucket) -> None:
    before = S3_REQUESTS.samples()
    remote = BlockBucket(S3Settings(bucket.name, bucket.server.endpoint_url), "blocks/")
    away = BlockBucket(S3Settings(bucket.name, "http://127.0.0.1:9"), "blocks/")
    try:
        await remote.open()
        assert await remote.put(BLOCK.name, BODY, overwrites=False)
        with pytest.raises(AttemptError):
            await away.open()
    finally:
        remote.close()
        away.close()
    assert S3_REQUESTS.samples() == before  # what is failing there is no alert about S3
    durations = CLUSTER_REQUESTS.samples()["cluster_cache_request_duration_seconds"]
    found = {(one["labels"]["operation"], one["labels"]["code"]) for one in durations}
    assert found >= {("list", "200"), ("put", "200"), ("list", "none")}


async def not_late(_receive: object) -> Answer:
    raise AssertionError("it was there in time")


@pytest.mark.usefixtures("as_owner")
async def test_small_blocks_take_no_thread(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = BlockBucket(S3Settings(bucket.name, bucket.server.endpoint_url), "blocks/")
    late = Late(60.0, not_late)

    async def get(name: str) -> memoryview | None:
        size = BLOCK.stored_size
        return await remote.get_now(name, 0, size, late=late, priority=demanded)

    def no_thread(*_: object) -> None:
        raise AssertionError("a thread costs the event loop twice as much")

    try:
        await remote.open()  # a thread opens the connections
        for requester in (remote._gets, remote._puts):
            monkeypatch.setattr(requester._threads, "run", no_thread)
        assert await remote.put(BLOCK.name, BODY, overwrites=False)
        assert not await remote.put(BLOCK.name, BODY, overwrites=False)
        assert await remote.put(BLOCK.name, BODY, overwrites=True)
        content = await get(BLOCK.name)
        assert content is not None
        assert bytes(content) == BODY.whole()
        with pytest.raises(AttemptError, match="no such object"):
            await get("none")
        async with remote._gets.connections.lease(demanded):
            monkeypatch.setattr(remote._gets.connections, "maximum", 1)
            remote._gets.connections._allowed = 1.0
            assert await get(BLOCK.name) is None, "no connection is free"
    finally:
        remote.close()
