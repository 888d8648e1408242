"""Downloads that are cancelled, and who goes first when connections are few."""

from __future__ import annotations

import errno
import threading

import pytest
import trio

from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.store_reading import BODY, LIMIT_S, download, opened
from tests.support.store_reading import as_owner as as_owner
from tests.support.store_reading import shared as shared


async def test_a_cancelled_download_never_writes_again(shared: Bucket, faulty: FaultyS3) -> None:
    rule = faulty.add("GET", stall_after=2_500_000, times=1)
    written: list[int] = []
    began = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def write(offset: int, chunk: memoryview) -> None:
        written.append(offset)
        token.run_sync_soon(began.set)

    async with opened(shared, faulty, read_timeout_s=10.0) as store:
        info = await store.head("body")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.download, info.version, 0, info.size, write)
            await began.wait()
            nursery.cancel_scope.cancel()
        count = len(written)
        rule.release()
        assert await download(store, info) == BODY
        assert len(written) == count


async def test_cancelling_waits_for_a_write_that_is_running(
    shared: Bucket, faulty: FaultyS3
) -> None:
    is_inside = trio.Event()
    go_on = threading.Event()
    states: list[str] = []
    token = trio.lowlevel.current_trio_token()

    def write(offset: int, chunk: memoryview) -> None:
        token.run_sync_soon(is_inside.set)
        go_on.wait(LIMIT_S)
        states.append("written")

    async with opened(shared, faulty) as store:
        info = await store.head("body")

        async def cancelled() -> None:
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel, scope)
                await store.download(info.version, 0, info.size, write)
            states.append("returned")

        async def cancel(scope: trio.CancelScope) -> None:
            await is_inside.wait()
            scope.cancel()
            await trio.sleep(0.05)
            go_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
    assert states == ["written", "returned"]


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


async def test_an_error_of_the_writer_ends_the_download(shared: Bucket, faulty: FaultyS3) -> None:
    def write(offset: int, chunk: memoryview) -> None:
        raise FileNotFoundError(errno.ENOENT, "the disk is gone")

    async with opened(shared, faulty) as store:
        info = await store.head("body")
        with pytest.raises(FileNotFoundError, match="the disk is gone"):
            await store.download(info.version, 0, info.size, write)
        assert len(faulty.requests("GET")) == 1
