"""Attributes under the pyfuse3 session, and what its daemon's end leaves behind."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

import pytest

from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import mounted
from tests.support.waiting import until
from tests.support.writing import WRITABLE, all_sent, cost, metadata, status

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


@states("Under `--session pyfuse3` the names of a link are files by themselves from the start.")
def test_a_file_gets_a_second_name(mount: Mount, shared: Bucket) -> None:
    (mount.path / "first").write_bytes(b"content")
    os.link(mount.path / "first", mount.path / "second")
    assert (mount.path / "second").read_bytes() == b"content"
    assert stored(shared, "second") == b"content"
    assert not os.path.samefile(mount.path / "first", mount.path / "second")
    with pytest.raises(FileExistsError):
        os.link(mount.path / "first", mount.path / "second")


def test_what_was_closed_is_uploaded_by_the_next_mount(mounter: Mounter, bucket: Bucket) -> None:
    """With local durability a close returns before the bucket has the file."""
    mount = mounter(*OPTIONS, "--durability", "local")
    (mount.path / "file").write_bytes(b"kept")
    mount.kill()
    mount.start()
    until(lambda: status(mount)["writing"]["pending_files"] == 0, "the file is uploaded")
    assert stored(bucket, "file") == b"kept"
    assert (mount.path / "file").read_bytes() == b"kept"
