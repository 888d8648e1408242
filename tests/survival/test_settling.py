"""What a killed daemon had requested of S3 may happen after its death, and does no harm then."""

import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.late.request_log import PUT, Change, RequestLog
from fusefs.posix.late.uncertain_keys import KILLED_WAIT_S, UncertainKeys, boottime
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.settings.patterns import PathRules
from fusefs.store.interface import ObjectVersion, UnansweredChanges
from tests.support.local_cache import Bucket as MemoryBucket
from tests.support.machine.local_file import MakeFile
from tests.support.mounting import LIMIT_S, Mounter
from tests.support.programs import WRITABLE
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import python
from tests.support.store_writing import opened
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

SAVE = """
import os, sys
with open(sys.argv[1] + "-first", "wb") as file:
    file.write(b"data")
os.rename(sys.argv[1] + "-first", sys.argv[1])
"""
# Longer than it takes to start a daemon, shorter than that one waits.
LATE_S = 0.9


@pytest.mark.root
@states(
    "After a daemon's death the keys of the changes that it had under way are not changed for "
    "1.5 s, unless a condition protects the change; other changes do not wait."
)
def test_an_upload_that_lands_late_brings_no_old_name_back(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    has_landed = threading.Event()
    late = faulty.add("PUT", "*-first", times=1, delay_s=LATE_S, before=has_landed.set)
    mount = mounter("--session", "kernel", *WRITABLE, endpoint_url=faulty.endpoint_url)
    program = python(SAVE, mount.path / "a")
    until(lambda: late.used, "it is being uploaded")
    kill_serving(mount)
    assert program.wait(LIMIT_S) == 0
    assert has_landed.wait(LIMIT_S)
    assert os.listdir(mount.path) == ["a"]
    mount.end()
    listed = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    assert [one["Key"] for one in listed] == ["a"]


class SettledSoon(UnansweredChanges):
    unsettled_s = 0.5


async def test_what_was_listed_before_all_had_landed_is_listed_again() -> None:
    store = MemoryBucket(["a"])
    async with trio.open_nursery() as nursery:
        store.unanswered = SettledSoon()
        directories = Directories(store, InodeTable("", Journal(None)), PathRules(60.0), nursery)
        root = directories.get("")
        for lists in (1, 2, 2):
            await directories.lookup(root, "a")
            assert store.lists == lists
            await trio.sleep(0.6)


@pytest.mark.usefixtures("as_owner")
@states(
    "After a daemon's death the keys of the changes that it had under way are not changed for "
    "1.5 s, unless a condition protects the change; other changes do not wait."
)
async def test_changes_of_keys_with_open_requests_wait_and_no_others(
    bucket: Bucket, faulty: FaultyS3, make_file: MakeFile, tmp_path: Path
) -> None:
    source = ObjectVersion("a", bucket.put("a", b"a"), 1)
    fd = make_file(10).fd
    mounts = tmp_path / "mounts"
    (mounts / "one").mkdir(parents=True)
    log = RequestLog(mounts / "one")
    for key in "bcd":
        log.begin(Change(PUT, key))
    log.close(remove=False)
    ended = []

    async def run(key: str, change: Callable[[], Awaitable[object]]) -> None:
        await change()
        ended.append(key)

    async with opened(bucket, faulty) as inner, trio.open_nursery() as nursery:
        begun = boottime()
        store = WatchedStore(inner, UncertainKeys(mounts / "one", "bucket", (60.0,)))
        for entry in store.uncertain_keys:
            assert entry.waits_until >= begun + KILLED_WAIT_S
            entry.waits_until += 1000.0
        put = partial(store.put_file, fd=fd, size=10)
        nursery.start_soon(run, "b", partial(put, "b"))
        nursery.start_soon(run, "c", partial(store.copy, source, "c"))
        nursery.start_soon(run, "d", partial(store.delete, "d"))
        for key in "efg":
            await run(key, partial(put, key))
        assert (await store.head("a")).size == 1
        assert ended == ["e", "f", "g"]
        nursery.cancel_scope.cancel()
    store.close(remove=False)
