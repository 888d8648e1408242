"""`fusefs://bucket/key`: fsspec over real mounts."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fusefs.fsspec import VARIABLE, FusefsFileSystem, NotMountedError, install, uninstall
from fusefs.fsspec.mounts import BucketMounts
from fusefs.linux import mountinfo
from tests.support import sharing
from tests.support.mounting import Mounter, fusefs
from tests.support.servers.buckets import Bucket, keys, new_bucket, stored
from tests.support.servers.s3_server import S3Server

# Names that something on the way could take for something else.
ODD = ("a b", "50%25", "x#y", "q?u", "st*r", "[1]", "ünï", "tab\tbed", "a=b,c")


@pytest.fixture(scope="module")
def place(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A bucket, and where it is mounted writable."""
    bucket = new_bucket(s3)
    directory = tmp_path_factory.mktemp("fsspec")
    options = ("--no-read-only", "--durability", "local")
    with sharing.mounted(s3, f"s3://{bucket.name}/", directory, *options) as mount:
        yield bucket.name, mount.path


def test_url_opens_a_real_file(place: tuple[str, Path]) -> None:
    name, path = place
    with fsspec.open(f"fusefs://{name}/new/file.bin", "wb") as file:
        file.write(b"0123456789")
        file.flush()
        os.fsync(file.fileno())
    assert (path / "new/file.bin").read_bytes() == b"0123456789"
    with fsspec.open(f"fusefs://{name}/new/file.bin") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[3:6] == b"345"
        assert file.name == str(path / "new/file.bin")
    assert fsspec.open_local(f"fusefs://{name}/new/file.bin") == str(path / "new/file.bin")
    with fsspec.open(f"fusefs://{name}/new/text", "wt", encoding="utf-8") as file:
        file.write("zwölf\n")
    with fsspec.open(f"fusefs://{name}/new/text", "at", encoding="utf-8") as file:
        file.write("dreizehn\n")
    with fsspec.open(f"fusefs://{name}/new/text", "rt", encoding="utf-8") as file:
        assert file.readlines() == ["zwölf\n", "dreizehn\n"]


def test_odd_names_are_names(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for odd in ODD:
        fs.pipe_file(f"{name}/odd/{odd}/{odd}", odd.encode())
        assert (path / "odd" / odd / odd).read_text() == odd
        assert fs.cat_file(f"fusefs://{name}/odd/{odd}/{odd}") == odd.encode()
    assert fs.ls(f"{name}/odd", detail=False) == sorted(f"{name}/odd/{odd}" for odd in ODD)
    assert sorted(fs.find(f"{name}/odd")) == sorted(f"{name}/odd/{odd}/{odd}" for odd in ODD)
    for key in (f"{name}/a//b", f"{name}/../x", f"{name}/./x"):
        assert not fs.exists(key)
        with pytest.raises(FileNotFoundError):
            fs.pipe_file(key, b"")


def test_many_ranges_of_a_file_open_it_as_often_as_threads_read_it(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = place
    for file in ("many", "few"):
        (path / file).write_bytes(bytes(range(256)) * 40)
    opened: list[str] = []
    real = os.open

    def note(local: str, *args: Any, **kwargs: Any) -> int:
        opened.append(str(local))
        return real(local, *args, **kwargs)

    monkeypatch.setattr(os, "open", note)
    names = [f"{name}/many"] * 1000 + [f"{name}/few"]
    found = FusefsFileSystem().cat_ranges(names, [n % 256 for n in range(1001)], 256)
    assert found == [bytes(range(n % 256, 256)) for n in range(1001)]
    assert [opened.count(str(path / file)) for file in ("many", "few")] == [32, 1]


def test_ranges_come_in_order_and_errors_where_they_are_wanted(place: tuple[str, Path]) -> None:
    name, path = place
    data = bytes(range(256)) * 4096
    (path / "ranges").write_bytes(data)
    fs = FusefsFileSystem()
    starts = [number * 1000 for number in range(100)]
    ends = [start + 500 for start in starts]
    found = fs.cat_ranges([f"{name}/ranges"] * 100, starts, ends)
    assert found == [data[start : start + 500] for start in starts]
    assert fs.cat_ranges([f"{name}/ranges"], -10, None) == [data[-10:]]
    assert fs.cat_file(f"{name}/ranges", len(data) - 1, len(data) + 100) == data[-1:]
    missing = fs.cat_ranges([f"{name}/ranges", f"{name}/none"], 0, 1)
    assert missing[0] == b"\0"
    assert isinstance(missing[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{name}/ranges", f"{name}/none"], 0, 1, on_error="raise")
    wrong = fs.cat_ranges([f"{name}/ranges"] * 2, [0, "one"], 2)
    assert wrong[0] == data[:2]
    assert isinstance(wrong[1], TypeError)
    both = [f"{name}/ranges", f"{name}/none"]
    with pytest.raises(FileNotFoundError):
        fs.cat(both)
    assert fs.cat(f"{name}/ranges") == data


def test_facts_are_those_of_the_object(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    fs.pipe_file(f"{name}/facts/file", b"12345")
    fusefs("sync", path)
    info = fs.info(f"{name}/facts/file")
    assert (info["name"], info["size"], info["type"]) == (f"{name}/facts/file", 5, "file")
    assert info["ETag"] == os.getxattr(path / "facts/file", "user.s3.etag").decode()
    key = fs.ukey(f"{name}/facts/file")
    assert key == fs.ukey(f"{name}/facts/file")
    fs.pipe_file(f"{name}/facts/file", b"54321")
    fusefs("sync", path)
    assert fs.ukey(f"{name}/facts/file") != key
    assert fs.info(f"{name}/facts")["type"] == "directory"
    assert fs.info("")["type"] == "directory"
    assert name in fs.ls("", detail=False)
    assert fs.glob(f"fusefs://{name}/facts/f*") == [f"{name}/facts/file"]


def test_transaction_shows_all_files_or_none(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem(skip_instance_cache=True)
    with fs.transaction, fs.open(f"{name}/together/one", "wb") as file:
        file.write(b"1")
        assert not (path / "together/one").exists()
    assert [one.name for one in (path / "together").iterdir()] == ["one"]

    def fail() -> None:
        with fs.transaction:
            with fs.open(f"{name}/together/two", "wb") as file:
                file.write(b"2")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError):
        fail()
    assert [one.name for one in (path / "together").iterdir()] == ["one"]


def test_root_of_a_mount_is_neither_removed_nor_renamed(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    (path / "stays").write_bytes(b"1")
    for change in (
        lambda: fs.rm(name, recursive=True),
        lambda: fs.rmdir(name),
        lambda: fs.mv(name, f"{name}/below", recursive=True),
    ):
        with pytest.raises(OSError, match="root of a mount") as raised:
            change()
        assert raised.value.errno == errno.EBUSY
    assert (path / "stays").read_bytes() == b"1"
    fs.makedirs(f"{name}/folder/below")
    with pytest.raises(IsADirectoryError):
        fs.rm(f"{name}/folder")
    fs.rm(f"{name}/folder", recursive=True)
    assert not (path / "folder").exists()


def test_what_no_mount_has_is_an_error_and_not_missing(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fs = FusefsFileSystem()
    for look in (fs.exists, fs.isdir, fs.isfile, fs.ls, fs.find, fs.info):
        with pytest.raises(NotMountedError, match="fusefs mount s3://no-such-bucket DIRECTORY"):
            look("fusefs://no-such-bucket/key")
    monkeypatch.setenv(VARIABLE, f"s3://no-such-bucket={tmp_path}")
    for path in (tmp_path / "missing", Path("/usr")):
        monkeypatch.setenv(VARIABLE, f"s3://no-such-bucket={path}")
        for _ in range(2):
            with pytest.raises(NotMountedError, match="nothing is mounted at"):
                fs.exists("no-such-bucket/key")
    monkeypatch.setenv(VARIABLE, f"no-such-bucket={tmp_path}")
    with pytest.raises(ValueError, match="is not s3://BUCKET"):
        fs.exists("no-such-bucket/key")


def test_variable_names_places_that_a_pod_has(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = place
    (path / "sub").mkdir(exist_ok=True)
    (path / "sub/named").write_bytes(b"here")
    monkeypatch.setenv(VARIABLE, f"s3://alias/pre={path}/sub, s3://alias={path}")
    fs = FusefsFileSystem()
    assert fs.cat_file("fusefs://alias/pre/named") == b"here"
    assert fs.cat_file("fusefs://alias/sub/named") == b"here"


def test_longest_prefix_and_the_writable_mount_serve(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("pre/object", b"one")
    all_of_it = mounter()
    fs = FusefsFileSystem()
    assert fs.local_path(f"{bucket.name}/pre/object") == f"{all_of_it.path}/pre/object"
    with pytest.raises(OSError, match="read-only") as raised:
        fs.pipe_file(f"{bucket.name}/pre/new", b"2")
    assert raised.value.errno == errno.EROFS
    part = mounter("--no-read-only", prefix="pre/", cache="other")
    assert fs.local_path(f"{bucket.name}/pre/object") == f"{part.path}/object"
    fs.pipe_file(f"{bucket.name}/pre/new", b"2")
    assert stored(bucket, "pre/new") == b"2"
    part.end()
    # The directory below is not the bucket's.
    with pytest.raises(OSError, match="read-only"):
        fs.pipe_file(f"{bucket.name}/pre/later", b"3")
    assert not list(part.path.iterdir())
    all_of_it.end()
    with pytest.raises(NotMountedError):
        fs.exists(f"{bucket.name}/pre/object")
    assert keys(bucket) == ["pre/new", "pre/object"]


def test_named_place_that_is_unmounted_is_not_used(
    mounter: Mounter, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mounter("--no-read-only")
    monkeypatch.setenv(VARIABLE, f"s3://named={mount.path}")
    fs = FusefsFileSystem()
    fs.pipe_file("named/a", b"1")
    assert stored(bucket, "a") == b"1"
    mount.end()
    is_own_disk = os.stat(mount.path).st_dev == os.stat("/").st_dev
    for _ in range(2 if is_own_disk else 0):
        with pytest.raises(NotMountedError):
            fs.pipe_file("named/b", b"2")
    assert is_own_disk is False or not list(mount.path.iterdir())


@pytest.mark.parametrize(("owner", "is_believed"), [(0, True), (1000, True), (1001, False)])
def test_another_users_mount_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, owner: int, *, is_believed: bool
) -> None:
    """Any user can mount what says that it is a bucket."""
    options = f"rw,user_id={owner},group_id=0,default_permissions,allow_other"
    table = f"40 1 0:40 / /mnt/a rw - fuse.fusefs s3://some-bucket {options}\n"
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(table))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [place.directory for place in BucketMounts().all()] == ["/mnt/a"] * is_believed


@pytest.mark.root
def test_what_covers_a_mount_is_not_taken_for_it(mounter: Mounter, bucket: Bucket) -> None:
    mount = mounter("--no-read-only")
    fs = FusefsFileSystem()
    fs.pipe({f"{bucket.name}/a": b"1", f"{bucket.name}/below/b": b"2"})
    with _tmpfs(mount.path / "below"):
        assert fs.find(bucket.name) == [f"{bucket.name}/a"]
        with pytest.raises(NotMountedError):
            fs.pipe_file(f"{bucket.name}/below/c", b"3")
        assert not list((mount.path / "below").iterdir())
    with _tmpfs(mount.path):
        for name in ("a", "c"):
            with pytest.raises(NotMountedError):
                fs.pipe_file(f"{bucket.name}/{name}", b"3")
        assert not list(mount.path.iterdir())
    assert fs.find(bucket.name) == [f"{bucket.name}/a", f"{bucket.name}/below/b"]
    assert [key for key in keys(bucket) if not key.endswith("/")] == ["a", "below/b"]


@contextlib.contextmanager
def _tmpfs(path: Path) -> Iterator[None]:
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


class Versioned(MemoryFileSystem):
    """With parameters in s3fs' order."""

    protocol = "versioned"
    store: ClassVar[dict[str, object]] = {}

    def cat_file(
        self,
        path: str,
        version_id: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> bytes:
        assert version_id is None
        content: bytes = super().cat_file(path, start, end)
        return content


def test_fallback_gets_ranges_by_their_names() -> None:
    fsspec.register_implementation("versioned", Versioned, clobber=True)
    fs = FusefsFileSystem(fallback="versioned")
    fs.pipe_file("elsewhere/key", b"there")
    assert fs.cat_ranges(["elsewhere/key"] * 2, [0, 1], [2, 3]) == [b"th", b"he"]


def test_fallback_takes_urls_and_has_times() -> None:
    memory = fsspec.filesystem("memory")
    fs = FusefsFileSystem(fallback="memory")
    url = "fusefs://faraway/dir/key"
    fs.pipe_file(url, b"there")
    assert memory.cat_file("/faraway/dir/key") == b"there"
    assert fs.cat_file(url) == fs.cat(url) == b"there"
    assert fs.info(url)["size"] == 5
    assert fs.ls("fusefs://faraway/dir", detail=False) == ["/faraway/dir/key"]
    assert fs.modified(url) == memory.modified("/faraway/dir/key")
    assert fs.created(url) == memory.created("/faraway/dir/key")
    fs.rm_file(url)
    assert not memory.exists("/faraway/dir/key")


def test_fallback_has_what_is_not_mounted(place: tuple[str, Path]) -> None:
    name, _ = place
    memory = fsspec.filesystem("memory")
    fs = FusefsFileSystem(fallback="memory")
    fs.pipe_file("elsewhere/key", b"there")
    assert memory.cat_file("/elsewhere/key") == b"there"
    assert fs.cat_file("elsewhere/key") == b"there"
    assert fs.exists("elsewhere/key")
    fs.pipe_file(f"{name}/here", b"here")
    assert fs.cat_ranges([f"{name}/here", "elsewhere/key"], 0, 2) == [b"he", b"th"]
    fs.mv("elsewhere/key", f"{name}/moved")
    assert fs.cat_file(f"{name}/moved") == b"there"
    assert not memory.exists("/elsewhere/key")


def test_s3_urls_are_taken_over_and_given_back(place: tuple[str, Path]) -> None:
    name, path = place
    (path / "url").write_bytes(b"mounted")
    before = dict(fsspec.registry)
    install()
    try:
        with fsspec.open(f"s3://{name}/url", anon=True, client_kwargs={}) as file:
            assert file.read() == b"mounted"
        fs, (found,) = fsspec.url_to_fs(f"s3a://{name}/url")[0], [f"{name}/url"]
        assert fs.cat_file(found) == b"mounted"
    finally:
        uninstall()
    assert dict(fsspec.registry) == before


def test_another_process_finds_the_mounts_anew(place: tuple[str, Path]) -> None:
    name, path = place
    (path / "forked").write_bytes(b"seen")
    fs = FusefsFileSystem()
    assert fs.cat_file(f"{name}/forked") == b"seen"
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat_file(f"{name}/forked") == b"seen"
    child = os.fork()
    if not child:
        is_right = False
        try:
            is_right = fs.cat_ranges([f"{name}/forked"] * 3, 0, 4) == [b"seen"] * 3
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
