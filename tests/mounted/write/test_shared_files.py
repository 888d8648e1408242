"""Programs that read and write one file at once see one file, as on a disk.

Each test runs on a local directory first: what it finds there, it finds on the mount.
"""

import contextlib
import ctypes
import mmap
import os
import random
import select
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, all_sent, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import S3Server
from tests.support.survival.surviving import kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Place:
    """A directory in which a test's file is made anew, and known whole to whoever reads it."""

    def __init__(self, path: Path, mount: Mount | None, bucket: Bucket) -> None:
        self.path = path
        self.mount = mount
        self._bucket = bucket

    def holding(self, content: bytes) -> Path:
        self.path.write_bytes(content)
        assert self.path.read_bytes() == content
        return self.path

    def check(self, content: bytes) -> None:
        """The file has this content at last, in the bucket too, and nothing stays staged."""
        assert self.path.read_bytes() == content
        if self.mount is not None:
            all_sent(self.mount)
            key = os.fspath(self.path.relative_to(self.mount.path))
            assert stored(self._bucket, key) == content
            until(lambda: not left_behind(self.mount), "nothing is staged any more")


def left_behind(mount: Mount | None) -> list[str]:
    """What lies in the mount's staging directories beside the files that name the bucket."""
    return [path.name for path in mount.cache.glob("mounts/*/staging/*/*") if path.name != "source"]


@pytest.fixture(params=["disk", "mount"])
def place(request: pytest.FixtureRequest, mount: Mount, shared: Bucket, tmp_path: Path) -> Place:
    name = request.node.name.replace("[", "-").replace("]", "")
    if request.param == "disk":
        return Place(tmp_path / name, None, shared)
    return Place(mount.path / name, mount, shared)


@states(
    "Programs that read and write one file on one mount see one file, as on a disk: what is"
    " written is seen by every later read, also through a descriptor or a mapping that was there"
    " before."
)
def test_a_reader_sees_what_is_written_in_place(place: Place) -> None:
    content = bytearray(random.Random(1).randbytes(3 * MIB))
    path = place.holding(bytes(content))
    with (
        path.open("rb", buffering=0) as reader,
        mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        ino = os.fstat(reader.fileno()).st_ino
        with path.open("r+b", buffering=0) as writer:
            for at in (0, MIB + 5, len(content) - 7):
                writer.seek(at)
                writer.write(b"changed")
                content[at : at + 7] = b"changed"
                assert os.pread(reader.fileno(), 7, at) == b"changed"
                assert mapped[at : at + 7] == b"changed"
            assert os.pread(writer.fileno(), len(content), 0) == content
            with path.open("rb") as later:
                assert later.read() == content
        assert reader.read() == content
        assert mapped[:] == content
        assert os.fstat(reader.fileno()).st_ino == ino == path.stat().st_ino
    place.check(bytes(content))


def test_a_reader_sees_a_file_grow_and_shrink(place: Place) -> None:
    path = place.holding(b"one\n")
    with path.open("rb", buffering=0) as reader:
        seen = reader.read()
        for line in (b"two\n", b"three\n", b"four\n"):
            with path.open("ab") as writer:
                writer.write(line)
            seen += reader.read()
            assert os.fstat(reader.fileno()).st_size == path.stat().st_size == len(seen)
            assert reader.seek(0, os.SEEK_END) == len(seen)
        assert seen == b"one\ntwo\nthree\nfour\n"
        os.truncate(path, 4)
        assert os.fstat(reader.fileno()).st_size == 4
        assert os.pread(reader.fileno(), 100, 0) == b"one\n"
        path.write_bytes(b"anew")
        assert os.pread(reader.fileno(), 100, 0) == b"anew"
        with path.open("wb") as writer:
            assert os.pread(reader.fileno(), 100, 0) == b""
            writer.write(b"once more")
        assert os.pread(reader.fileno(), 100, 0) == b"once more"
    place.check(b"once more")


MODES = (os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_APPEND, os.O_WRONLY | os.O_TRUNC)
READING = """
import os, sys
path = sys.argv[1]
print(flush=True)
while True:
    with open(path, "rb") as file:
        file.read()
"""


@states("No open for writing fails because programs read the file.")
def test_no_open_for_writing_fails_because_somebody_reads(place: Place) -> None:
    content = b"0\n"
    path = place.holding(content)
    with reading(path):
        for number in range(1, 41):
            flags, line = MODES[number % len(MODES)], b"%d\n" % number
            fd = os.open(path, flags)
            os.write(fd, line)
            os.close(fd)
            if flags & os.O_TRUNC:
                content = line
            elif flags & os.O_APPEND:
                content += line
            else:
                content = line + content[len(line) :]
            assert path.read_bytes() == content
    place.check(content)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Other processes open, read and close a file all the time."""
    command = ["python3", "-c", READING, os.fspath(path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout.readline()
        yield
        assert [reader.poll() for reader in readers] == [None, None]
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


@pytest.mark.parametrize("option", ["-f", "-F"])
def test_tail_prints_each_line_that_is_appended(place: Place, option: str) -> None:
    path = place.holding(b"line 0\n")
    command = ["tail", option, "-n", "+1", "-s", "0.05", os.fspath(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
        assert line_of(tail) == b"line 0\n"
        for number in range(1, 6):
            with path.open("a") as log:
                log.write(f"line {number}\n")
            assert line_of(tail) == b"line %d\n" % number
        tail.kill()
    place.check(b"".join(b"line %d\n" % number for number in range(6)))


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    if not select.select([process.stdout], [], [], 60)[0]:
        process.kill()
        pytest.fail("it prints nothing")
    return process.stdout.readline()


@states("What is stored through a shared mapping is uploaded at close, or after munmap.")
@pytest.mark.parametrize(("size", "kills"), [(8192, True), (12 * MIB, True), (20 * MIB, False)])
def test_a_mapping_in_c_is_uploaded_after_munmap(place: Place, size: int, kills: bool) -> None:
    path = place.holding(b"a" * size)
    reader = mapped_in_c(path, os.O_RDONLY, mmap.PROT_READ)
    with path.open("r+b") as writer:
        writer.write(b"b")
    assert ctypes.string_at(reader, 2) == b"ba"
    writer_map = mapped_in_c(path, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memmove(writer_map + 4096, b"stored", 6)
    assert ctypes.string_at(reader + 4096, 7) == b"storeda"
    assert path.read_bytes()[4096:4103] == b"storeda"
    if place.mount is not None and kills:
        kill_serving(place.mount)
        assert path.stat().st_size == size  # by the next daemon
        all_sent(place.mount)
    ctypes.memmove(writer_map + 4096, b"STORED", 6)
    for address in (reader, writer_map):
        assert not _libc.munmap(ctypes.c_void_p(address), 8192)
    if place.mount is not None:
        until(lambda: not left_behind(place.mount), "it is settled")
    place.check(b"b" + b"a" * 4095 + b"STORED" + b"a" * (size - 4102))


def mapped_in_c(path: Path, flags: int, protection: int) -> int:
    """A shared mapping whose descriptor is closed at once; Python's keep their own."""
    fd = os.open(path, flags)
    _libc.mmap.restype = ctypes.c_void_p
    address: int = _libc.mmap(None, 8192, protection, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    os.close(fd)
    return address


def test_readers_and_writers_go_on_with_one_file_when_the_daemon_is_killed(
    mount: Mount, shared: Bucket
) -> None:
    path = mount.path / "killed"
    path.write_bytes(b"0123456789")
    path.read_bytes()
    with path.open("rb", buffering=0) as reader:
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"a")
            kill_serving(mount)
            writer.write(b"b")
            assert os.pread(reader.fileno(), 10, 0) == b"ab23456789"
            kill_serving(mount)
            with path.open("rb") as later:
                assert later.read() == b"ab23456789"
        with path.open("ab") as writer:
            writer.write(b"c")
        assert reader.read() == b"ab23456789c"
        kill_serving(mount)
        with path.open("r+b") as writer:
            writer.write(b"A")
        assert os.pread(reader.fileno(), 20, 0) == b"Ab23456789c"
    Place(path, mount, shared).check(b"Ab23456789c")


@states(
    "Where another mount of the machine uses the same cached copy, or a large file is open both"
    " since before and since after it was whole in the cache, what is open for reading goes on"
    " with the content that it had when the file is edited."
)
def test_a_copy_that_another_mount_uses_is_not_written_to(
    mount: Mount, shared: Bucket, s3: S3Server, tmp_path: Path
) -> None:
    path = mount.path / "used"
    path.write_bytes(b"before")
    until(mount.is_recorded, "the copy on record, for the other mount to find it")
    other = replace(
        mount, path=tmp_path / "other", log=tmp_path / "other.log", options=(WRITABLE,), _pids=[]
    )
    other.path.mkdir()
    other.start()
    try:
        theirs = other.path / "used"
        theirs.read_bytes()
        path.read_bytes()
        with theirs.open("rb", buffering=0) as held, path.open("rb", buffering=0) as ours:
            for flags in MODES[:3]:
                fd = os.open(path, flags)
                os.pwrite(fd, b"B", 0)
                os.close(fd)
            assert held.read() == ours.read() == b"before"
            Place(path, mount, shared).check(b"BeforeBB")
    finally:
        other.clean_up()


def test_a_large_file_that_was_opened_before_it_was_whole(mount: Mount, shared: Bucket) -> None:
    content = random.Random(2).randbytes(20 * MIB)
    path = mount.path / "large"
    path.write_bytes(content)
    fusefs("drop", path)
    with path.open("rb", buffering=0) as early:
        assert early.read(5) == content[:5]
        assert path.read_bytes() == content
        with path.open("rb", buffering=0) as late:
            with path.open("r+b") as writer:
                writer.write(b"other")
            assert path.read_bytes() == b"other" + content[5:]
            assert os.pread(late.fileno(), 5, 0) == os.pread(early.fileno(), 5, 0) == content[:5]
    Place(path, mount, shared).check(b"other" + content[5:])
