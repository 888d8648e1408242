"""What is written here reads right in other programs, and what they write reads right here."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import Mount
from tests.support.programs import mounted, need, run
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.writing import all_sent

TIME_NS = 1_400_000_000_987_654_321


@pytest.fixture
def mount(bucket: Bucket, tmp_path: Path) -> Iterator[Mount]:
    with mounted(bucket, tmp_path / "ours") as mount:
        yield mount


@contextlib.contextmanager
def by_s3fs(bucket: Bucket, directory: Path) -> Iterator[Path]:
    """The bucket as s3fs shows it."""
    need("s3fs")
    password, path = directory / "password", directory / "s3fs"
    password.write_text(f"{ACCESS_KEY}:{SECRET_KEY}")
    password.chmod(0o600)
    path.mkdir()
    options = f"passwd_file={password},url={bucket.server.endpoint_url},use_path_request_style"
    run("s3fs", bucket.name, path, "-o", f"{options},use_xattr,stat_cache_expire=1")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def make(root: Path) -> None:
    """A directory with a file of a mode, an owner, a time and an attribute, and a link to it."""
    directory = root / "directory"
    directory.mkdir(mode=0o750)
    (directory / "file").write_bytes(b"content")
    os.chown(directory / "file", 12, 34)
    os.chmod(directory / "file", 0o640)
    os.setxattr(directory / "file", "user.color", b"red")
    os.utime(directory / "file", ns=(TIME_NS, TIME_NS))
    os.symlink("file", directory / "link")


def check(root: Path) -> None:
    directory = root / "directory"
    found = (directory / "file").stat()
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert (found.st_uid, found.st_gid, found.st_mtime_ns) == (12, 34, TIME_NS)
    assert os.getxattr(directory / "file", "user.color") == b"red"
    assert os.readlink(directory / "link") == "file"
    assert (directory / "link").read_bytes() == b"content"
    assert sorted(os.listdir(directory)) == ["file", "link"]


def test_s3fs_reads_what_was_written_here(mount: Mount, bucket: Bucket, tmp_path: Path) -> None:
    make(mount.path)
    all_sent(mount)
    with by_s3fs(bucket, tmp_path) as path:
        check(path)


def test_what_s3fs_has_written_is_read_here(mount: Mount, bucket: Bucket, tmp_path: Path) -> None:
    with by_s3fs(bucket, tmp_path) as path:
        make(path)
    check(mount.path)


def test_rclone_knows_owners_and_times(mount: Mount, bucket: Bucket) -> None:
    rclone = need("rclone")
    make(mount.path)
    all_sent(mount)
    settings = {
        "TYPE": "s3",
        "PROVIDER": "SeaweedFS",
        "ENDPOINT": bucket.server.endpoint_url,
        "ACCESS_KEY_ID": ACCESS_KEY,
        "SECRET_ACCESS_KEY": SECRET_KEY,
    }
    environment = {f"RCLONE_CONFIG_S_{name}": value for name, value in settings.items()}
    listed = run(
        rclone,
        "lsjson",
        "--recursive",
        "--metadata",
        "--files-only",
        f"S:{bucket.name}",
        RCLONE_CONFIG=os.devnull,
        AWS_CA_BUNDLE="",
        **environment,
    )
    (record,) = [one for one in json.loads(listed) if one["Path"] == "directory/file"]
    assert record["ModTime"] == "2014-05-13T16:53:20.987654321Z"
    assert (record["Metadata"]["uid"], record["Metadata"]["gid"]) == ("12", "34")
