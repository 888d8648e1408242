"""Directories as programs see them through a mount: listing and looking up.

What a listing tells for all keys and page sizes is in tests/unit/posix;
here are the kernel's part and the requests that it costs. What changes while
mounted is in test_directories_changing.py, which names there are in
test_names.py, who may do what in test_directories_permissions.py.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, new_bucket
from tests.support.servers.s3_server import S3Server
from tests.support.survival.mortal_mount import MortalMount, Process
from tests.support.survival.surviving import replace_daemon

NOBODY = 65534


# A bucket of which nothing changes, mounted once

KEYS = [
    "readme.txt",
    "a/one",
    "a/two",
    "a/deep/er/est",
    "a-b",
    "a.txt",
    "a0",
    "marker/",
    "marked/",
    "marked/with-a-file",
    *(f"many/file-{n:04d}" for n in range(60)),
    *(f"wide/{n:02d}/x" for n in range(20)),
]


@pytest.fixture(scope="module")
def still(s3: S3Server) -> Bucket:
    bucket = new_bucket(s3)
    for key in KEYS:
        bucket.put(key, key.encode() if not key.endswith("/") else b"")
    return bucket


@pytest.fixture(scope="module")
def tree(still: Bucket, module_mounter: Mounter) -> Mount:
    return module_mounter("--metadata-ttl", "indefinite", bucket=still)


@states("A directory is a common prefix: if there is an object `a/b`, there is a directory `a`.")
def test_a_walk_finds_exactly_the_buckets_keys(tree: Mount) -> None:
    found = {
        os.path.relpath(os.path.join(where, name), tree.path)
        for where, _, names in os.walk(tree.path)
        for name in names
    }
    assert found == {key for key in KEYS if not key.endswith("/")}


def test_a_listing_tells_directories_from_files(tree: Mount) -> None:
    kinds = {entry.name: entry.is_dir() for entry in os.scandir(tree.path)}
    directories = {"a", "marker", "marked", "many", "wide"}
    assert kinds == {key.split("/")[0]: key.split("/")[0] in directories for key in KEYS}


@states("An object whose key ends in `/` (a marker, as consoles make them) makes a directory.")
def test_a_marker_makes_a_directory_and_is_no_file_in_it(tree: Mount) -> None:
    assert (tree.path / "marker").is_dir()
    assert os.listdir(tree.path / "marker") == []
    assert os.listdir(tree.path / "marked") == ["with-a-file"]


@states(
    "`telldir` and `seekdir` go back to any place in an open directory; if somebody else has"
    " removed the entry there, up to a page of names is shown again."
)
def test_telldir_and_seekdir_go_back_to_any_place(
    mounter: Mounter, still: Bucket, tree: Mount
) -> None:
    """With an indefinite TTL the kernel keeps its answers, with one of 0 it looks up again."""
    for root in (tree.path, mounter("--metadata-ttl", "0s", bucket=still).path):
        with DirectoryStream(root / "many") as stream:
            places, names = [stream.tell()], []
            while (entry := stream.read()) is not None:
                names.append(entry[0])
                places.append(stream.tell())
            assert len(names) == 62
            for index in (0, 1, 2, 5, 40, 61, 17):
                stream.seek(places[index])
                assert stream.names() == names[index:]


@states(
    "The inode number of what this mount has not renamed or made anew is a hash of its path, the"
    " same at any time and on any machine."
)
def test_inode_numbers_are_these_wherever_it_is_mounted(tree: Mount) -> None:
    assert os.stat(tree.path / "a" / "one").st_ino == 4769999754316157558
    assert os.stat(tree.path / "a").st_ino == 6099252073710162996


@states("A lookup in a directory that has been listed costs no request while that is relied on.")
def test_lookups_in_a_listed_directory_cost_no_request(tree: Mount) -> None:
    names = os.listdir(tree.path / "many")
    tree.forget()
    before = tree.status()["s3"]
    for name in names:
        assert (tree.path / "many" / name).stat().st_size == len("many/" + name)
    after = tree.status()["s3"]
    assert (after["lists"], after["heads"]) == (before["lists"], before["heads"])


@states("The first lookup in a directory asks for a page of its neighbours too.")
def test_the_lookups_behind_the_first_in_a_directory_cost_no_request(
    mounter: Mounter, bucket: Bucket
) -> None:
    for n in range(50):
        bucket.put(f"d/f{n:02d}", b"x" * n)
    here = mounter("--metadata-ttl", "indefinite")
    directory = here.path / "d"
    assert (directory / "f10").stat().st_size == 10
    before = here.status()["s3"]
    for n in range(11, 50):
        assert (directory / f"f{n:02d}").stat().st_size == n
    after = here.status()["s3"]
    assert (after["lists"], after["heads"]) == (before["lists"], before["heads"])


@pytest.fixture(scope="module")
def writable(shared: Bucket, module_mounter: Mounter) -> Mount:
    for key in ("changed/d/file", "changed/e/other", "kept/d/file"):
        shared.put(key, b"x")
    return module_mounter("--session", "kernel", WRITABLE)


OLD_NS = 10**18


def moves(call: Callable[[], object], *directories: Path) -> bool:
    """True if a call gives all these directories the time of now."""
    for directory in directories:
        os.utime(directory, ns=(OLD_NS, OLD_NS))
        assert directory.stat().st_mtime_ns == OLD_NS
    before = time.time_ns()
    call()
    after = time.time_ns()
    found = [directory.stat() for directory in directories]
    assert all(one.st_mtime_ns == one.st_ctime_ns for one in found)
    moved = {before <= one.st_mtime_ns <= after for one in found}
    assert len(moved) == 1
    if moved == {False}:
        assert {one.st_mtime_ns for one in found} == {OLD_NS}
    return moved.pop()


def test_a_directorys_time_is_that_of_the_last_change_to_its_entries(writable: Mount) -> None:
    root = writable.path
    d, e = root / "changed/d", root / "changed/e"
    assert moves(lambda: (d / "new").write_bytes(b"x"), d)
    assert not moves(lambda: (d / "new").write_bytes(b"content"), d)
    assert not moves(lambda: (d / "new").chmod(0o600), d)
    assert not moves(lambda: (d / "new").read_bytes(), d)
    assert moves(lambda: (d / "sub").mkdir(), d)
    assert not moves(lambda: (d / "sub" / "below").write_bytes(b"x"), d)
    assert moves(lambda: os.symlink("new", d / "link"), d)
    assert moves(lambda: (d / "new").rename(d / "newer"), d)
    assert moves(lambda: (d / "newer").rename(e / "newer"), d, e)
    assert moves(lambda: (d / "sub").rename(e / "sub"), d, e)
    assert moves(lambda: (d / "link").unlink(), d)
    assert not moves(lambda: (e / "sub" / "below").unlink(), e)
    assert moves(lambda: (e / "sub").rmdir(), e)
    (root / "made").mkdir()
    assert root.stat().st_mtime_ns > OLD_NS


def test_a_directorys_time_outlives_the_daemon(writable: Mount) -> None:
    d = writable.path / "kept/d"
    # Another test may have the kernel drop what it remembers, but for what is open.
    held = os.open(d, os.O_RDONLY)
    try:
        (d / "new").write_bytes(b"x")
        (writable.path / "top").write_bytes(b"x")
        directories = (d, writable.path)
        before = [path.stat().st_mtime_ns for path in directories]
        replace_daemon(writable)
        (d / "new").chmod(0o600)
        assert [path.stat().st_mtime_ns for path in directories] == before
    finally:
        os.close(held)


async def shown_ns(process: Process, path: str) -> int:
    return process.operations.attributes(await process.node(path)).mtime_ns


@states(
    "The time of such a change lasts until the kernel forgets the directory, or the mount ends;"
    " then the directory has the earlier time again."
)
async def test_a_directory_that_was_forgotten_has_its_earlier_time(tmp_path: Path) -> None:
    mount = MortalMount(tmp_path)
    mount.store.put("d/file", b"x")
    async with mount.serving() as process:
        mounted_ns = process.operations.mounted_ns
        assert await shown_ns(process, "d") == mounted_ns
        await process.unlink("d/file")
        assert await shown_ns(process, "d") > mounted_ns
        directory = await process.node("d")
        process.operations.inodes.forget(directory.nodeid, directory.nlookup)
        assert process.operations.inodes.find(directory.nodeid) is None
        assert await shown_ns(process, "d") == mounted_ns
        await process.mkdir("d/new")
        assert await shown_ns(process, "d") > mounted_ns
    mount.reboot()
    async with mount.serving() as process:
        assert await shown_ns(process, "d") == process.operations.mounted_ns
