"""What a killed daemon had asked of S3 may happen after its death, and does no harm then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from fusefs.cache.metadata import NoPages
from fusefs.posix.directories import Directories
from fusefs.store.base import ObjectVersion
from tests.support.buckets import Bucket
from tests.support.faulty_s3 import FaultyS3
from tests.support.local_cache import Bucket as MemoryBucket
from tests.support.local_file import MakeFile
from tests.support.mounting import LIMIT_S, Mounter
from tests.support.programs import WRITABLE
from tests.support.semantics import states
from tests.support.sharing import python
from tests.support.store_writing import opened
from tests.support.surviving import serving_pid
from tests.support.waiting import until

SAVE = """
import os, sys
with open(sys.argv[1] + ".tmp", "wb") as file:
    file.write(b"data")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
"""
# Longer than it takes to start a daemon, shorter than that one waits.
LATE_S = 0.9


@states(
    "After the daemon dies on a writable mount, changes wait until 1.5 s after its death, "
    "so that what it had sent has taken effect."
)
def test_an_upload_that_lands_late_brings_no_old_name_back(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    has_landed = threading.Event()
    late = faulty.add("PUT", "*.tmp", times=1, delay_s=LATE_S, before=has_landed.set)
    mount = mounter("--session", "kernel", *WRITABLE, endpoint_url=faulty.endpoint_url)
    program = python(SAVE, mount.path / "a")
    until(lambda: late.used, "it is being uploaded")
    os.kill(serving_pid(mount), signal.SIGKILL)
    assert program.wait(LIMIT_S) == 0
    assert has_landed.wait(LIMIT_S)
    assert os.listdir(mount.path) == ["a"]
    mount.end()
    listed = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert [one["Key"] for one in listed] == ["a"]


async def test_what_was_listed_before_all_had_landed_is_listed_again() -> None:
    store = MemoryBucket(["a"])
    async with trio.open_nursery() as nursery:
        directories = Directories(store, 60.0, NoPages(), nursery)
        directories.settled_at = time.monotonic() + 0.05
        root = directories.get("")
        for lists in (1, 2, 2):
            await directories.lookup(root, "a")
            assert store.lists == lists
            await trio.sleep(0.06)


@pytest.mark.usefixtures("as_owner")
@states(
    "After the daemon dies on a writable mount, changes wait until 1.5 s after its death, "
    "so that what it had sent has taken effect."
)
async def test_changes_wait_until_all_has_landed_and_questions_do_not(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile
) -> None:
    source = ObjectVersion("a", bucket.put("a", b"a"), 1)
    fd = make_file(10).fd
    ended = []

    async def run(change: Callable[[], Awaitable[object]]) -> None:
        await change()
        ended.append(trio.current_time())

    async with opened(bucket, faulty.endpoint_url) as store, trio.open_nursery() as nursery:
        store.changes_after = trio.current_time() + 1.0
        nursery.start_soon(
            run, partial(store.put_file, "b", fd, 10, metadata={}, content_type=None)
        )
        nursery.start_soon(run, partial(store.copy, source, "c"))
        nursery.start_soon(run, partial(store.delete, "d"))
        assert (await store.head("a")).size == 1
        assert not ended
    assert len(ended) == 3
    assert min(ended) >= store.changes_after
