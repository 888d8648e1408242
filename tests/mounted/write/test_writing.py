"""A writable mount: what programs write is what they read, and what the bucket has."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.cli import status_report
from fusefs.launch import control, registry
from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.survival.surviving import keeper_status, kill_serving
from tests.support.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def mount(shared: Bucket, module_mounter: Mounter) -> Mount:
    """One mount for all tests, most of which have a folder of their own."""
    shared.put("file", b"x")
    shared.put("dir/inside", b"x")
    return module_mounter(WRITABLE)


@pytest.fixture
def place(mount: Mount, folder: Bucket) -> Path:
    """The test's folder on that mount."""
    path = mount.path / folder.prefix
    path.mkdir()
    return path


@states(
    "`close` and `fsync` return when the bucket has what was written, apart from closes of"
    " temporary files, and of files that are appended to again and again; an object appears whole"
    " or not at all, but for the empty one by which O_EXCL reserves a name, and files that stay"
    " open for long."
)
def test_fsync_brings_a_file_into_the_bucket_while_it_is_open(place: Path, folder: Bucket) -> None:
    with open(place / "log", "wb", buffering=0) as file:
        file.write(b"one")
        assert keys(folder) == []
        os.fsync(file.fileno())
        assert stored(folder, "log") == b"one"
        file.write(b"two")
    assert stored(folder, "log") == b"onetwo"


@states(
    "Readers on the same mount see what is being written, and a file that was just created"
    " is listed."
)
def test_readers_see_what_is_being_written(place: Path) -> None:
    with open(place / "a", "wb", buffering=0) as writer:
        writer.write(b"first")
        with open(place / "a", "rb", buffering=0) as reader:
            assert reader.read() == b"first"
            writer.write(b" second")
            assert reader.read() == b" second"
        assert os.listdir(place) == ["a"]


@states("A file that is renamed before it was uploaded is uploaded under its new name alone.")
def test_a_rename_before_the_close_uploads_under_the_new_name_alone(
    place: Path, folder: Bucket
) -> None:
    with open(place / "tmp", "wb") as file:
        file.write(b"content")
        file.flush()
        os.rename(place / "tmp", place / "final")
        assert keys(folder) == []
    assert keys(folder) == ["final"]
    assert stored(folder, "final") == b"content"


@states("A renamed directory takes everything below it along.")
def test_directories_are_made_filled_renamed_and_removed(place: Path, folder: Bucket) -> None:
    run = place / "run-1"
    run.mkdir()
    (run / "sub").mkdir()
    for number in range(30):
        (run / "sub" / f"{number:02}").write_bytes(b"%d" % number)
    os.rename(run, place / "run-2")
    moved = place / "run-2" / "sub"
    assert sorted(os.listdir(moved)) == [f"{number:02}" for number in range(30)]
    assert (moved / "07").read_bytes() == b"7"
    assert not run.exists()
    assert all(key.startswith("run-2/") for key in keys(folder))
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        os.rmdir(place / "run-2")
    for number in range(30):
        os.unlink(moved / f"{number:02}")
    os.rmdir(moved)
    assert os.listdir(place / "run-2") == []
    os.rmdir(place / "run-2")
    assert keys(folder) == []


@states("A directory stays when its last file is deleted, until `rmdir`.")
def test_a_directory_without_a_marker_stays_when_its_last_file_goes(
    mounter: Mounter, bucket: Bucket
) -> None:
    bucket.put("only/file", b"x")
    root = mounter(WRITABLE).path
    os.unlink(root / "only" / "file")
    assert os.listdir(root / "only") == []
    assert keys(bucket) == ["only/"]


@states(
    "Modes, owners and times are kept in the object's metadata (`mode`, `uid`, `gid`,"
    " `mtime`), as s3fs and rclone write them."
)
def test_modes_owners_and_times_are_kept(mount: Mount, place: Path, folder: Bucket) -> None:
    path = place / "tool"
    path.write_bytes(b"#!/bin/sh\n")
    os.chmod(path, 0o750)
    os.chown(path, 12, 34)
    os.utime(path, ns=(10**18, 10**18 + 5))
    all_sent(mount)
    head = metadata(folder, "tool")
    assert head["mode"] == str(stat.S_IFREG | 0o750)
    assert (head["uid"], head["gid"]) == ("12", "34")
    mount.end()
    mount.start()
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o750
    assert (found.st_uid, found.st_gid) == (12, 34)
    assert found.st_mtime_ns == 10**18 + 5
    assert path.read_bytes() == b"#!/bin/sh\n"


@states("Symbolic links are objects with their target as content.")
def test_symbolic_links_are_followed_and_listed(mount: Mount, place: Path, folder: Bucket) -> None:
    (place / "target").write_bytes(b"there")
    os.symlink("target", place / "link")
    assert os.readlink(place / "link") == "target"
    assert (place / "link").read_bytes() == b"there"
    mount.end()
    mount.start()
    assert {one.name: one.is_symlink() for one in os.scandir(place)} == {
        "link": True,
        "target": False,
    }
    assert (place / "link").read_bytes() == b"there"


def test_the_status_tells_what_is_not_in_the_bucket(
    mount: Mount, place: Path, folder: Bucket
) -> None:
    # Without a child, whose copy of the descriptor would be closed, and the file uploaded.
    socket = registry.mount_directory(mount.path) / "status.sock"
    assert control.request(socket, "status", 10)["writing"]["pending"] == []
    with open(place / "late", "wb", buffering=0) as file:
        file.write(b"12345")
        status = control.request(socket, "status", 10)
        (pending,) = status["writing"]["pending"]
        assert (pending["key"], pending["bytes"]) == (f"{folder.prefix}late", 5)
        assert "late" in status_report.render(status)
    assert control.request(socket, "status", 10)["writing"]["pending_files"] == 0


@states("Special files, and hard links to directories, are refused with EPERM.")
@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda path: os.open(path / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY), errno.EEXIST),
        (lambda path: os.mkdir(path / "file"), errno.EEXIST),
        (lambda path: os.mkdir(path / "dir"), errno.EEXIST),
        (lambda path: os.unlink(path / "none"), errno.ENOENT),
        (lambda path: os.rmdir(path / "file"), errno.ENOTDIR),
        (lambda path: os.rmdir(path / "dir"), errno.ENOTEMPTY),
        (lambda path: os.rename(path / "none", path / "x"), errno.ENOENT),
        (lambda path: os.rename(path / "file", path / "dir"), errno.EISDIR),
        (lambda path: os.rename(path / "dir", path / "file"), errno.ENOTDIR),
        (lambda path: os.rename(path / "dir", path / "dir" / "x"), errno.EINVAL),
        (lambda path: os.link(path / "dir", path / "x"), errno.EPERM),
        (lambda path: os.mkfifo(path / "x"), errno.EPERM),
        (lambda path: os.readlink(path / "file"), errno.EINVAL),
        (lambda path: os.open(path / ("x" * 256), os.O_CREAT), errno.ENAMETOOLONG),
    ],
)
def test_what_cannot_be_done_is_reported(
    mount: Mount, shared: Bucket, call: Callable[[Path], object], number: int
) -> None:
    before = keys(shared)
    with pytest.raises(OSError, match=os.strerror(number)):
        call(mount.path)
    assert keys(shared) == before


@states("A file that is deleted while it is open can be used on, and is not uploaded.")
def test_a_file_that_is_unlinked_while_it_is_open_can_be_used_on(
    place: Path, folder: Bucket
) -> None:
    with open(place / "scratch", "w+b", buffering=0) as file:
        file.write(b"some")
        os.unlink(place / "scratch")
        assert os.listdir(place) == []
        file.write(b"thing")
        file.seek(0)
        assert file.read() == b"something"
    assert keys(folder) == []


@states("Whoever writes when the daemon dies sees a pause, and what was closed is in the bucket.")
def test_open_files_are_written_on_when_the_daemon_is_killed(
    mount: Mount, place: Path, folder: Bucket
) -> None:
    with open(place / "checkpoint", "wb", buffering=0) as file:
        for round in range(5):
            file.write(b"%d" % round * 100_000)
            kill_serving(mount)
        file.write(b"end")
    expected = b"".join(b"%d" % round * 100_000 for round in range(5)) + b"end"
    assert stored(folder, "checkpoint") == expected
    assert (place / "checkpoint").read_bytes() == expected
    until(lambda: keeper_status(mount)["pause_s"] == 0.0, "no daemon serves")
