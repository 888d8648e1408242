"""The less usual calls on files that are written: mappings, O_DIRECT, holes, kernel copies."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from fusefs.linux.libc import allocate
from tests.support.mounting import Mount
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored

KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 0x1, 0x2, 0x8, 0x10, 0x20


@pytest.fixture
def path(mount: Mount, request: pytest.FixtureRequest) -> Path:
    return mount.path / request.node.originalname


def content_of(bucket: Bucket, mount: Mount, path: Path) -> bytes:
    """What the bucket has of a file."""
    prefix = mount.source.split("/", 3)[3]
    return stored(bucket, prefix + path.name)


def test_what_is_stored_through_a_mapping_is_there_at_close(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 10_000)
    with mmap.mmap(fd, 10_000) as mapping:
        mapping[5:10] = b"store"
        os.close(fd)
        assert content_of(shared, mount, path) == bytes(5) + b"store" + bytes(9990)


def test_direct_writes_and_reads_are_the_same_file(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    content = mmap.mmap(-1, 1 << 20)
    content[:] = os.urandom(1 << 20)
    page = mmap.mmap(-1, 4096)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert os.pwritev(fd, [content], 4096) == 1 << 20
    assert os.preadv(fd, [page], 8192) == 4096
    os.close(fd)
    assert page[:] == content[4096:8192]
    assert content_of(shared, mount, path) == bytes(4096) + content[:]


@states("Handles that append do not overwrite each other.")
def test_appending_handles_do_not_overwrite_each_other(
    mount: Mount, path: Path, shared: Bucket
) -> None:
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    one, other = os.open(path, flags), os.open(path, flags)
    lines = [b"%d\n" % number for number in range(40)]
    for number, line in enumerate(lines):
        os.write(one if number % 2 else other, line)
    os.close(one)
    os.close(other)
    assert content_of(shared, mount, path) == b"".join(lines)


def test_a_sparse_file_is_all_data(path: Path) -> None:
    with open(path, "w+b", buffering=0) as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
        assert file.seek(0, os.SEEK_DATA) == 0
        assert file.seek(0, os.SEEK_HOLE) == 1 << 20
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 18
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            file.seek(1 << 20, os.SEEK_DATA)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (0, b"x" * 20_000 + bytes(15_000)),
        (KEEP_SIZE, b"x" * 20_000),
        (KEEP_SIZE | PUNCH_HOLE, b"x" * 100 + bytes(10_000) + b"x" * 9_900),
        (ZERO_RANGE, b"x" * 100 + bytes(10_000) + b"x" * 9_900),
    ],
    ids=["longer", "kept size", "punched", "zeroed"],
)
def test_a_range_is_allocated_punched_or_zeroed(
    mount: Mount, path: Path, shared: Bucket, mode: int, expected: bytes
) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 20_000)
        os.fsync(file.fileno())
        start, size = (30_000, 5000) if mode in (0, KEEP_SIZE) else (100, 10_000)
        allocate(file.fileno(), mode, start, size)
        assert os.fstat(file.fileno()).st_size == len(expected)
    assert path.read_bytes() == content_of(shared, mount, path) == expected


@pytest.mark.parametrize("mode", [COLLAPSE_RANGE, INSERT_RANGE])
def test_what_is_behind_a_range_cannot_be_moved(path: Path, mode: int) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(20_000))
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            allocate(file.fileno(), mode, 4096, 4096)


def test_the_kernel_copies_between_files(mount: Mount, path: Path, shared: Bucket) -> None:
    source = mount.path / "copied-from"
    content = os.urandom(300_000)
    source.write_bytes(content)
    with open(source, "rb") as read, open(path, "wb") as written:
        assert os.copy_file_range(read.fileno(), written.fileno(), 300_000) == 300_000
        os.lseek(read.fileno(), 0, os.SEEK_SET)
        assert os.sendfile(written.fileno(), read.fileno(), 0, 1000) == 1000
    assert content_of(shared, mount, path) == content + content[:1000]


@states("An unnamed file (O_TMPFILE) is refused with EOPNOTSUPP.")
def test_an_unnamed_file_is_refused(mount: Mount) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        os.open(mount.path, os.O_TMPFILE | os.O_RDWR)


@pytest.mark.parametrize("time_ns", [-5 * 10**9 + 5, 7 * 10**18])
@states("Times lie between the years 1677 and 2262.")
def test_times_long_ago_and_far_away_are_kept(path: Path, time_ns: int) -> None:
    with open(path, "wb") as file:
        os.utime(file.fileno(), ns=(time_ns, time_ns))
    assert path.stat().st_mtime_ns == time_ns
    os.utime(path, ns=(time_ns + 1, time_ns + 1))
    assert path.stat().st_mtime_ns == time_ns + 1


@states(
    "A path that is longer than a key may be (1,024 bytes) is ENAMETOOLONG for whoever makes it."
)
def test_a_path_that_is_too_long_for_a_key_is_refused(mount: Mount, path: Path) -> None:
    deep = path.joinpath(*["d" * 230] * 4)
    deep.mkdir(parents=True)
    path.with_suffix(".file").touch()
    for call in (
        lambda: os.open(deep / ("x" * 100), os.O_CREAT | os.O_WRONLY),
        lambda: os.mkdir(deep / ("x" * 100)),
        lambda: os.symlink("target", deep / ("x" * 100)),
        lambda: os.rename(path.with_suffix(".file"), deep / ("x" * 100)),
    ):
        with pytest.raises(OSError, match="too long"):
            call()
    assert os.listdir(deep) == []


def test_a_tree_is_removed_while_it_is_listed_and_filled(path: Path) -> None:
    path.mkdir()
    names = {f"{number:03}" for number in range(120)}
    for name in names:
        (path / name).touch()
    seen = set()
    with os.scandir(path) as entries:
        for number, entry in enumerate(entries):
            seen.add(entry.name)
            os.unlink(entry.path)
            if number % 20 == 0:
                (path / f"new-{number}").touch()
    assert names <= seen
    assert not names & set(os.listdir(path))
