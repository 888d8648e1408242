"""A GET that is slow to answer is sent again: one of the two writes, the other is given up."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.store.admission.hedging import SHARE
from fusefs.store.engine.engine import Request, Transfer
from fusefs.store.errors import StaleVersionError
from fusefs.store.interface import LARGE, ObjectInfo
from fusefs.store.s3.store import S3Store
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3, Hold
from tests.support.servers.tls import tls_door
from tests.support.store_reading import BODY, download, opened
from tests.support.waiting import eventually, until


@asynccontextmanager
async def impatient(
    shared: Bucket, faulty: FaultyS3, wait_s: float = 0.01, **settings: Any
) -> AsyncIterator[S3Store]:
    """A store that has seen many GETs, all of them quick."""
    async with opened(shared, faulty, read_timeout_s=10.0, **settings) as store:
        await store.check("")
        hedging = store.getter.hedging
        hedging.wait_s = wait_s
        for _ in range(round(1 / SHARE) + 1):
            hedging.note_sent()
        take = hedging.take

        def take_behind_the_first() -> bool:
            """On a busy machine the second GET would come to the server before the first."""
            until(lambda: faulty.requests("GET", "body"))
            return take()

        hedging.take = take_behind_the_first  # type: ignore[method-assign]
        yield store


async def read(store: S3Store) -> bytes:
    return await download(store, await store.head("body"), 0, LARGE)


def release(hold: Hold) -> None:
    """Have the held requests answered; the server's thread goes on meanwhile."""
    hold.released.set()


async def given_up(hold: Hold) -> None:
    await eventually(lambda: all(held.done.is_set() for held in hold.held))
    assert all(held.is_client_gone for held in hold.held)


@states(
    "A GET of up to 256 KiB that has no answer after longer than nearly all the others took is"
    " sent again on another connection, for 3% of these GETs at most; the first answer counts."
)
async def test_a_slow_get_is_sent_again_and_the_first_answer_counts(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with impatient(shared, faulty) as store:
        hold = faulty.hold("GET", "body", 0.0)
        assert await read(store) == BODY[:LARGE]
        counters = store.counters()
        assert (counters["gets"], counters["hedged"], counters["hedged_won"]) == (2, 1, 1)
        assert (counters["bytes_fetched"], counters["retries"]) == (LARGE, 0)
        assert store.requester.connections.in_use == 0
        await given_up(hold)


async def test_through_tls_as_well(shared: Bucket, faulty: FaultyS3, tmp_path: Path) -> None:
    with tls_door(faulty.endpoint_url, tmp_path) as door:
        async with impatient(shared, faulty, **door.settings) as store:
            hold = faulty.hold("GET", "body", 0.0)
            assert await read(store) == BODY[:LARGE]
            assert store.counters()["hedged_won"] == 1
            release(hold)


async def test_the_first_request_wins_if_it_is_answered_first(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with impatient(shared, faulty) as store:
        first, second = (faulty.hold("GET", "body", 0.0) for _ in range(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect, store)
            await eventually(lambda: len(second.held) == 1)
            release(first)
        counters = store.counters()
        assert (counters["hedged"], counters["hedged_won"]) == (1, 0)
        assert counters["bytes_fetched"] == LARGE
        release(second)


async def test_a_second_get_without_a_descriptor_leaves_the_first(
    shared: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with impatient(shared, faulty) as store:
        info, hold = await store.head("body"), faulty.hold("GET", "body", 0.0)
        engine = store.requester.engine
        submits = iter([engine.submit])

        def submit(request: Request) -> Transfer:
            for first in submits:
                return first(request)
            release(hold)
            raise OSError(errno.EMFILE, "no descriptor is free")

        monkeypatch.setattr(engine, "submit", submit)
        assert await download(store, info, 0, LARGE) == BODY[:LARGE]
        assert store.counters()["bytes_fetched"] == LARGE
        assert store.requester.connections.in_use == 0


async def _expect(store: S3Store) -> None:
    assert await read(store) == BODY[:LARGE]


async def test_the_failure_of_one_does_not_fail_the_other(shared: Bucket, faulty: FaultyS3) -> None:
    async with impatient(shared, faulty) as store:
        hold = faulty.hold("GET", "body", 0.0)
        refused = faulty.add("GET", code="SlowDown", times=1, before=lambda: release(hold))
        assert await read(store) == BODY[:LARGE]
        counters = store.counters()
        assert (refused.used, counters["retries"], counters["hedged_won"]) == (1, 0, 0)


async def test_where_both_fail_the_request_is_tried_again(shared: Bucket, faulty: FaultyS3) -> None:
    async with impatient(shared, faulty) as store:
        first = faulty.add("GET", stall=True, code="InternalError", times=1)
        second = faulty.add("GET", code="InternalError", times=1, before=first.release)
        assert await read(store) == BODY[:LARGE]
        counters = store.counters()
        assert (second.used, counters["gets"], counters["retries"]) == (1, 3, 1)


async def outdated(store: S3Store, bucket: Bucket) -> ObjectInfo:
    """What was known of an object before it was replaced."""
    bucket.put("body", BODY[:LARGE])
    info = await store.head("body")
    bucket.put("body", BODY[1:LARGE] + BODY[:1])
    return info


async def test_a_refusal_that_both_would_get_does_not_wait_for_the_other(
    bucket: Bucket, faulty: FaultyS3
) -> None:
    async with impatient(bucket, faulty) as store:
        info = await outdated(store, bucket)
        hold = faulty.hold("GET", "body", 0.0)
        with pytest.raises(StaleVersionError):
            await download(store, info)
        assert store.counters()["retries"] == 0
        release(hold)


async def test_cancelling_gives_both_up(shared: Bucket, faulty: FaultyS3) -> None:
    async with impatient(shared, faulty) as store:
        hold = faulty.hold("GET", "body", 0.0, times=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, store)
            await eventually(lambda: len(hold.held) == 2)
            nursery.cancel_scope.cancel()
        assert store.requester.connections.in_use == 0
        assert store.counters()["bytes_fetched"] == 0
        await given_up(hold)
