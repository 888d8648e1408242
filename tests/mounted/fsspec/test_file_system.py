"""`fusefs://bucket/key`: fsspec over real mounts."""

import errno
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import fsspec.tests.abstract as abstract
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fusefs.fsspec import FusefsFileSystem, NotMountedError
from fusefs.fsspec.mounts import BucketMounts
from fusefs.linux import mountinfo
from tests.support.mounting import WRITABLE, Mounter
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.s3_server import S3Server

# Names that something on the way could take for something else.
ODD = ("a b", "50%25", "x#y", "q?u", "st*r", "[1]", "ünï", "tab\tbed", "a=b,c")


class Keys(MemoryFileSystem):
    """Has all keys, also those that are no file names, as s3fs has them."""

    protocol = "keys"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    root_marker = ""


@pytest.fixture(scope="module")
def place(shared: Bucket, module_mounter: Mounter) -> tuple[str, Path]:
    """A bucket, and where it is mounted writable."""
    return shared.name, module_mounter(WRITABLE, "--durability", "local").path


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
        assert (file.name, file.size) == (str(path / "new/file.bin"), 10)
    assert fsspec.open_local(f"fusefs://{name}/new/file.bin") == str(path / "new/file.bin")
    with fsspec.open(f"fusefs://{name}/new/text", "wt", encoding="utf-8") as file:
        file.write("zwölf\n")
    with fsspec.open(f"fusefs://{name}/new/text", "rt", encoding="utf-8") as file:
        assert file.readlines() == ["zwölf\n"]
    fs = FusefsFileSystem()
    assert fs.isdir("")
    assert name in fs.ls("", detail=False)
    with pytest.raises(FileNotFoundError):
        fs.open(f"{name}/never/made", "r+b")
    assert not fs.exists(f"{name}/never")
    fs.pipe_file(f"{name}/lock", b"the first", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{name}/lock", b"the second", mode="create")


def test_odd_names_are_names(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for odd in (*ODD, "1", "star"):
        fs.pipe_file(f"{name}/odd/{odd}/{odd}", odd.encode())
        assert (path / "odd" / odd / odd).read_text() == odd
        assert fs.cat_file(f"fusefs://{name}/odd/{odd}/{odd}") == odd.encode()
    assert sorted(fs.find(f"{name}/odd")) == sorted(
        f"{name}/odd/{odd}/{odd}" for odd in (*ODD, "1", "star")
    )
    for key in (f"{name}/a//b", f"{name}/../x", f"{name}/./x"):
        assert not fs.exists(key)
        with pytest.raises(FileNotFoundError):
            fs.pipe_file(key, b"")
    # Where there is a file of that very name, a wildcard in it is none.
    fs.rm([f"{name}/odd/[1]", f"{name}/odd/st*r"], recursive=True)
    assert {"1", "star"} <= {one.name for one in (path / "odd").iterdir()}
    fs.rm(f"{name}/odd/s*r", recursive=True)
    assert not (path / "odd/star").exists()


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
    both = [f"{name}/ranges", f"{name}/none"]
    first, second = fs.cat_ranges(both, 0, 1)
    assert first == b"\0"
    assert isinstance(second, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(both, 0, 1, on_error="raise")
    with pytest.raises(FileNotFoundError):
        fs.cat(both)
    assert fs.cat(both, on_error="omit") == {both[0]: data}


def test_transaction_shows_all_files_or_none(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem(skip_instance_cache=True)
    with fs.transaction, fs.open(f"{name}/together/one", "wb") as file:
        file.write(b"1")
        assert not (path / "together/one").exists()
    assert (path / "together/one").read_bytes() == b"1"

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
    for change in (fs.rm, fs.rmdir, lambda root: fs.mv(root, f"{root}/below")):
        with pytest.raises(OSError, match="root of a mount"):
            change(name)
    assert (path / "stays").read_bytes() == b"1"


def test_removals_and_moves_leave_what_is_deeper(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for key in ("deep/a", "deep/z", "deep/s/b", "deep/s/t/c"):
        fs.pipe_file(f"{name}/{key}", key.encode())

    def files(directory: str) -> list[str]:
        below = path / directory
        return sorted(str(one.relative_to(below)) for one in below.rglob("*") if one.is_file())

    fs.mv(f"{name}/deep", f"{name}/moved", recursive=True, maxdepth=1)
    assert (files("deep"), files("moved")) == (["s/b", "s/t/c"], ["a", "z"])
    fs.rm(f"{name}/deep/s", recursive=True, maxdepth=1)
    assert files("deep") == ["s/t/c"]
    fs.mv(f"{name}/deep", f"{name}/moved")  # into the directory that is there
    assert files("moved") == ["a", "deep/s/t/c", "z"]
    fs.rm(f"{name}/moved/**", recursive=True)
    assert files("moved") == []


def test_move_that_the_mount_refuses_copies_nothing(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = place
    (path / "refused").write_bytes(b"1")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "S3 does not answer")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="S3 does not answer"):
        FusefsFileSystem().mv(f"{name}/refused", f"{name}/elsewhere")
    assert not (path / "elsewhere").exists()


def test_s3fs_has_what_no_mount_has(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = place
    fs, elsewhere = FusefsFileSystem(anon=True), "fusefs://other/d/x"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for look in (fs.exists, fs.isdir, fs.isfile, fs.ls, fs.find, fs.info):
        with pytest.raises(NotMountedError, match="fusefs mount s3://other DIRECTORY"):
            look(elsewhere)  # without s3fs it is not known to be missing
    monkeypatch.setitem(sys.modules, "s3fs", SimpleNamespace(S3FileSystem=Keys))
    fs.pipe_file(elsewhere, b"there")
    assert (fs.exists(elsewhere), fs.info(elsewhere)["size"]) == (True, 5)
    fs.pipe_file(f"{name}/here", b"here")
    assert fs.cat_ranges([f"{name}/here", elsewhere], 0, 2) == [b"he", b"th"]
    fs.cp_file(elsewhere, f"{name}/copied")
    assert fs.cat_file(f"{name}/copied") == b"there"
    # A key that no file name can express is not lost on the way.
    fs.pipe_file("fusefs://other/d//y", b"odd")
    with pytest.raises(OSError, match="no file name"):
        fs.mv("fusefs://other/d", f"{name}/taken", recursive=True)
    assert sorted(one.getvalue() for one in Keys.store.values()) == [b"odd", b"there"]


def test_a_mount_of_another_endpoint_is_not_the_bucket(
    place: tuple[str, Path], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = place
    for given in ({"endpoint_url": s3.endpoint_url}, {}):
        assert FusefsFileSystem(**given).local_path(f"{name}/x") == str(path / "x")
    elsewhere = "https://minio.example"
    for given in ({"endpoint_url": elsewhere}, {"client_kwargs": {"endpoint_url": elsewhere}}):
        with pytest.raises(NotMountedError):
            FusefsFileSystem(**given).local_path(f"{name}/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", elsewhere)
    with pytest.raises(NotMountedError):
        FusefsFileSystem(use_ssl=True).local_path(f"{name}/x")


def test_longest_prefix_and_the_writable_mount_serve(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("pre/object", b"one")
    all_of_it = mounter()
    fs = FusefsFileSystem()
    assert fs.local_path(f"{bucket.name}/pre/object") == f"{all_of_it.path}/pre/object"
    with pytest.raises(OSError, match="read-only"):
        fs.pipe_file(f"{bucket.name}/pre/new", b"2")
    part = mounter("--no-read-only", prefix="pre/", cache="other")
    assert fs.local_path(f"{bucket.name}/pre/object") == f"{part.path}/object"
    fs.pipe_file(f"{bucket.name}/pre/new", b"2")
    assert stored(bucket, "pre/new") == b"2"
    part.end()
    # The directory below is not the bucket's.
    with pytest.raises(OSError, match="read-only"):
        fs.pipe_file(f"{bucket.name}/pre/later", b"3")
    assert not list(part.path.iterdir())
    assert keys(bucket) == ["pre/new", "pre/object"]


@pytest.mark.parametrize(("owner", "is_believed"), [(0, True), (1000, True), (1001, False)])
def test_another_users_mount_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, owner: int, *, is_believed: bool
) -> None:
    """Any user can mount what says that it is a bucket."""
    options = f"rw,user_id={owner},group_id=0,default_permissions,allow_other"
    table = f"40 1 0:40 / /mnt/a rw - fuse.fusefs s3://some-bucket {options}\n"
    mounts = BucketMounts()
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: os.stat("/proc/nothing"))
    with pytest.raises(FileNotFoundError):
        mounts.all()
    # After an error the table is read again.
    monkeypatch.setattr(mountinfo, "kernel_mounts", lambda: mountinfo.parse(table))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [place.directory for place in mounts.all()] == ["/mnt/a"] * is_believed


@pytest.mark.root
def test_what_covers_a_mount_is_not_taken_for_it(mounter: Mounter, bucket: Bucket) -> None:
    mount = mounter("--no-read-only")
    fs, name = FusefsFileSystem(), bucket.name
    fs.pipe({f"{name}/a": b"1", f"{name}/below/in/b": b"2"})
    for covered in (mount.path / "below/in", mount.path):
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", covered], check=False).returncode:
            pytest.skip("this container may not mount a tmpfs")
        try:
            (covered / "foreign").write_bytes(b"")
            with pytest.raises(NotMountedError):
                fs.pipe_file(f"{name}/below/in/c", b"3")
            if covered != mount.path:
                assert fs.find(name) == [f"{name}/a"]
                with pytest.raises(OSError, match="mounted"):
                    fs.rm(f"{name}/below", recursive=True)
            assert [one.name for one in covered.iterdir()] == ["foreign"]
        finally:
            subprocess.run(["umount", covered], check=True)
    assert fs.find(name) == [f"{name}/a", f"{name}/below/in/b"]


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


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self) -> FusefsFileSystem:
        return FusefsFileSystem()

    @pytest.fixture
    def fs_path(self, place: tuple[str, Path]) -> Iterator[str]:
        path = f"{place[0]}/of one test"
        yield path
        fs = FusefsFileSystem()
        if fs.exists(path):
            fs.rm(path, recursive=True)


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGet(Fixtures, abstract.AbstractGetTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    pass


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass
