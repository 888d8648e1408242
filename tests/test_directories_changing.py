"""Directories that change while they are mounted: when a program sees it, and what never."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.libc import DirectoryStream
from tests.support.listing_server import ListingServer
from tests.support.mounting import Mount
from tests.support.s3_server import S3Server
from tests.support.semantics import states
from tests.support.sharing import drop_caches, mounted, read_all, until

SESSIONS = ("kernel", "pyfuse3")


def seen(path: Path) -> bytes | None:
    try:
        return read_all(path)
    except FileNotFoundError:
        return None


@states("A change in the bucket is seen when the metadata TTL has passed, at the latest.")
@pytest.mark.parametrize("case", ["changed", "deleted", "new"])
def test_a_change_is_seen_after_the_ttl(
    mount: Callable[..., Mount], bucket: Bucket, case: str
) -> None:
    bucket.put("d/other", b"other")
    if case != "new":
        bucket.put("d/file", b"old")
    here = mount("--metadata-ttl", "500ms")
    assert seen(here.path / "d" / "file") == (None if case == "new" else b"old")
    if case == "deleted":
        bucket.delete("d/file")
    else:
        bucket.put("d/file", b"new one")
    wanted = None if case == "deleted" else b"new one"
    until(lambda: seen(here.path / "d" / "file") == wanted, "the change")
    listed = ["other"] if case == "deleted" else ["file", "other"]
    until(lambda: sorted(os.listdir(here.path / "d")) == listed, "the listing")
    if wanted is not None:
        assert (here.path / "d" / "file").stat().st_size == len(wanted)


@states("With `--metadata-ttl 0s` every open asks the bucket, and sees a change at once.")
def test_a_ttl_of_zero_sees_every_change_at_once(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    here = mount("--metadata-ttl", "0s")
    path = here.path / "d" / "file"
    for number in range(5):
        data = b"%d" % number * (number + 1)
        bucket.put("d/file", data)
        assert read_all(path) == data
        assert path.stat().st_size == len(data)
        assert os.listdir(here.path / "d") == ["file"]
        bucket.delete("d/file")
        assert seen(path) is None


@states("With `--metadata-ttl indefinite` what was once listed is believed for ever.")
def test_an_indefinite_ttl_asks_never_again(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("d/file", b"old")
    here = mount("--metadata-ttl", "indefinite")
    assert read_all(here.path / "d" / "file") == b"old"
    bucket.put("d/file", b"newer")
    bucket.put("d/new", b"")
    drop_caches()
    before = here.status()["s3"]
    assert read_all(here.path / "d" / "file") == b"old"
    assert (here.path / "d" / "file").stat().st_size == 3
    assert seen(here.path / "d" / "new") is None
    assert here.status()["s3"] == before


def test_a_file_becomes_a_directory_and_back(mount: Callable[..., Mount], bucket: Bucket) -> None:
    here = mount("--metadata-ttl", "0s")
    name = here.path / "d" / "name"
    for _ in range(3):
        bucket.put("d/name", b"a file")
        assert read_all(name) == b"a file"
        bucket.delete("d/name")
        bucket.put("d/name/inside", b"in a directory")
        assert os.listdir(name) == ["inside"]
        assert read_all(name / "inside") == b"in a directory"
        bucket.delete("d/name/inside")


@pytest.mark.parametrize("session", SESSIONS)
@states("A directory ends with its last object, unless it has a marker.")
def test_a_directory_ends_with_its_last_object(session: str, s3: S3Server, tmp_path: Path) -> None:
    """On a server that only lists, for SeaweedFS keeps empty directories."""
    with (
        ListingServer(["d/only", "marked/", "marked/only", "other"]).serving() as server,
        mounted(
            s3, "s3://some-bucket", tmp_path, "--session", session, "--anonymous",
            "--metadata-ttl", "0s", endpoint_url=server.endpoint_url,
        ) as mount,
    ):  # fmt: skip
        assert os.listdir(mount.path) == ["d", "marked", "other"]
        assert os.listdir(mount.path / "d") == ["only"]
        server.keys = ["marked/", "other"]
        assert not (mount.path / "d").exists()
        assert os.listdir(mount.path / "marked") == []
        assert os.listdir(mount.path) == ["marked", "other"]


@states("A directory that is opened again shows what is there now, within the metadata TTL.")
def test_a_directory_opened_again_shows_new_names(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("d/first", b"")
    here = mount("--metadata-ttl", "300ms")
    with DirectoryStream(here.path / "d") as stream:
        assert "first" in stream.names()
        bucket.put("d/second", b"")
        until(lambda: os.listdir(here.path / "d") == ["first", "second"], "the new name")


def test_readers_of_a_directory_that_changes_see_each_name_at_most_once(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    stay = {f"stays-{n:02d}" for n in range(20)}
    for name in stay:
        bucket.put("d/" + name, b"")
    here = mount("--metadata-ttl", "0s")
    done = threading.Event()

    def change() -> None:
        n = 0
        while not done.is_set():
            bucket.put(f"d/comes-{n % 10}", b"")
            bucket.delete(f"d/comes-{(n + 5) % 10}")
            n += 1

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(30):
            names = os.listdir(here.path / "d")
            assert len(set(names)) == len(names)
            assert stay <= set(names)
    finally:
        done.set()
        changer.join()
