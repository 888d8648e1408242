"""Downloads that are cancelled, and who goes first when connections are few."""

import errno
import os

import pytest
import trio

from fusefs.store.s3.store import S3Store
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import BODY, Collector, download, opened
from tests.support.waiting import eventually


async def test_a_cancelled_download_never_writes_again(shared: Bucket, faulty: FaultyS3) -> None:
    rule = faulty.add("GET", stall_after=2_500_000, times=1)
    sink = Collector(0)
    async with opened(shared, faulty, read_timeout_s=10.0) as store:
        info = await store.head("body")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.download, info.version, 0, info.size, sink)
            await eventually(lambda: sink.stop > 0)
            nursery.cancel_scope.cancel()
        count, size = sink.stop, os.fstat(sink.file).st_size
        assert 0 < count == size < info.size, "all that was written is known of"
        rule.release()
        assert await download(store, info) == BODY
        assert (sink.stop, os.fstat(sink.file).st_size) == (count, size)
        sink.close()


async def test_a_cancelled_request_gives_its_connection_back(
    shared: Bucket, faulty: FaultyS3
) -> None:
    async with opened(shared, faulty, max_connections=1, read_timeout_s=10.0) as store:
        await store.list_page("")
        rule = faulty.add("HEAD", stall=True, times=1)
        with trio.move_on_after(0.1):
            await store.head("body")
        assert (await store.head("body")).size == len(BODY)
        rule.release()


@pytest.mark.parametrize("size", [1000, len(BODY)])
async def test_a_disk_that_fails_ends_the_download(store: S3Store, size: int) -> None:
    class Gone(Collector):
        async def open(self) -> int:
            raise FileNotFoundError(errno.ENOENT, "the disk is gone")

    info = await store.head("body")
    with pytest.raises(FileNotFoundError, match="the disk is gone"):
        await store.download(info.version, 0, size, Gone(0))
