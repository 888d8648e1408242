"""Large files on their way into the bucket: in parts, edited, over kills, a bad network."""

import json
import os
import subprocess
import sys

import pytest

from fusefs.linux.libc import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, allocate
from tests.support.mounting import WRITABLE, Mount, Mounter, status, uploads
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.sharing import content
from tests.support.survival.surviving import kill_everything, kill_serving, replace_daemon
from tests.support.waiting import until

MIB = 1 << 20

pytestmark = pytest.mark.root

# The objects that are edited, each by one test.
LARGE = {"moved": 64 * MIB, "cut": 40 * MIB, "punched": 24 * MIB}


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    for key, size in LARGE.items():
        shared.put(key, content(key, size))
    return module_mounter("--session", "kernel", WRITABLE)


@states("A large file is sent while it is written, and seen in the bucket after its close.")
def test_a_large_file_is_sent_while_it_is_written(mount: Mount, shared: Bucket) -> None:
    content = os.urandom(40 << 20)
    before = status(mount)["s3"]["bytes_sent"]
    with open(mount.path / "big", "wb", buffering=0) as file:
        file.write(content)
        until(lambda: status(mount)["s3"]["bytes_sent"] - before >= 16 << 20)
        assert "big" not in keys(shared)
        # What was sent already is changed once more.
        os.pwrite(file.fileno(), b"changed", 1 << 20)
    expected = content[: 1 << 20] + b"changed" + content[(1 << 20) + 7 :]
    assert stored(shared, "big") == expected
    assert (mount.path / "big").read_bytes() == expected
    assert uploads(shared) == []


def test_a_large_file_that_is_renamed_or_removed_while_it_is_written(
    mount: Mount, shared: Bucket
) -> None:
    content = os.urandom(24 << 20)
    with open(mount.path / "a", "wb", buffering=0) as file:
        file.write(content)
        until(lambda: uploads(shared) == ["a"])
        os.rename(mount.path / "a", mount.path / "b")
        file.write(b"more")
    assert "a" not in keys(shared)
    assert stored(shared, "b") == content + b"more"
    with open(mount.path / "c", "wb", buffering=0) as file:
        file.write(content)
        until(lambda: uploads(shared) == ["c"])
        os.unlink(mount.path / "c")
    assert "c" not in keys(shared)
    # The kernel releases a handle after close() has returned.
    until(lambda: uploads(shared) == [], "the upload of a removed file is aborted")


@states("Parts that the bucket has are not sent again by the next daemon.")
def test_parts_that_the_bucket_has_are_not_sent_again_by_the_next_daemon(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount = mounter("--no-read-only")
    content = os.urandom(40 << 20)
    with open(mount.path / "big", "wb", buffering=0) as file:
        file.write(content)
        (record,) = until(lambda: list(mount.cache.glob("mounts/*/staging/*/*.json")))
        until(
            lambda: len((json.loads(record.read_text())["upload"] or {"parts": ()})["parts"]) == 5
        )
        replace_daemon(mount)
    assert stored(bucket, "big") == content
    assert status(mount)["s3"]["bytes_sent"] == 0
    assert uploads(bucket) == []


@states(
    "What no program had closed when the machine went down is not uploaded; the log says where it"
    " is."
)
def test_what_was_never_closed_is_kept_and_its_upload_aborted(
    mounter: Mounter, bucket: Bucket
) -> None:
    mount = mounter("--no-read-only")
    script = "import sys, time; f = open(sys.argv[1], 'wb', 0); f.write(bytes(24 << 20))"
    script += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(mount.path / "torn")]) as writer:
        until(lambda: uploads(bucket) == ["torn"])
        # As if the machine went down.
        kill_everything(mount)
        mount.force()
        writer.kill()
    mount.start()
    until(lambda: uploads(bucket) == [])
    assert keys(bucket) == []
    assert os.listdir(mount.path) == []
    (kept,) = mount.cache.glob("mounts/*/staging/*/[0-9]*[0-9]")
    assert kept.stat().st_size >= 16 << 20
    assert str(kept.parent) in mount.log.read_text()


@states(
    "Editing a large object that no other program reads downloads and sends the parts that change,"
    " and no others, where the cache disk tells of holes of 4 KiB."
)
def test_editing_a_large_object_moves_the_parts_that_change_alone(
    mount: Mount, shared: Bucket
) -> None:
    expected = bytearray(content("moved", LARGE["moved"]))
    expected[(20 << 20) + 5 : (20 << 20) + 12] = b"changed"
    before = status(mount)["s3"]
    with open(mount.path / "moved", "r+b", buffering=0) as file:
        file.seek((20 << 20) + 5)
        file.write(b"changed")
        file.seek((20 << 20) - 3)
        assert file.read(20) == expected[(20 << 20) - 3 : (20 << 20) + 17]
    after = status(mount)["s3"]
    assert after["bytes_fetched"] - before["bytes_fetched"] <= 24 << 20
    assert after["bytes_sent"] - before["bytes_sent"] == 8 << 20
    assert stored(shared, "moved") == expected
    assert (mount.path / "moved").read_bytes() == expected
    assert uploads(shared) == []


@pytest.mark.parametrize("conflict", ["overwrite", "fail"])
@states(
    "An edit of a large object that somebody else replaces meanwhile is ESTALE at its "
    "close; the edits stay on the local disk, and the log says where."
)
def test_an_edit_whose_object_somebody_else_replaces_is_given_up_and_kept(
    mounter: Mounter, bucket: Bucket, conflict: str
) -> None:
    bucket.put("big", os.urandom(32 << 20))
    mount = mounter("--no-read-only", "--conflict", conflict)
    pid = mount.pid
    file = os.open(mount.path / "big", os.O_WRONLY)
    os.pwrite(file, b"edit" * 1024, 20 << 20)
    bucket.put("big", b"theirs")
    with pytest.raises(OSError, match="Stale"):
        os.close(file)
    assert (mount.path / "big").read_bytes() == b"theirs"
    (kept,) = mount.cache.rglob("edited-*")
    assert kept.read_bytes()[20 << 20 :].startswith(b"edit" * 1024)
    assert str(kept) in mount.log.read_text()
    assert (mount.pid, uploads(bucket)) == (pid, [])
    mount.end()
    assert stored(bucket, "big") == b"theirs"


def test_a_large_object_is_extended_shortened_and_edited_over_a_kill(
    mount: Mount, shared: Bucket
) -> None:
    expected = bytearray(content("cut", LARGE["cut"]))
    with open(mount.path / "cut", "r+b", buffering=0) as file:
        file.seek(10_000_001)
        file.write(b"one")
        expected[10_000_001:10_000_004] = b"one"
        file.truncate(30_000_001)
        del expected[30_000_001:]
        replace_daemon(mount)
        file.truncate(35_000_000)
        expected.extend(bytes(35_000_000 - len(expected)))
        file.seek(34_000_000)
        file.write(b"two")
        expected[34_000_000:34_000_003] = b"two"
        file.seek(0)
        assert file.read(100) == expected[:100]
    assert stored(shared, "cut") == expected
    assert (mount.path / "cut").read_bytes() == expected


@states(
    "`fallocate` extends, punches and zeroes; under pyfuse3 it is EOPNOTSUPP beyond extending, "
    "and in a large object that is edited zeros are written."
)
def test_a_large_object_that_is_edited_is_punched_zeroed_and_extended(
    mount: Mount, shared: Bucket
) -> None:
    expected = bytearray(content("punched", LARGE["punched"]))
    path = mount.path / "punched"
    with open(path, "r+b", buffering=0) as file:
        size = len(expected)
        for mode, start, length in (
            (KEEP_SIZE | PUNCH_HOLE, 9 * MIB + 100, 1_500_000),
            (KEEP_SIZE | PUNCH_HOLE, 0, 10),
            (KEEP_SIZE, size, 10_000),
            (KEEP_SIZE | ZERO_RANGE, size - 5000, 10_000),
            (KEEP_SIZE | PUNCH_HOLE, size + 100, 10_000),
            (0, 1 << 20, 1 << 20),
        ):
            allocate(file.fileno(), mode, start, length)
            if mode & ~KEEP_SIZE:
                stop = min(start + length, size)
                expected[start:stop] = bytes(max(0, stop - start))
        assert os.fstat(file.fileno()).st_size == size
        # What was zeroed by a daemon that was killed is not the object's for the next one.
        kill_serving(mount)
        allocate(file.fileno(), ZERO_RANGE, size - 10_000, 30_000)
        expected[size - 10_000 :] = bytes(30_000)
        assert os.fstat(file.fileno()).st_size == len(expected)
        assert os.pread(file.fileno(), 4 * MIB, 8 * MIB) == expected[8 * MIB :][: 4 * MIB]
    assert stored(shared, "punched") == bytes(expected)
    assert path.read_bytes() == bytes(expected)
