"""A store that sends a byte now and then, for ever: whoever waits for it is not kept for ever."""

from collections.abc import Awaitable, Callable

import pytest

from fusefs.store.errors import UnreachableError
from fusefs.store.s3 import address
from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import BODY, download, opened


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "PACE_WINDOW_S", 0.3)


@pytest.mark.parametrize("size", [1000, len(BODY)])
async def test_a_read_goes_on_over_another_connection(
    store: S3Store, faulty: FaultyS3, size: int
) -> None:
    await store.check("")
    info = await store.head("body")
    slow = faulty.add("GET", trickle_after=10, times=1)
    assert await download(store, info, 0, size) == BODY[:size]
    assert slow.used == 1


async def test_a_read_of_which_only_bytes_come_fails(shared: Bucket, faulty: FaultyS3) -> None:
    async with opened(shared, faulty, retry_time_s=0.5) as store:
        await store.check("")
        info = await store.head("body")
        faulty.add("GET", trickle_after=0)
        with pytest.raises(UnreachableError):
            await download(store, info)


@pytest.mark.parametrize(
    ("operation", "request_it"),
    [
        ("LIST", lambda store: store.list_page("")),
        ("DELETE MANY", lambda store: store.delete_many(["gone", "gone2"])),
        ("UPLOADS", lambda store: store.list_uploads("")),
    ],
)
async def test_what_is_looked_up_or_changed(
    shared: Bucket,
    faulty: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    request_it: Callable[[S3Store], Awaitable[object]],
) -> None:
    async with opened(shared, faulty, retry_time_s=3) as store:
        await request_it(store)  # what is imported for it is no part of the attempts
        monkeypatch.setattr(address, "ATTEMPT_LIMIT_S", 0.5)
        slow = faulty.add(operation, trickle_after=0)
        if operation == "DELETE MANY":
            assert len(await store.delete_many(["gone", "gone2"])) == 2
        else:
            with pytest.raises(UnreachableError):
                await request_it(store)
        assert slow.used > 1
