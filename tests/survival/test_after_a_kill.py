"""Open files and directories go on under the next daemon, and idle processes sleep."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from fusefs.telemetry.activity import IDLE_AFTER_S
from tests.support.machine.disks import fill, small_disk
from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.flat_s3 import ListingServer
from tests.support.sharing import read_all, read_or_stale, stamped
from tests.support.survival.surviving import children_of, keeper_pid, replace_daemon
from tests.support.waiting import until

LARGE = 24 << 20


@states(
    "Open files go on with the version that they were opened with, and an open directory goes on"
    " where it was."
)
@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_an_open_file_goes_on_with_its_version(
    mounter: Mounter, bucket: Bucket, passthrough: str
) -> None:
    """Of one file all is in the cache, of one the beginning; both are replaced meanwhile."""
    for name in ("whole", "begun"):
        bucket.put(name, stamped(1, LARGE))
    options = ("--session", "kernel", "--passthrough", passthrough, "--metadata-ttl", "0s")
    mount = mounter(*options)
    root = mount.path
    read_all(root / "whole")
    with (
        (root / "whole").open("rb", buffering=0) as whole,
        (root / "begun").open("rb", buffering=0) as begun,
    ):
        assert begun.read(4096) == stamped(1, 4096)
        until(mount.is_recorded, "what was read on record")
        for name in ("whole", "begun"):
            bucket.put(name, stamped(2, LARGE))
        replace_daemon(mount)
        for file in (whole, begun):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(whole.fileno(), LARGE, 0) == stamped(1, LARGE)
        assert os.fstat(begun.fileno()).st_size == LARGE
        assert read_or_stale(begun.fileno(), 4096, LARGE - 4096) is None
        for name in ("whole", "begun"):
            assert read_all(root / name) == stamped(2, LARGE)
        assert os.pread(whole.fileno(), LARGE, 0) == stamped(1, LARGE)


@states(
    "Bytes that arrived within the last seconds before the daemon died may have to be downloaded"
    " again; if the object was replaced meanwhile, reading them is ESTALE."
)
def test_what_was_not_on_record_is_read_again_or_stale(mounter: Mounter, bucket: Bucket) -> None:
    for name in ("same", "replaced"):
        bucket.put(name, stamped(1, LARGE))
    options = ("--session", "kernel", "--passthrough", "off", "--metadata-ttl", "0s")
    mount = mounter(*options)
    with (
        (mount.path / "same").open("rb", buffering=0) as same,
        (mount.path / "replaced").open("rb", buffering=0) as replaced,
    ):
        replace_daemon(mount)
        for file in (same, replaced):
            assert os.pread(file.fileno(), LARGE, 0) == stamped(1, LARGE)
        bucket.put("replaced", stamped(2, LARGE))
        replace_daemon(mount)
        for file in (same, replaced):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_or_stale(same.fileno(), LARGE, 0) == stamped(1, LARGE)
        assert read_or_stale(replaced.fileno(), LARGE, 0) in (stamped(1, LARGE), None)


def test_an_open_directory_goes_on_where_it_was(mounter: Mounter) -> None:
    names = [f"object-{number:05d}" for number in range(5000)]
    reads = {"begun": 1, "halfway": 2501}
    with (
        ListingServer(f"{folder}/{name}" for folder in reads for name in names) as server,
        contextlib.ExitStack() as stack,
    ):
        mount = mounter("--session", "kernel", "--anonymous", endpoint_url=server.endpoint_url)
        streams = [stack.enter_context(DirectoryStream(mount.path / folder)) for folder in reads]
        found = [
            [stream.read() for _ in range(count)]
            for stream, count in zip(streams, reads.values(), strict=True)
        ]
        replace_daemon(mount)
        # What came or went before and behind the place moves nothing else.
        new = ("object-00000-new", "object-04998-new")
        server.add(*(f"{folder}/{name}" for folder in reads for name in new))
        for stream, before in zip(streams, found, strict=True):
            shown = [entry[0] for entry in before if entry is not None] + stream.names()
            assert len(set(shown)) == len(shown)
            assert set(shown) - {*new} == {".", "..", *names}


def test_a_damaged_mark_of_the_cache_directory_ends_no_mount(
    mounter: Mounter, bucket: Bucket
) -> None:
    marks = (b"\xff\x00garbage", b"fusefs cache 99\n")
    for number in range(len(marks)):
        bucket.put(f"{number}", b"content")
    mount = mounter("--session", "kernel", "--read-only")
    for number, mark in enumerate(marks):
        (mount.cache / "format").write_bytes(mark)
        replace_daemon(mount)
        assert (mount.path / f"{number}").read_bytes() == b"content"


@states("A mount whose cache disk is full goes on under the next daemon as well.")
@pytest.mark.parametrize("kind", ["--read-only", "--no-read-only"])
def test_a_full_cache_disk_ends_no_mount(
    mounter: Mounter, bucket: Bucket, tmp_path: Path, kind: str
) -> None:
    for name in ("read", "held", "new"):
        bucket.put(name, stamped(1, 1 << 20))
    with small_disk(tmp_path / "disk", 16) as disk:
        mount = mounter("--session", "kernel", kind, cache="disk/cache")
        assert read_all(mount.path / "read") == stamped(1, 1 << 20)
        with (mount.path / "held").open("rb", buffering=0) as held:
            fill(disk)
            for _ in range(2):
                replace_daemon(mount)
                assert os.pread(held.fileno(), 1 << 20, 0) == stamped(1, 1 << 20)
                for name in ("read", "new"):
                    assert read_all(mount.path / name) == stamped(1, 1 << 20)
            (disk / "filler").unlink()
        mount.end()


# Two ticks through three processes, and looks of the daemon in threads; with a timer of one
# second in any of them there are more.
MOST_SWITCHES = 60
WATCHED_S = 11.0


def switches(pids: list[int]) -> int:
    """How often the threads of these processes have gone to sleep."""
    count = 0
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
                count += sum(int(one.split()[1]) for one in lines if one.startswith("voluntary"))
    return count


@states(
    "The processes of a mount that is not in use wake up every ten seconds (every third of"
    " `--hang-timeout`, if that is less), and no more often."
)
def test_the_processes_of_an_idle_mount_sleep(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("a", b"a")
    mount = mounter()
    assert (mount.path / "a").read_bytes() == b"a"
    keeper = keeper_pid(mount)
    assert keeper is not None
    pids = [keeper, *children_of(keeper)]

    time.sleep(IDLE_AFTER_S)

    def are_asleep() -> bool:
        before = switches(pids)
        time.sleep(WATCHED_S)
        return switches(pids) - before <= MOST_SWITCHES

    until(are_asleep, "there are few")
