"""The pyfuse3 session: each operation on one mount, and what differs from the kernel session.

The operations themselves are the same under both; what they promise is tested
under the default one. Here is that pyfuse3's handlers pass them on.
"""

import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.libc import allocate
from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import (
    WRITABLE,
    Mount,
    Mounter,
    all_sent,
    cost,
    fusefs,
    metadata,
    status,
    uploads,
)
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S, content, python, read_all
from tests.support.survival.surviving import expect_not_connected
from tests.support.waiting import until

pytestmark = pytest.mark.root

OPTIONS = ("--session", "pyfuse3", WRITABLE)
MIB = 1 << 20
PUNCH_HOLE_AND_KEEP_SIZE = 0x3
SMALL, LARGE = content("small", 100_003), content("large", 9 * MIB + 5)
THERE = {"d/empty": b"", "d/large": LARGE, "d/small": SMALL, "d/below/file": b"x"}
# Rewrites a file, and says so before it closes the file.
WRITER = """
import os, sys
os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC), b"new")
print("written", flush=True)
sys.stdin.read()
"""
# Tries for an exclusive lock on what another process has open.
LOCKER = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.fixture(scope="module")
def mount(shared: Bucket, faulty: FaultyS3, module_mounter: Mounter) -> Mount:
    for key, data in THERE.items():
        shared.put(key, data)
    for number in range(60):
        shared.put(f"many/{number:02}", b"x")
    # Beside `many` it would be taken to have no attributes either.
    attributes = {"mode": str(stat.S_IFREG | 0o604), "uid": "7"}
    shared.put("told/described/file", b"x", Metadata=attributes)
    shared.put("told/described/link", b"file", Metadata={"mode": str(stat.S_IFLNK | 0o777)})
    for name in ("old", "slow"):
        shared.put(name, LARGE)
    options = (*OPTIONS, "--metadata-ttl", "indefinite")
    return module_mounter(*options, endpoint_url=faulty.endpoint_url)


@pytest.fixture(autouse=True)
def _no_faults(faulty: FaultyS3) -> Iterator[None]:
    yield
    faulty.clear()


def test_a_walk_finds_the_buckets_keys_with_their_inode_numbers(mount: Mount) -> None:
    root = mount.path / "d"
    found = {str(path.relative_to(mount.path)) for path in root.rglob("*") if path.is_file()}
    assert found == set(THERE)
    for entry in os.scandir(root):
        assert (entry.inode(), entry.is_dir()) == (entry.stat().st_ino, entry.name == "below")
    before = {entry.name: entry.inode() for entry in os.scandir(root)}
    mount.forget()
    assert {entry.name: entry.inode() for entry in os.scandir(root)} == before


def test_seekdir_goes_back_to_any_place(mount: Mount) -> None:
    with DirectoryStream(mount.path / "many") as stream:
        places, names = [stream.tell()], []
        while (entry := stream.read()) is not None:
            names.append(entry[0])
            places.append(stream.tell())
        assert len(names) == 62
        for index in (0, 1, 40, 61, 17):
            stream.seek(places[index])
            assert stream.names() == names[index:]


def test_a_listing_shows_links_and_modes(mount: Mount) -> None:
    with os.scandir(mount.path / "told/described") as entries:
        found = {entry.name: (entry.is_symlink(), entry.stat().st_uid) for entry in entries}
    assert found == {"file": (False, 7), "link": (True, 7)}
    assert os.readlink(mount.path / "told/described" / "link") == "file"


@pytest.mark.parametrize("key", THERE)
def test_a_file_reads_whole_in_parts_and_mapped(mount: Mount, key: str) -> None:
    path, data = mount.path / key, THERE[key]
    assert read_all(path, 5000) == data
    with path.open("rb") as file:
        assert os.pread(file.fileno(), 5000, len(data) // 2) == data[len(data) // 2 :][:5000]
        if data:
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == len(data)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                assert view[:] == data


def test_the_size_of_the_file_system(mount: Mount) -> None:
    shown = os.statvfs(mount.path)
    assert shown.f_blocks * shown.f_frsize == 1 << 60
    assert (shown.f_bfree, shown.f_namemax) == (shown.f_blocks, 255)


@states(
    "Under `--session pyfuse3` a replaced object may get another inode number while its old"
    " version is in use."
)
def test_a_replaced_object_gets_another_inode_number(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("file", b"old")
    path = mounter(*OPTIONS, "--metadata-ttl", "0s").path / "file"
    with path.open("rb") as held:
        bucket.put("file", b"newer")
        assert read_all(path) == b"newer"
        assert os.fstat(held.fileno()).st_ino != path.stat().st_ino


def test_a_refusal_of_the_server_becomes_an_errno(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    bucket.put("refused", SMALL)
    options = (*OPTIONS, "--retry-time", "1s")
    path = mounter(*options, endpoint_url=faulty.endpoint_url).path / "refused"
    for answer, number in ((403, errno.EACCES), (500, errno.EIO)):
        faulty.clear()
        faulty.add("GET", "refused", status=answer)
        with pytest.raises(OSError, match=os.strerror(number)):
            read_all(path)


@states("Under `--session pyfuse3` it does wait, for the retry time at most.")
def test_a_killed_reader_waits_for_the_server(mount: Mount, faulty: FaultyS3) -> None:
    rule = faulty.add("GET", "slow", stall=True)
    reader = subprocess.Popen(["cat", mount.path / "slow"], stdout=subprocess.DEVNULL)
    until(lambda: rule.used > 0, "the request that hangs")
    os.kill(mount.pid, signal.SIGUSR2)
    until(lambda: "downloading 'slow'" in mount.log.read_text(), "the log tells of it")
    reader.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(timeout=1)
    faulty.clear()
    assert reader.wait(timeout=PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("size", [0, 1, 100_000, 9 * MIB])
def test_a_closed_file_is_in_the_bucket(mount: Mount, shared: Bucket, size: int) -> None:
    path = mount.path / f"new-{size}"
    path.write_bytes(LARGE[:size])
    # pyfuse3 does not say whose a close is, so an empty file is uploaded a moment later.
    until(lambda: path.name in keys(shared), "the file is in the bucket")
    assert stored(shared, path.name) == path.read_bytes() == LARGE[:size]


def test_a_file_is_synced_edited_appended_to_and_cut(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "log"
    with path.open("wb", buffering=0) as file:
        file.write(b"one")
        os.fsync(file.fileno())
        assert stored(shared, "log") == b"one"
        file.write(b"two")
    assert stored(shared, "log") == b"onetwo"
    with path.open("r+b") as file:
        file.write(b"ONE")
    with path.open("ab") as file:
        file.write(b"three")
    assert stored(shared, "log") == b"ONEtwothree"
    os.truncate(path, 4)
    assert stored(shared, "log") == path.read_bytes() == b"ONEt"


def test_space_is_allocated_by_writing_zeros_and_nothing_is_punched(
    mount: Mount, shared: Bucket
) -> None:
    path = mount.path / "allocated"
    with path.open("w+b", buffering=0) as file:
        file.write(b"ab")
        os.posix_fallocate(file.fileno(), 0, 10_000)  # the C library writes zeros
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            allocate(file.fileno(), PUNCH_HOLE_AND_KEEP_SIZE, 0, 1)
    assert stored(shared, "allocated") == b"ab" + bytes(9998)


@states(
    "Under `--session pyfuse3`, and where the mount cannot see whose a close is, what it wrote is"
    " kept in both."
)
def test_what_a_killed_writer_wrote_is_kept(mount: Mount, shared: Bucket) -> None:
    program = python(WRITER, mount.path / "old")
    assert program.stdout.readline() == "written\n"
    program.kill()
    program.communicate(timeout=PATIENCE_S)
    until(lambda: status(mount)["writing"]["staged"] == 0, "nothing is staged any more")
    assert stored(shared, "old") == b"new"
    assert uploads(shared) == []


def test_a_lock_keeps_other_processes_out(mount: Mount) -> None:
    path = mount.path / "locked"
    with path.open("wb") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert "BlockingIOError" in python(LOCKER, path).communicate()[1]
    assert python(LOCKER, path).communicate()[1] == ""


def test_directories_are_made_filled_renamed_and_removed(mount: Mount, shared: Bucket) -> None:
    run = mount.path / "run-1"
    (run / "sub").mkdir(parents=True)
    for number in range(30):
        (run / "sub" / f"{number:02}").write_bytes(b"%d" % number)
    moved = run.rename(mount.path / "run-2")
    assert not run.exists()
    assert (moved / "sub" / "07").read_bytes() == b"7"
    assert {key for key in keys(shared) if key.startswith("run-")} >= {
        f"run-2/sub/{number:02}" for number in range(30)
    }
    shutil.rmtree(moved)
    directory = os.open(mount.path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)  # of removals the bucket hears a moment later
    os.close(directory)
    assert not [key for key in keys(shared) if key.startswith("run-")]


def test_a_file_is_replaced_by_rename_and_removed_while_it_is_open(
    mount: Mount, shared: Bucket
) -> None:
    path, temporary = mount.path / "model", mount.path / "model.tmp"
    path.write_bytes(b"old")
    temporary.write_bytes(b"new")
    os.replace(temporary, path)
    assert stored(shared, "model") == b"new"
    assert "model.tmp" not in keys(shared)
    with path.open("rb", buffering=0) as held:
        path.unlink()
        assert not path.exists()
        assert held.read() == b"new"


def test_symbolic_links_are_made_and_read(mount: Mount, shared: Bucket) -> None:
    link = mount.path / "symbolic"
    link.symlink_to("d/small")
    assert os.readlink(link) == "d/small"
    assert link.read_bytes() == SMALL
    assert stored(shared, "symbolic") == b"d/small"


@states("Under `--session pyfuse3` the names of a link are files by themselves from the start.")
def test_a_file_gets_a_second_name(mount: Mount, shared: Bucket) -> None:
    first, second = mount.path / "first", mount.path / "second"
    first.write_bytes(b"content")
    second.hardlink_to(first)
    assert second.read_bytes() == stored(shared, "second") == b"content"
    assert not first.samefile(second)


def test_attributes_are_set_and_kept(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "attributes"
    os.mknod(path)
    path.write_bytes(b"x")
    os.chmod(path, 0o640)
    os.chown(path, 3, 4)
    os.utime(path, ns=(1, 10**18 + 7))
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 3, 4)
    assert found.st_mtime_ns == 10**18 + 7
    all_sent(mount)
    assert metadata(shared, "attributes")["mtime"] == "1000000000.000000007"
    assert cost(mount, lambda: os.chmod(path, 0o640)) == {}


def test_extended_attributes_are_set_and_removed(mount: Mount) -> None:
    path = mount.path / "xattrs"
    path.write_bytes(b"x")
    os.setxattr(path, "user.a", b"1")
    assert os.getxattr(path, "user.a") == b"1"
    assert "user.a" in os.listxattr(path)
    os.removexattr(path, "user.a")
    assert "user.a" not in os.listxattr(path)
    for name, number in (("user.s3.key", errno.EPERM), ("security.x", errno.EOPNOTSUPP)):
        with pytest.raises(OSError, match=os.strerror(number)):
            os.setxattr(path, name, b"1")


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda d: os.stat(d / "none"), errno.ENOENT),
        (lambda d: os.stat(d / "small" / "below"), errno.ENOTDIR),
        (lambda d: os.listdir(d / "small"), errno.ENOTDIR),
        (lambda d: os.open(d / "small", os.O_CREAT | os.O_EXCL | os.O_WRONLY), errno.EEXIST),
        (lambda d: os.mkdir(d / "below"), errno.EEXIST),
        (lambda d: os.unlink(d / "none"), errno.ENOENT),
        (lambda d: os.rmdir(d / "below"), errno.ENOTEMPTY),
        (lambda d: os.rename(d / "below", d / "small"), errno.ENOTDIR),
        (lambda d: os.link(d / "small", d / "empty"), errno.EEXIST),
        (lambda d: os.mkfifo(d / "x"), errno.EPERM),
        (lambda d: os.readlink(d / "small"), errno.EINVAL),
        (lambda d: os.getxattr(d / "small", "user.none"), errno.ENODATA),
    ],
)
def test_what_cannot_be_done_is_reported(
    mount: Mount, call: Callable[[Path], object], number: int
) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        call(mount.path / "d")


@states("A mount of the pyfuse3 session ends with its daemon.")
def test_a_mount_ends_with_its_daemon_and_the_next_one_uploads_what_was_closed(
    mounter: Mounter, bucket: Bucket
) -> None:
    """With local durability a close returns before the bucket has the file."""
    mount = mounter(*OPTIONS, "--durability", "local")
    shown = mount.status()
    assert shown["session"].startswith("pyfuse3")
    assert not shown["passthrough"]["on"]
    why = "a mount of the pyfuse3 session ends with its daemon"
    assert shown["survival"] == {"on": False, "why": why}
    (mount.path / "file").write_bytes(b"kept")
    os.kill(shown["daemon"]["pid"], signal.SIGKILL)
    expect_not_connected(mount)
    dead = json.loads(fusefs("status", mount.path, "--json").stdout)
    assert "died" in dead["not_answering"]
    mount.force()
    mount.start()
    until(lambda: status(mount)["writing"]["pending_files"] == 0, "the file is uploaded")
    assert stored(bucket, "file") == (mount.path / "file").read_bytes() == b"kept"
