"""A cache disk that can't read what was written to it: programs get the bytes from the bucket."""

from __future__ import annotations

import errno
import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine.damage import cached
from tests.support.machine.failing_disk import FailingDisk, failing_disk
from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.waiting import until
from tests.support.writing import WRITABLE

MIB = 1 << 20
SMALL = random.Random(1).randbytes(50_000)
LARGE = random.Random(2).randbytes(12 * MIB + 77)


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


def unreadable(mount: Mount) -> int:
    count: int = mount.status()["integrity"]["unreadable_files"]
    return count


def fail_under(disk: FailingDisk, mount: Mount, path: Path) -> None:
    """Have the disk fail while a program has a file open, which sees the error and closes it."""
    with path.open("rb", buffering=0) as file:
        disk.fail(*cached(mount.cache))
        with pytest.raises(OSError, match="output error") as seen:
            read_to_the_end(file)
    assert seen.value.errno == errno.EIO


def read_to_the_end(file: io.RawIOBase) -> None:
    while file.read(MIB):
        pass


def read_again(path: Path, content: bytes) -> None:
    """Read a file as a program does that tries again after an error.

    An open of a file that was tried a moment ago may still see the error.
    """

    def is_right() -> bool:
        try:
            return path.read_bytes() == content
        except OSError:
            return False

    until(is_right, "the bucket's bytes")


@states(
    "A cached copy that the cache disk cannot read is dropped when a program opens the file again"
    " after the error, and the file is read from the bucket; an open within a second of another"
    " may still see the error."
)
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_that_is_opened_again_after_an_error_comes_from_the_bucket(
    bucket: Bucket, disk: FailingDisk, on_disk: Mount, content: bytes
) -> None:
    bucket.put("file", content)
    path = on_disk.path / "file"
    assert path.read_bytes() == content
    fail_under(disk, on_disk, path)
    read_again(path, content)
    assert unreadable(on_disk) == 1
    assert "can't be read from the cache disk" in on_disk.log.read_text()


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


def test_after_an_error_other_files_are_tried_before_the_kernel_reads_them(
    bucket: Bucket, disk: FailingDisk, on_disk: Mount
) -> None:
    names = [f"file-{number}" for number in range(4)]
    for name in names:
        bucket.put(name, SMALL)
    for name in names:
        assert (on_disk.path / name).read_bytes() == SMALL
    first = on_disk.path / names[0]
    fail_under(disk, on_disk, first)
    read_again(first, SMALL)
    for name in names[1:]:
        assert (on_disk.path / name).read_bytes() == SMALL
    assert unreadable(on_disk) > 1


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
