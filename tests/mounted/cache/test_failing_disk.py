"""A cache disk that can't read what was written to it: programs get the bytes from the bucket."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine.damage import cached
from tests.support.machine.failing_disk import FailingDisk, failing_disk
from tests.support.mounting import WRITABLE, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket

MIB = 1 << 20
SMALL = random.Random(1).randbytes(50_000)
LARGE = os.urandom(12 * MIB + 77)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path) as made:
        yield made


@pytest.fixture
def on_disk(disk: FailingDisk, passthrough: Mounter) -> Iterator[Mount]:
    """A writable mount, its cache on the disk."""
    made = passthrough(WRITABLE, "--cache-dir", disk.path / "cache", "--min-free", "0%")
    made.cache = disk.path / "cache"
    yield made
    made.force()


def fail_under(disk: FailingDisk, mount: Mount, path: Path) -> None:
    """Have the disk fail while a program has a file open, which sees the error and closes it."""
    with path.open("rb", buffering=0) as file:
        disk.fail(*cached(mount.cache))
        with pytest.raises(OSError, match="output error") as seen:
            file.readall()
    assert seen.value.errno == errno.EIO


@states(
    "Where the kernel reads a cached copy that the cache disk cannot read, programs get EIO until"
    " `fusefs drop` or the comparison in the background drops it; where the daemon reads it,"
    " they get the bytes of the bucket."
)
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_what_the_kernel_cannot_read_comes_from_the_bucket_once_it_was_dropped(
    bucket: Bucket, disk: FailingDisk, on_disk: Mount, content: bytes
) -> None:
    bucket.put("file", content)
    path = on_disk.path / "file"
    assert path.read_bytes() == content
    fail_under(disk, on_disk, path)
    fusefs("drop", path)
    assert path.read_bytes() == content


def test_the_next_mount_does_not_use_what_cannot_be_read(
    bucket: Bucket, disk: FailingDisk, on_disk: Mount
) -> None:
    bucket.put("file", SMALL)
    assert (on_disk.path / "file").read_bytes() == SMALL
    on_disk.end()
    disk.fail(*cached(on_disk.cache), is_writable=True)
    try:
        on_disk.start()
    except AssertionError:
        # The image is cut off, so whatever else lies behind the cached file has failed too.
        if "Input/output error" not in on_disk.log.read_text():
            raise
        pytest.skip("the disk has failed under the mount's own files as well")
    assert (on_disk.path / "file").read_bytes() == SMALL


def test_an_edit_does_not_fail_where_the_bucket_has_the_bytes(
    bucket: Bucket, disk: FailingDisk, on_disk: Mount
) -> None:
    bucket.put("file", SMALL)
    path = on_disk.path / "file"
    assert path.read_bytes() == SMALL
    disk.fail(*cached(on_disk.cache))
    with path.open("r+b") as file:
        file.write(b"edited")
    assert path.read_bytes() == b"edited" + SMALL[6:]
