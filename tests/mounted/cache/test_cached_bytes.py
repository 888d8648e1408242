"""A cache disk that returns other bytes than were written to it: they are noticed and not used."""

import contextlib
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fusefs.cache.integrity.checksums import unpack
from tests.support.machine.damage import cached, flip
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

MIB = 1 << 20
SMALL = random.Random(1).randbytes(50_000)
LARGE = os.urandom(20 * MIB + 77)


def differed(mount: Mount) -> int:
    count: int = mount.status()["integrity"]["differed_files"]
    return count


def is_summed(mount: Mount) -> bool:
    """True if the catalog has a checksum of all bytes that it knows of."""
    return mount.is_recorded() and all(
        known == summed for known, summed in map(both, mount.cache.glob("*/catalog.sqlite3"))
    )


def both(path: Path) -> tuple[int, int]:
    """The bytes on record, and those of them with a checksum."""
    with closing(sqlite3.connect(path)) as db:
        known = db.execute("SELECT bytes FROM total").fetchone()[0]
        packed = db.execute("SELECT sums FROM sums").fetchall()
    sizes = (one.stop - one.start for (sums,) in packed for one in unpack(sums))
    return known, sum(sizes)


@states(
    "Cached bytes have checksums: a file of up to 16 MiB is compared with them when it is first"
    " opened after the daemon's start, and what an edit needs before it is copied. What differs is"
    " fetched again from the bucket."
)
def test_a_flipped_byte_is_not_read_after_the_next_start(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("small", SMALL)
    bucket.put("large", LARGE[: 9 * MIB])
    made = mounter()
    assert (made.path / "small").read_bytes() == SMALL
    assert (made.path / "large").read_bytes() == LARGE[: 9 * MIB]
    made.end()
    for path in cached(made.cache):
        flip(path, 40_000)
    made.start()
    assert (made.path / "small").read_bytes() == SMALL
    assert (made.path / "large").read_bytes() == LARGE[: 9 * MIB]
    assert differed(made) == 2
    assert "small" in " ".join(made.status()["integrity"]["latest"])
    assert "fetched again" in made.log.read_text()


def test_a_flipped_byte_does_not_reach_the_bucket_through_an_edit(
    bucket: Bucket, mounter: Mounter
) -> None:
    sizes = {"small": 50_000, "large": 20 * MIB + 77}
    for name, size in sizes.items():
        bucket.put(name, LARGE[:size])
    made = mounter(WRITABLE)
    for name, size in sizes.items():
        assert (made.path / name).read_bytes() == LARGE[:size]
    for copy in cached(made.cache):
        flip(copy, 8_000)
    for count, (name, size) in enumerate(sizes.items(), 1):
        with (made.path / name).open("r+b") as file:
            file.seek(9_000)
            file.write(b"edited")
        expected = LARGE[:9_000] + b"edited" + LARGE[9_006:size]
        assert stored(bucket, name) == expected
        assert (made.path / name).read_bytes() == expected
        assert differed(made) == count


def test_an_edit_that_needs_damaged_bytes_without_the_store_fails(
    bucket: Bucket, behind: Mounter, faulty: FaultyS3
) -> None:
    bucket.put("file", SMALL)
    made = behind(WRITABLE, "--retry-time", "1s", "--metadata-ttl", "indefinite")
    path = made.path / "file"
    assert path.read_bytes() == SMALL
    (copy,) = cached(made.cache)
    flip(copy, 8_000)
    faulty.add("GET", status=500)
    with pytest.raises(OSError, match="Input/output error"):
        path.open("r+b")
    faulty.clear()
    assert stored(bucket, "file") == SMALL
    assert path.read_bytes() == SMALL


def test_what_was_written_here_is_compared_as_well(mounter: Mounter) -> None:
    made = mounter(WRITABLE)
    sizes = {"small": 50_000, "large": 3 * MIB}
    for name, size in sizes.items():
        (made.path / name).write_bytes(LARGE[:size])
    until(lambda: is_summed(made), "checksums of what was written")
    made.end()
    for copy in cached(made.cache):
        flip(copy, copy.stat().st_size - 1)
    made.start()
    for count, (name, size) in enumerate(sizes.items(), 1):
        assert (made.path / name).read_bytes() == LARGE[:size]
        assert differed(made) == count


@states(
    "A file that is open by passthrough when its cached copy is found to be damaged keeps that copy"
    " until it is closed; every later open reads the bucket's bytes."
)
def test_an_open_file_goes_on_when_its_cached_copy_is_dropped(
    bucket: Bucket, passthrough: Mounter
) -> None:
    bucket.put("file", SMALL)
    made = passthrough(WRITABLE)
    path = made.path / "file"
    assert path.read_bytes() == SMALL
    with path.open("rb", buffering=0) as held:
        (copy,) = cached(made.cache)
        flip(copy, 30_000)
        with path.open("r+b") as file:
            file.write(b"edited")
        assert os.pread(held.fileno(), 100, 0) == SMALL[:100]
        with path.open("rb") as again:
            assert again.read() == b"edited" + SMALL[6:]
        assert os.pread(held.fileno(), 100, 0) == SMALL[:100]
    assert stored(bucket, "file") == b"edited" + SMALL[6:]


def test_the_next_daemon_compares_what_the_kernel_has_registered(
    bucket: Bucket, passthrough: Mounter
) -> None:
    bucket.put("file", SMALL)
    made = passthrough()
    path = made.path / "file"
    with path.open("rb", buffering=0) as held:
        assert held.read() == SMALL
        until(lambda: is_summed(made), "checksums on record")
        replace_daemon(made)
        (copy,) = cached(made.cache)
        flip(copy, 30_000)
        assert path.read_bytes() == SMALL
        assert differed(made) == 1
        # The next one knows the dropped file by the handle alone.
        replace_daemon(made)
        assert os.pread(held.fileno(), 100, 0) == SMALL[:100]
        assert path.read_bytes() == SMALL
    assert path.read_bytes() == SMALL


def test_two_mounts_of_one_cache_compare_the_same_sums(bucket: Bucket, mounter: Mounter) -> None:
    bucket.put("file", SMALL)
    one = mounter()
    assert (one.path / "file").read_bytes() == SMALL
    until(lambda: is_summed(one), "checksums on record")
    (copy,) = cached(one.cache)
    flip(copy, 30_000)
    other = mounter()
    assert (other.path / "file").read_bytes() == SMALL
    assert differed(other) == 1


@states(
    "What was closed and could not be uploaded yet has a checksum as well (but for an edit of a"
    " large object, or while a program may have it mapped): if its bytes on the local disk differ"
    " they are kept and not uploaded, and `fusefs status` and the log say so."
)
@pytest.mark.parametrize("durability", ["local", "bucket"])
def test_what_was_never_uploaded_and_differs_is_kept_and_not_uploaded(
    bucket: Bucket, behind: Mounter, faulty: FaultyS3, durability: str
) -> None:
    made = behind(WRITABLE, "--durability", durability, "--retry-time", "1s")
    faulty.add("PUT", status=500)
    path = made.path / "file"
    with contextlib.suppress(OSError):
        path.write_bytes(SMALL)
    until(lambda: failure(made), "an upload that failed")
    found = made.cache.glob("mounts/*/staging/*/*")
    (staged,) = (one for one in found if one.name.isdecimal())
    # While no daemon is about to send it.
    fusefs("umount", made.path, check=False)
    flip(staged, 30_000)
    faulty.clear()
    made.start()
    until(lambda: "differs from what was written" in failure(made), "the damage is noticed")
    assert keys(bucket) == []
    path.write_bytes(SMALL)
    fusefs("sync", made.path)
    assert stored(bucket, "file") == SMALL


def failure(mount: Mount) -> str:
    """What the first file that is not in the bucket has failed with; empty if nothing has."""
    pending = mount.status()["writing"]["pending"]
    return str(pending[0]["error"] or "") if pending else ""
