"""What fsspec's calls must leave alone: other names, other mounts, what two write at once."""

from __future__ import annotations

import errno
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from fusefs.fsspec import FusefsFileSystem
from fusefs.fsspec.filesystem import UncommittedFile
from tests.support import sharing
from tests.support.servers.buckets import new_bucket
from tests.support.servers.s3_server import S3Server


@pytest.fixture(scope="module")
def place(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A bucket, and where it is mounted writable."""
    bucket = new_bucket(s3)
    directory = tmp_path_factory.mktemp("fsspec-stays")
    options = ("--no-read-only", "--durability", "local")
    with sharing.mounted(s3, f"s3://{bucket.name}/", directory, *options) as mount:
        yield bucket.name, mount.path


def test_file_that_is_copied_to_itself_stays(place: tuple[str, Path]) -> None:
    name, path = place
    (path / "weights").write_bytes(b"precious")
    (path / "link").symlink_to("weights")
    fs = FusefsFileSystem()
    for copied in ("weights", "link"):
        with pytest.raises(OSError, match="same file"):
            fs.cp_file(f"{name}/{copied}", f"{name}/weights")
    fs.copy(f"{name}/weights", f"{name}/other")
    assert (path / "weights").read_bytes() == b"precious" == (path / "other").read_bytes()


@pytest.mark.root
def test_removal_of_a_directory_ends_before_what_is_mounted_in_it(
    place: tuple[str, Path], tmp_path: Path
) -> None:
    name, path = place
    (path / "run/scratch").mkdir(parents=True)
    (path / "run/a").write_bytes(b"1")
    (tmp_path / "foreign").write_bytes(b"of another disk")
    if subprocess.run(["mount", "--bind", tmp_path, path / "run/scratch"]).returncode:
        pytest.skip("this container may not mount")
    try:
        fs = FusefsFileSystem()
        with pytest.raises(OSError, match="mounted"):
            fs.rm(f"{name}/run", recursive=True)
        assert (tmp_path / "foreign").read_bytes() == b"of another disk"
    finally:
        subprocess.run(["umount", path / "run/scratch"], check=True)
    fs.rm(f"{name}/run", recursive=True)
    assert not (path / "run").exists()


def test_links_are_shown_and_those_to_directories_are_not_followed(
    place: tuple[str, Path],
) -> None:
    name, path = place
    (path / "links/below").mkdir(parents=True)
    (path / "links/below/file").write_bytes(b"12")
    for link, target in (
        ("up", "."),
        ("back", "."),
        ("file", "below/file"),
        ("nowhere", "missing"),
        ("itself", "itself"),
    ):
        (path / "links" / link).symlink_to(target)
    fs = FusefsFileSystem()
    kinds = {one["name"].rpartition("/")[2]: one["type"] for one in fs.ls(f"{name}/links")}
    assert kinds == {"below": "directory", "up": "other", "back": "other", "file": "file"}
    found = [f"{name}/links/{one}" for one in ("back", "below/file", "file", "up")]
    assert fs.find(f"{name}/links") == found
    assert fs.exists(f"{name}/links/itself")
    assert fs.info(f"{name}/links/up")["type"] == "directory"
    assert fs.info(f"{name}/links/file")["size"] == 2


def test_of_two_that_create_a_file_one_gets_it(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, path = place
    fs = FusefsFileSystem()
    (tmp_path / "mine").write_bytes(b"mine")
    (path / "lock").write_bytes(b"the other's")
    # The other one was not there yet when it was looked for.
    monkeypatch.setattr(FusefsFileSystem, "exists", lambda *_args, **_named: False)
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{name}/lock", b"mine", mode="create")
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "mine"), f"{name}/lock", mode="create")
    assert (path / "lock").read_bytes() == b"the other's"
    fs.pipe_file(f"{name}/locks/new", b"mine", mode="create")
    assert (path / "locks/new").read_bytes() == b"mine"


def test_of_two_transactions_that_create_a_file_one_gets_it(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = place
    fs = FusefsFileSystem(skip_instance_cache=True)

    def both() -> None:
        with fs.transaction:
            with fs.open(f"{name}/commits/one", "xb") as file:
                file.write(b"mine")
            (path / "commits/one").write_bytes(b"the other's")
            monkeypatch.setattr(os.path, "lexists", lambda _path: False)

    with pytest.raises(FileExistsError):
        both()
    monkeypatch.undo()
    assert [one.name for one in (path / "commits").iterdir()] == ["one"]
    assert (path / "commits/one").read_bytes() == b"the other's"


def test_what_was_not_committed_goes_though_it_cannot_be_written(
    tmp_path: Path,
) -> None:
    file = UncommittedFile(str(tmp_path / "new"), is_exclusive=False)
    file.write(b"1")
    os.close(file.fileno())  # what is buffered can't be written any more
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.discard()
    assert not list(tmp_path.iterdir())


def test_files_have_a_size_and_blocks(place: tuple[str, Path]) -> None:
    name, path = place
    (path / "lines").write_bytes(b"one\ntwo\nthree\n")
    fs = FusefsFileSystem()
    with fs.open(f"{name}/lines") as file:
        assert file.size == 14
        assert isinstance(file, io.BufferedReader)
    assert fs.read_block(f"{name}/lines", 1, 4, delimiter=b"\n") == b"two\n"
    assert fs.read_block(f"{name}/lines", 4, None) == b"two\nthree\n"
    assert fs.tail(f"{name}/lines", 6) == b"three\n"


def test_name_with_a_wildcard_means_itself_where_there_is_such_a_file(
    place: tuple[str, Path],
) -> None:
    name, path = place
    (path / "wild").mkdir()
    for odd in ("[1]", "1", "st*r", "star"):
        (path / "wild" / odd).write_bytes(odd.encode())
    fs = FusefsFileSystem()
    assert fs.cat(f"{name}/wild/[1]") == b"[1]"
    fs.rm(f"{name}/wild/[1]")
    fs.rm([f"{name}/wild/st*r"])
    assert sorted(one.name for one in (path / "wild").iterdir()) == ["1", "star"]
    fs.rm(f"{name}/wild/s*r")
    assert [one.name for one in (path / "wild").iterdir()] == ["1"]


def test_file_that_is_missing_makes_no_directory(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for mode in ("r+b", "rb"):
        with pytest.raises(FileNotFoundError):
            fs.open(f"{name}/never/made", mode)
    assert not (path / "never").exists()


def test_move_that_the_mount_refuses_copies_nothing(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = place
    (path / "moved").mkdir()
    (path / "moved/a").write_bytes(b"1")
    fs = FusefsFileSystem()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "S3 does not answer")

    monkeypatch.setattr(os, "rename", refuse)
    for source, target in (("moved/a", "b"), ("moved", "elsewhere")):
        with pytest.raises(OSError, match="S3 does not answer"):
            fs.mv(f"{name}/{source}", f"{name}/{target}")
        assert not (path / target).exists()
    assert (path / "moved/a").read_bytes() == b"1"
    monkeypatch.undo()
    fs.mv(f"{name}/moved/a", f"{name}/moved/b")
    fs.mkdir(f"{name}/into")
    fs.mv(f"{name}/moved", f"{name}/into")
    assert (path / "into/moved/b").read_bytes() == b"1"


def test_move_to_a_depth_leaves_what_is_deeper(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for key in ("deep/a", "deep/b", "deep/s/b", "deep/s/t/c"):
        fs.pipe_file(f"{name}/{key}", key.encode())
    fs.mv(f"{name}/deep", f"{name}/moved", recursive=True, maxdepth=1)
    left = [file for file in (path / "deep").rglob("*") if file.is_file()]
    assert sorted(file.read_bytes() for file in left) == [b"deep/s/b", b"deep/s/t/c"]
    moved = [file for file in (path / "moved").rglob("*") if file.is_file()]
    assert sorted(file.read_bytes() for file in moved) == [b"deep/a", b"deep/b"]


def test_removal_to_a_depth_leaves_what_is_deeper(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for key in ("gone/a", "gone/s/b"):
        fs.pipe_file(f"{name}/{key}", b"x")
    fs.rm(f"{name}/gone", recursive=True, maxdepth=1)
    assert [file.name for file in (path / "gone").rglob("*") if file.is_file()] == ["b"]


def test_removal_of_a_directory_and_what_is_in_it_goes_on(place: tuple[str, Path]) -> None:
    name, path = place
    fs = FusefsFileSystem()
    for pattern in (f"{name}/all/**", [f"{name}/all/s", f"{name}/all/s/b", f"{name}/all/z"]):
        for key in ("all/s/b", "all/z"):
            fs.pipe_file(f"{name}/{key}", b"x")
        fs.rm(pattern, recursive=True)
        assert [file for file in path.glob("all/**/*") if file.is_file()] == []


class Keys(MemoryFileSystem):
    """Lists all keys, as S3 does, and counts how often it is to forget them."""

    protocol = "keys"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    forgotten = 0

    def invalidate_cache(self, path: str | None = None) -> None:
        Keys.forgotten += 1


def test_move_out_of_a_fallback_removes_nothing_that_was_not_copied(
    place: tuple[str, Path],
) -> None:
    name, _ = place
    fsspec.register_implementation("keys", Keys, clobber=True)
    fs = FusefsFileSystem(fallback="keys", skip_instance_cache=True)
    keys = fsspec.filesystem("keys")
    for key in ("/other/d/x", "/other/d//y"):
        keys.pipe_file(key, key.encode())
    with pytest.raises(OSError, match="no file name"):
        fs.mv("/other/d", f"{name}/taken", recursive=True)
    assert sorted(keys.store) == ["/other/d//y", "/other/d/x"]
    fs.mv("/other/d", "/others/d", recursive=True)
    assert sorted(one.getvalue() for one in keys.store.values()) == [b"/other/d//y", b"/other/d/x"]


def test_a_fallback_forgets_its_listings_when_asked_to() -> None:
    fsspec.register_implementation("keys", Keys, clobber=True)
    fs = FusefsFileSystem(fallback="keys", skip_instance_cache=True)
    fs.exists("/other")
    Keys.forgotten = 0
    fs.invalidate_cache()
    fs.invalidate_cache("/other/d")
    assert Keys.forgotten == 2


class Slow(AsyncFileSystem):
    """As s3fs is one."""

    protocol = "slow"

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return b"there"


def test_an_asynchronous_caller_wraps_a_fallback_that_is_none() -> None:
    fsspec.register_implementation("slow", Slow, clobber=True)
    fs = FusefsFileSystem(fallback="slow", asynchronous=True, skip_instance_cache=True)
    assert fs.cat_file("unmounted/x") == b"there"


def test_other_versions_than_the_latest_are_refused(place: tuple[str, Path]) -> None:
    name, _ = place
    fs = FusefsFileSystem()
    fs.pipe_file(f"{name}/versioned", b"new")
    url = f"{name}/versioned"
    for ask in (fs.cat_file, fs.cat, fs.info, fs.open):
        with pytest.raises(ValueError, match="latest version"):
            ask(url, version_id="old")
    with pytest.raises(ValueError, match="latest version"):
        fs.cat_ranges([url], [0], [1], version_id="old", on_error="raise")


def test_transactions_write_names_of_any_length(place: tuple[str, Path]) -> None:
    name, path = place
    fs, long = FusefsFileSystem(), "\u6f22" * 80  # 240 bytes
    with fs.transaction, fs.open(f"{name}/{long}", "wb") as file:
        file.write(b"x")
    assert (path / long).read_bytes() == b"x"
