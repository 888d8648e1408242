"""`--memory-limit` is a limit: for bytes on their way, and for names that the kernel remembers."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fusefs.cache.unkept import UnkeptBuffers
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.nodes.inode_table import InodeTable
from fusefs.settings.memory import MemoryBudget
from fusefs.settings.patterns import PathRules
from fusefs.settings.types import MIB
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.store import open_store
from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.flat_s3 import SIZE as SERVED_SIZE
from tests.support.servers.flat_s3 import ListingServer
from tests.support.sharing import content
from tests.support.waiting import until

READERS = 64
IS_LONG = "MEMORY_LONG" in os.environ
LIMITS = ["112MiB", "256MiB"] if IS_LONG else ["112MiB"]
SIZE = 16 * MIB if IS_LONG else 3 * MIB
# What may come on top of the limit, for the interpreter does not give everything back.
SLACK = 64 * MIB


@states("A `--memory-limit` below 112 MiB is refused.")
def test_too_little_memory_is_refused_with_one_line(tmp_path: Path) -> None:
    refused = fusefs("mount", "s3://bucket", tmp_path, "--memory-limit", "111MiB", check=False)
    assert refused.returncode == 2
    assert "the least is 112MiB" in refused.stderr.splitlines()[-1]


@states(
    "The daemon's memory stays within `--memory-limit` and 64 MiB, however many files are cached"
    " and however many programs read, also where no cache takes what they read."
)
@pytest.mark.parametrize("limit", LIMITS)
def test_many_readers_of_files_that_fit_no_cache_stay_within_the_limit(
    mounter: Mounter, bucket: Bucket, limit: str
) -> None:
    data = content("large", SIZE)
    for number in range(READERS):
        bucket.put(f"{number}", data)
    options = ("--session", "kernel", "--cache-size", "1MiB", "--passthrough", "off")
    mount = mounter(*options, "--memory-limit", limit)
    wrong: list[int] = []
    together = threading.Barrier(READERS)

    def read(number: int) -> None:
        with (mount.path / str(number)).open("rb", buffering=0) as file:
            together.wait(60)
            found = b"".join(iter(lambda: file.read(128 << 10), b""))
        if found != data:
            wrong.append(number)

    in_parallel(read)
    assert wrong == []
    facts = mount.status()
    assert facts["cache"]["used_bytes"] <= 2 * MIB
    assert facts["daemon"]["peak_rss_bytes"] <= int(limit.removesuffix("MiB")) * MIB + SLACK


def in_parallel(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@states(
    "Beyond as many names as half of what `--memory-limit` has beyond 96 MiB holds (81,920 by"
    " default), the kernel is made to forget the oldest that are not in use (Linux 6.18); they are"
    " looked up again when they are used."
)
def test_the_kernel_is_made_to_forget_names(mounter: Mounter) -> None:
    assert MemoryBudget.of(256 * MIB).names == 81_920
    names = [f"{number // 1000:03}/{number:06}" for number in range(9_500)]
    with ListingServer(names) as server:
        options = ("--session", "kernel", "--anonymous", "--memory-limit", "112MiB")
        mount = mounter(*options, endpoint_url=server.endpoint_url)
        held = os.open(mount.path / "000", os.O_RDONLY | os.O_DIRECTORY)
        try:
            facts = until(lambda: use_all(mount, names), "the names are not counted")
            if not facts["can_prune_nodes"]:
                pytest.skip("this kernel can't be made to forget names (Linux 6.18 can)")
            assert facts["most_nodes"] == MemoryBudget.of(112 * MIB).names == 8192
            until(lambda: metadata(mount)["nodes"] <= facts["most_nodes"], "too many are left")
            # What is in use stays, and what was forgotten is found again.
            assert os.stat("000000", dir_fd=held).st_size == SERVED_SIZE
            for name in names[::100]:
                assert os.stat(mount.path / name).st_size == SERVED_SIZE
        finally:
            os.close(held)


def metadata(mount: Mount) -> dict[str, Any]:
    return dict(mount.status()["metadata"])


def use_all(mount: Mount, names: list[str]) -> dict[str, Any]:
    """Use all names; what is known of them, once the daemon has tried to prune some."""
    for name in names:
        os.stat(mount.path / name)
    facts = metadata(mount)
    return facts if facts["pruned_nodes"] or not facts["can_prune_nodes"] else {}


async def test_bytes_past_the_cache_wait_for_room() -> None:
    buffers = UnkeptBuffers(10 * MIB)
    done: list[int] = []

    async def read(size: int, end: trio.Event) -> None:
        async with buffers.taken(size):
            await end.wait()
        done.append(size)

    async with trio.open_nursery() as nursery:
        first, second = trio.Event(), trio.Event()
        nursery.start_soon(read, 8 * MIB, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(read, 4 * MIB, second)
        await trio.testing.wait_all_tasks_blocked()
        assert buffers.used == 8 * MIB
        first.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (buffers.used, done) == (4 * MIB, [8 * MIB])
        second.set()
    # What is larger than all of the room has it alone.
    async with buffers.taken(30 * MIB):
        assert buffers.used == 30 * MIB
    assert buffers.used == 0


async def test_what_is_kept_for_next_reads_makes_room_the_oldest_first() -> None:
    buffers = UnkeptBuffers(10 * MIB)
    readers = [object() for _ in range(3)]
    for reader in readers:
        buffers.keep(reader, 5, bytearray(4 * MIB))
    # The third found no room: nothing is kept beyond the limit.
    assert [len(buffers.of(reader)[1]) for reader in readers] == [4 * MIB, 4 * MIB, 0]
    async with buffers.taken(4 * MIB):
        assert [len(buffers.of(reader)[1]) for reader in readers] == [0, 4 * MIB, 0]
    for reader in readers:
        buffers.drop(reader)
    assert buffers.used == 0
    assert buffers.ahead(readers[0]) == 2 * MIB


def test_the_more_readers_the_less_is_read_ahead() -> None:
    buffers = UnkeptBuffers(8 * MIB)
    for _ in range(64):
        buffers.keep(object(), 0, bytearray(1))
    assert buffers.ahead(object()) == 8 * MIB // 65


@states(
    "Of `--memory-limit`, listings take half of what is beyond 96 MiB (149,796 entries by default),"
    " and names as much."
)
def test_the_limit_is_divided() -> None:
    least, usual, much = (MemoryBudget.of(size * MIB) for size in (112, 256, 4096))
    assert (least.streams, least.requests, least.unkept) == (4, 64, 8 * MIB)
    assert (usual.streams, usual.requests, usual.unkept) == (40, 640, 20 * MIB)
    assert (least.entries, usual.entries) == (14_979, 149_796)
    assert much.entries == 200_000
    assert usual.entries * 560 <= usual.names * 1024 == 80 * MIB


async def test_listings_are_dropped_when_there_is_no_memory_for_them() -> None:
    keys = [f"{number:02}/{name}" for number in range(20) for name in range(50)]
    with ListingServer(keys) as server:
        settings = S3Settings("bucket", endpoint_url=server.endpoint_url, anonymous=True)
        async with open_store(settings) as store, trio.open_nursery() as nursery:
            directories = Directories(
                store, InodeTable("", Journal(None)), PathRules(60.0), nursery, most_entries=200
            )
            for number in range(20):
                await directories.lookup(directories.get(f"{number:02}/"), "1")
                assert directories._entries <= 200
            nursery.cancel_scope.cancel()
