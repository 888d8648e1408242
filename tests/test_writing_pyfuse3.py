"""Writing under the pyfuse3 session: each request once, and what its daemon's end leaves behind."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.buckets import Bucket
from tests.support.mounting import Mount, Mounter
from tests.support.s3_server import S3Server
from tests.support.sharing import mounted, until
from tests.support.writing import WRITABLE, cost, metadata, status, stored

OPTIONS = ("--session", "pyfuse3", WRITABLE)


@pytest.fixture(scope="module")
def mount(
    s3: S3Server, shared: Bucket, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mount]:
    shared.put("there/link", b"file", Metadata={"mode": str(stat.S_IFLNK | 0o777)})
    shared.put("there/file", b"x", Metadata={"mode": str(stat.S_IFREG | 0o604), "uid": "7"})
    directory = tmp_path_factory.mktemp("pyfuse3")
    with mounted(s3, f"s3://{shared.name}/", directory, *OPTIONS) as mount:
        yield mount


def test_a_file_is_written_read_edited_and_appended_to(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "file"
    content = os.urandom(3_000_000)
    path.write_bytes(content)
    assert path.read_bytes() == stored(shared, "file") == content
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"edited")
    with open(path, "ab") as file:
        file.write(b"end")
    content = content[:1000] + b"edited" + content[1006:] + b"end"
    assert path.read_bytes() == stored(shared, "file") == content
    os.truncate(path, 500)
    assert path.read_bytes() == stored(shared, "file") == content[:500]


def test_fsync_brings_a_file_into_the_bucket(mount: Mount, shared: Bucket) -> None:
    with open(mount.path / "log", "wb", buffering=0) as file:
        file.write(b"one")
        os.fsync(file.fileno())
        assert stored(shared, "log") == b"one"
        file.write(b"two")
    assert stored(shared, "log") == b"onetwo"


def test_a_directory_is_made_filled_renamed_and_removed(mount: Mount, shared: Bucket) -> None:
    run = mount.path / "run"
    (run / "sub").mkdir(parents=True)
    for number in range(40):
        (run / "sub" / f"{number:02}").write_bytes(b"%d" % number)
    run.rename(mount.path / "moved")
    moved = mount.path / "moved" / "sub"
    assert sorted(os.listdir(moved)) == [f"{number:02}" for number in range(40)]
    assert (moved / "07").read_bytes() == stored(shared, "moved/sub/07") == b"7"
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        moved.rmdir()
    shutil.rmtree(mount.path / "moved")
    assert not (mount.path / "moved").exists()


def test_a_listing_shows_links_and_modes(mount: Mount) -> None:
    with os.scandir(mount.path / "there") as entries:
        found = {entry.name: (entry.is_symlink(), entry.stat().st_uid) for entry in entries}
    assert found == {"file": (False, 7), "link": (True, 7)}
    assert os.readlink(mount.path / "there" / "link") == "file"


def test_attributes_are_set_and_kept(mount: Mount, shared: Bucket) -> None:
    path = mount.path / "attributes"
    path.write_bytes(b"x")
    os.chmod(path, 0o640)
    os.chown(path, 3, 4)
    os.utime(path, ns=(1, 10**18 + 7))
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 3, 4)
    assert found.st_mtime_ns == 10**18 + 7
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


def test_a_link_is_made_and_followed(mount: Mount) -> None:
    (mount.path / "target").write_bytes(b"there")
    os.symlink("target", mount.path / "link")
    assert (mount.path / "link").read_bytes() == b"there"


def test_an_unlinked_file_is_used_on(mount: Mount) -> None:
    with open(mount.path / "scratch", "w+b", buffering=0) as file:
        file.write(b"some")
        os.unlink(mount.path / "scratch")
        file.write(b"thing")
        assert os.pread(file.fileno(), 100, 0) == b"something"
        assert not (mount.path / "scratch").exists()


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda path: os.open(path / "exists", os.O_CREAT | os.O_EXCL), errno.EEXIST),
        (lambda path: os.mkdir(path / "exists"), errno.EEXIST),
        (lambda path: os.unlink(path / "none"), errno.ENOENT),
        (lambda path: os.rmdir(path / "exists"), errno.ENOTDIR),
        (lambda path: os.rename(path / "none", path / "x"), errno.ENOENT),
        (lambda path: os.link(path / "exists", path / "x"), errno.EPERM),
        (lambda path: os.mkfifo(path / "x"), errno.EPERM),
        (lambda path: os.readlink(path / "exists"), errno.EINVAL),
    ],
)
def test_what_cannot_be_done_is_said(
    mount: Mount, call: Callable[[Path], object], number: int
) -> None:
    (mount.path / "exists").touch()
    with pytest.raises(OSError, match=os.strerror(number)):
        call(mount.path)


def test_what_was_closed_is_uploaded_by_the_next_mount(mounter: Mounter, bucket: Bucket) -> None:
    """With local durability a close returns before the bucket has the file."""
    mount = mounter(*OPTIONS, "--durability", "local")
    (mount.path / "file").write_bytes(b"kept")
    mount.kill()
    mount.start()
    until(lambda: status(mount)["writing"]["pending_files"] == 0, "the file is uploaded")
    assert stored(bucket, "file") == b"kept"
    assert (mount.path / "file").read_bytes() == b"kept"
